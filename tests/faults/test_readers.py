"""Slow, suspended and vanished readers do not delay writers or other readers, and pin no pages."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import grpc
import pytest

from residuum.v1 import store_pb2
from tests.faults.support import (
    BLOCK,
    DEADLINE,
    ENVIRONMENT,
    Capture,
    Ring,
    Shippers,
    Store,
    collect,
)
from tests.waiting import wait_for

MIB = 1 << 20
WIDE = 4096

READER = """
import sys
from residuum.rpc.channels import open_channel
from residuum.v1 import store_pb2, store_pb2_grpc

stub = store_pb2_grpc.StoreServiceStub(open_channel(sys.argv[1]))
answers = stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id=sys.argv[2], follow=True))
for number, answer in enumerate(answers):
    print(number, flush=True)
"""


@pytest.fixture
def start_reader() -> Iterator[Callable[[Store, Capture], subprocess.Popen]]:
    """Starts a process that follows a capture and prints a line for each message."""
    readers: list[subprocess.Popen] = []

    def start(store: Store, capture: Capture) -> subprocess.Popen:
        command = [sys.executable, "-c", READER, store.endpoint, capture.name]
        readers.append(subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE))
        return readers[-1]

    yield start
    for reader in readers:
        reader.kill()
        reader.communicate()


@pytest.fixture
def write(start_ring: Callable[..., Ring], start_shippers: Callable[..., Shippers]) -> Callable[..., None]:
    """Writes a capture through a ring and a shipper, until it is acknowledged."""
    rings: list[Ring] = []

    def write(store: Store, capture: Capture) -> None:
        if not rings:
            rings.append(start_ring(ring_bytes=8 * MIB))
            start_shippers(store.endpoint)
        store.open(capture)
        for block in capture.blocks():
            rings[0].publish_rows(capture, block)
        assert rings[0].drain(DEADLINE)

    return write


def test_a_slow_reader_keeps_neither_pages_nor_writers(
    start_store: Callable[..., Store], write: Callable[..., None]
) -> None:
    """A reader reads one chunk and stops, while more captures come and go than fit into the map."""
    store = start_store("--max-bytes", str(40 * MIB))
    slow = Capture("slow", 5 * BLOCK, WIDE)  # 10 MiB, far more than gRPC's read-ahead
    write(store, slow)
    store.seal_and_check(slow)
    answers = store.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id=slow.name), timeout=2 * DEADLINE)
    first = [next(answers), next(answers)]
    for number in range(6):
        capture = Capture(f"passing-{number}", 5 * BLOCK, WIDE)
        write(store, capture)
        store.seal_and_check(capture)
        store.delete(capture)
    found = collect(slow, iter([*first, *answers]))
    assert (found.doubled, found.wrong) == (0, 0)
    assert set(found.times) == slow.rows()


@pytest.mark.parametrize("at", ["following", "in mid-stream"])
def test_a_reader_that_vanishes_frees_its_slot(
    at: str,
    start_store: Callable[..., Store],
    write: Callable[..., None],
    start_reader: Callable[[Store, Capture], subprocess.Popen],
) -> None:
    """With a single slot, a vanished reader must free it, whatever it was doing."""
    store = start_store("--max-streams", "1")
    capture = Capture("read", 5 * BLOCK, WIDE if at == "in mid-stream" else 16)
    write(store, capture)
    reader = start_reader(store, capture)
    assert reader.stdout
    assert reader.stdout.readline() == b"0\n"
    if at == "in mid-stream":
        reader.send_signal(signal.SIGSTOP)  # it reads nothing more, and the store waits for it
    with pytest.raises(grpc.RpcError) as refused:
        list(store.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id=capture.name), timeout=DEADLINE))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    reader.kill()
    reader.wait()

    def read_again() -> bool:
        try:
            found = store.read(capture)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017 - not yet noticed
            return False
        return set(found.times) == capture.rows()

    wait_for(read_again, "room for another reader")
