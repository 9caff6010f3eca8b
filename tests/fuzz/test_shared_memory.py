"""The socket of shared memory under hostile peers: the store serves others, and keeps nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residuum.rpc.shared_memory import create_memory
from residuum.v1 import store_pb2
from residuum.wire.rows.shared_memory import MIN_READ_BYTES, READ, WRITE, Hello, encode_released
from store_svc.server import Store
from tests.store.support import Client, serving

pytestmark = pytest.mark.usefixtures("shared_memory")

KEYS = [bytes([number]) * 16 for number in range(3)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Client]]:
    gc.collect()  # memories of other tests are closed now, not while this one counts descriptors
    with serving(tmp_path_factory.mktemp("store") / "db") as (running, client):
        yield running, client


first_messages = st.one_of(
    st.binary(max_size=80),
    st.builds(lambda kind, key: Hello(kind, key).encode(), st.sampled_from([READ, WRITE, 0]), st.sampled_from(KEYS)),
)
descriptors = st.lists(st.sampled_from(["memory", "unsealed", "null", "socket", "pipe", "folder"]), max_size=6)
later = st.lists(st.one_of(st.binary(max_size=80), st.builds(encode_released, st.integers(0, 2**64 - 1))), max_size=3)
settings_of_all = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def made(kind: str) -> int:
    if kind == "memory":
        return create_memory(MIN_READ_BYTES)
    if kind == "unsealed":
        descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.truncate(descriptor, MIN_READ_BYTES)
        return descriptor
    if kind == "socket":
        return socket.socket(socket.AF_UNIX).detach()
    if kind == "pipe":
        reader, writer = os.pipe()
        os.close(writer)
        return reader
    return os.open("/dev/null" if kind == "null" else "/", os.O_RDONLY)


@settings_of_all
@given(first=first_messages, kinds=descriptors, rest=later, in_pieces=st.booleans())
def test_no_peer_breaks_the_store(store, first, kinds, rest, in_pieces):
    running, client = store
    before = foreign_descriptors()
    opened = [made(kind) for kind in kinds]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(0.05)
        peer.connect(running._shared_memory.path)
        try:
            if in_pieces:
                peer.send(first[: len(first) // 2])
                first = first[len(first) // 2 :]
            socket.send_fds(peer, [first or b"\0"], opened)
            for message in rest:
                peer.send(message)
            peer.recv(100)
        except OSError:
            pass
    for descriptor in opened:
        os.close(descriptor)
    with pytest.raises(grpc.RpcError, match="no capture"):
        list(client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="a", shared_memory_key=KEYS[0])))
    assert running._shared_memory._thread.is_alive()
    until_settled(running, before)


def foreign_descriptors() -> list[str]:
    """Return what this process has open of the kinds that peers send; its own sockets come and go."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(path.readlink()))
    return sorted(link for link in links if link.startswith(("/memfd", "pipe", "/dev/null")) or link == "/")


def until_settled(running: Store, descriptors_before: list[str]) -> None:
    """Wait until the store has dropped the peer: no memory, no mapping, and no descriptor is left."""
    deadline = time.monotonic() + 20
    while (
        len(running._shared_memory.memories)
        or running._shared_memory.memories._read_bytes
        or foreign_descriptors() != descriptors_before
    ):
        assert time.monotonic() < deadline, foreign_descriptors()
        time.sleep(0.002)
