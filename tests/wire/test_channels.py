"""Channel options exist in gRPC, and the protos document the limits."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc

from residuum.rpc import channels
from residuum.v1 import inference_pb2, store_pb2
from residuum.wire import limits
from residuum.wire.ids import is_valid_id, make_id

NAMES = sorted({name for name, _ in [*channels.CHANNEL_OPTIONS, *channels.SERVER_OPTIONS]})
PROTOS = Path(__file__).parents[2] / "protos" / "residuum" / "v1"


@pytest.fixture(scope="module")
def library():
    """Return the bytes of gRPC's library, which contains the names of all options."""
    return Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_grpc_knows_the_option(library, name):
    assert name.encode() + b"\0" in library


def test_a_name_that_grpc_does_not_know_would_be_noticed(library):
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in library
    assert b"grpc.bogus_arg\0" not in library


def test_retried_methods_exist_and_are_unary():
    services = {
        service.full_name: service
        for module in (inference_pb2, store_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    }
    config = json.loads(dict(channels.CHANNEL_OPTIONS)["grpc.service_config"])
    for name in config["methodConfig"][0]["name"]:
        method = services[name["service"]].methods_by_name[name["method"]]
        assert not method.client_streaming
        assert not method.server_streaming


def test_the_default_message_limit_is_kept():
    assert dict(channels.CHANNEL_OPTIONS)["grpc.max_receive_message_length"] == 4 << 20 == limits.MAX_MESSAGE_BYTES


def test_two_servers_never_share_a_port():
    first = grpc.server(None, options=channels.SERVER_OPTIONS)
    port = first.add_insecure_port("127.0.0.1:0")
    second = grpc.server(None, options=channels.SERVER_OPTIONS)
    with pytest.raises(RuntimeError, match="bind"):
        second.add_insecure_port(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("capture.proto", f"at most {limits.MAX_CHUNK_POSITIONS}"),
        ("capture.proto", f"at most {limits.MAX_CHUNK_BYTES >> 20} MiB"),
        ("selection.proto", f"At most {limits.MAX_RANGES}."),
        ("steering.proto", f"At most {limits.MAX_OPERATIONS}."),
        ("inference.proto", f"at most {limits.MAX_DIGESTS_PER_CALL}."),
        ("inference.proto", f"At most {limits.MAX_STOP_STRINGS}."),
        ("inference.proto", f"1 to {limits.MAX_ID_LENGTH} of the characters"),
        ("store.proto", f"0 means {limits.DEFAULT_PAGE_SIZE}; more than {limits.MAX_PAGE_SIZE}"),
        ("tensor.proto", f"{limits.DIGEST_BYTES} bytes"),
    ],
)
def test_the_protos_state_the_limits(file, words):
    comments = " ".join(line.strip().removeprefix("//").strip() for line in (PROTOS / file).read_text().splitlines())
    assert words in comments


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "_x", "0", "x" * 128])
def test_good_ids(name):
    assert is_valid_id(name)


def test_ids_that_are_made_are_good():
    assert is_valid_id(make_id())


@pytest.mark.parametrize("name", ["", ".a", "-a", "a b", "a/b", "a\n", "x" * 129, "é", "²"])
def test_bad_ids(name):
    assert not is_valid_id(name)


def test_made_ids_differ():
    assert len({make_id() for _ in range(100)}) == 100
