"""The disk is full, or the map has reached its limit.

Stored rows stay readable. The store acknowledges nothing until there is room; then everything recovers on its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from residuum.rpc.errors import Failure, Reason, failure_from_rpc_error
from residuum.v1 import store_pb2
from residuum.wire.rows.frames import append_prefix, checksum, chunk_prefix
from tests.faults.support import BLOCK, COMPLETE, DEADLINE, LAYERS, Capture, Ring, Shippers, Store
from tests.small_disk import fill
from tests.small_disk import small_disk as disk
from tests.waiting import wait_for

MIB = 1 << 20
DISK_BYTES = 24 * MIB
WIDE = 4096
"""Elements of a row, so that a block of 32 positions is 2 MiB."""
BLOCK_BYTES = len(LAYERS) * BLOCK * WIDE * 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "disk", DISK_BYTES) as folder:
        yield folder


def publish_all(ring: Ring, capture: Capture) -> threading.Thread:
    """Publish a capture as a model does, waiting while the ring is full."""
    step = threading.Thread(target=lambda: [ring.publish_rows(capture, block) for block in capture.blocks()])
    step.start()
    return step


def refusal(store: Store, capture: Capture) -> Failure | None:
    """Append the first block of a capture once. Return why the store refused it."""
    header = capture.header(range(BLOCK), LAYERS[:1])
    payload = capture.values(LAYERS[:1], range(BLOCK)).tobytes()
    chunk = chunk_prefix(header, checksum(payload), len(payload)) + payload
    append = store.channel.stream_stream(
        "/residuum.v1.StoreService/AppendChunks", None, store_pb2.AppendChunksResponse.FromString
    )
    try:
        list(append(iter([append_prefix(1, capture.name, len(chunk)) + chunk]), timeout=DEADLINE))
    except grpc.RpcError as error:
        return failure_from_rpc_error(error)
    return None


def check_earlier(store: Store, capture: Capture) -> None:
    found = store.read(capture)
    assert (found.manifest.state, found.doubled, found.wrong) == (COMPLETE, 0, 0)
    assert set(found.times) == capture.rows()


def test_a_full_disk_delays_rows_until_there_is_room(
    small_disk: Path,
    start_store: Callable[..., Store],
    start_ring: Callable[..., Ring],
    start_shippers: Callable[..., Shippers],
) -> None:
    store, ring = start_store(folder=small_disk), start_ring(ring_bytes=2 * BLOCK_BYTES)
    shippers = start_shippers(store.endpoint)
    earlier, capture = Capture("earlier", 2 * BLOCK, WIDE), Capture("later", 6 * BLOCK, WIDE)
    for name in (earlier, capture):
        store.open(name)
    publish_all(ring, earlier).join(DEADLINE)
    store.seal_and_check(earlier)

    filler = small_disk / "filler"
    fill(filler)
    step = publish_all(ring, capture)
    wait_for(lambda: ring.stats().waits, "a full ring")
    failure = refusal(store, capture)
    assert failure
    assert (failure.reason, failure.code) == (Reason.ERROR_REASON_STORE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED)
    check_earlier(store, earlier)
    assert ring.acked(capture) == set()

    filler.unlink()
    step.join(DEADLINE)
    assert ring.drain(DEADLINE)
    assert shippers.restarts == 0
    store.seal_and_check(capture)
    check_earlier(store, earlier)
    assert store.stop() == 0
    store.start()
    check_earlier(store, earlier)
    check_earlier(store, capture)


def test_a_full_map_delays_rows_until_a_capture_is_deleted(
    start_store: Callable[..., Store], start_ring: Callable[..., Ring], start_shippers: Callable[..., Shippers]
) -> None:
    store, ring = start_store("--max-bytes", str(32 * MIB)), start_ring(ring_bytes=6 * BLOCK_BYTES)
    start_shippers(store.endpoint)
    kept, doomed = Capture("kept", 2 * BLOCK, WIDE), Capture("doomed", 8 * BLOCK, WIDE)
    capture = Capture("later", 11 * BLOCK, WIDE)
    for name in (kept, doomed, capture):
        store.open(name)
    for earlier in (kept, doomed):
        publish_all(ring, earlier).join(DEADLINE)
        store.seal_and_check(earlier)

    step = publish_all(ring, capture)
    wait_for(lambda: ring.stats().waits, "a full ring")
    wait_for(lambda: "the store is full" in store.log.read_text(), "a full store")
    assert step.is_alive()
    for earlier in (kept, doomed):
        check_earlier(store, earlier)
    store.delete(doomed)
    step.join(DEADLINE)
    assert ring.drain(DEADLINE), "the space of a deleted capture is reused"
    store.seal_and_check(capture)
    check_earlier(store, kept)
    assert (store.folder / "data" / "data.mdb").stat().st_size <= 32 * MIB
