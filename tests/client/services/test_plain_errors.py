"""Messages for mistakes that new users make."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

import residuum
from residuum.rpc.channels import open_channel
from residuum.transport.failures import from_rpc_error
from residuum.v1 import capture_pb2, store_pb2, store_pb2_grpc
from residuum.wire.labels import LabelError, parse_where, to_label


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("y ==1", "use a single = instead of =="),
        ("y == 1 and x = 2", "use a single = instead of =="),
        ("y = 1 or x = 2", "'or' is not supported; use one filter for each case"),
        ("y in 1", "'in' is not supported; use one filter for each value"),
        ("not y = 1", "'not' is not supported; use !="),
    ],
)
def test_a_filter_in_another_language_is_refused_by_name(where, told):
    with pytest.raises(LabelError, match=told):
        parse_where(where)


def test_words_of_other_languages_may_be_names_and_values():
    assert [item.value for item in parse_where("in = or and not = like")] == ["or", "like"]


async def test_a_span_that_does_not_exist_is_refused_with_the_choices(client, captured):
    acts = await client.activations(captured)
    with pytest.raises(
        residuum.InvalidRequest, match=r"There is no span 'asistant'\. Use 'prompt', 'reply', or a role"
    ):
        acts.select(span="asistant")
    with pytest.raises(residuum.NoMessageSpans):
        acts.select(span="assistant")


async def test_an_unknown_role_is_refused_by_name(client, peer):
    told = r"the role 'usr', which does not exist\. Choose among system, user"
    with pytest.raises(residuum.InvalidRequest, match=told):
        await client.generate([{"role": "usr", "content": "a"}])
    assert peer.calls == []


async def test_a_refusal_names_the_labels_and_the_python_argument(client, store, captured):
    manifest = (await client.manifest(captured)).proto
    description = capture_pb2.CaptureDescription()
    description.CopyFrom(manifest.description)
    description.spec.labels.append(to_label("y", 1))
    request = store_pb2.OpenCaptureRequest(description=description, if_exists=capture_pb2.IF_EXISTS_SKIP)
    with open_channel(store.endpoint) as channel, pytest.raises(grpc.RpcError) as caught:
        store_pb2_grpc.StoreServiceStub(channel).OpenCapture(request)
    told = str(from_rpc_error(caught.value, store.endpoint))
    assert "its set of labels differs (it was none, now y = 1)" in told
    assert "Set if_exists='replace' to replace it" in told


async def test_a_call_that_ends_while_it_is_sent_fails_with_words_that_help():
    """In a few of a hundred such calls, grpc.aio loses the service's answer."""

    async def refuse(_, context):
        await context.abort(grpc.StatusCode.UNAVAILABLE, "it drains")

    server = grpc.aio.server()
    handler = grpc.stream_unary_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", {"Put": handler})])
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(endpoint) as channel:
            put = channel.stream_unary("/test/Put")
            for _ in range(100):
                with pytest.raises(grpc.RpcError) as caught:
                    await put(iter([bytes(1 << 20)] * 8))
                told = str(from_rpc_error(caught.value, endpoint))
                assert "it drains" in told or "gRPC lost its answer." in told, told
    finally:
        await server.stop(0)


_NO_ADDRESS = "failed to connect to all addresses; last error: UNKNOWN: "
_NO_NAME = "errors resolving gpu:9: [field:hostname lookup error:"


@pytest.mark.parametrize(
    ("details", "told"),
    [
        (f"{_NO_ADDRESS}ipv6:%5B::1%5D:9: Failed to connect to remote host: Connection refused", "Connection refused"),
        (f"{_NO_ADDRESS}ipv4:127.0.0.1:9: tcp handshaker shutdown", "tcp handshaker shutdown"),
        (f"{_NO_NAME}address lookup failed for gpu:9: Domain name not found]", "Domain name not found"),
        ("the proxy [a:1] drains", "the proxy [a:1] drains"),
    ],
)
def test_only_the_cause_of_a_failed_connection_is_told(details, told):
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    assert f" ({told}). " in str(from_rpc_error(error, "gpu:9"))


def test_a_lost_answer_is_called_that():
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "Internal error from Core"
    )
    failure = from_rpc_error(error, "host:1")
    assert type(failure) is residuum.ServerFault
    assert failure.metadata == {"endpoint": "host:1"}
    assert str(failure) == (
        "host:1 ended the call while the client was sending, and gRPC lost its answer. The service's log has it. Try "
        "once more."
    )


def test_pull_takes_the_filters_of_ls(cli, captured, tmp_path):
    code, _, _ = cli("pull", "--prefix", captured, "--state", "complete", "--out", tmp_path)
    assert code == 0
    assert (tmp_path / f"{captured}.safetensors").exists()
    code, _, err = cli("pull", "--prefix", captured, "--state", "aborted", "--out", tmp_path)
    assert "no captures match" in err


def test_info_shows_no_empty_check_of_the_store(cli):
    code, out, _ = cli("info")
    assert code == 0
    assert "num_layers" in out
    assert "store_reachable" not in out
    assert "store_detail" not in out
