"""Faulty writers: bytes that change in transit, and two writers of one capture."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.rows.frames import append_prefix, checksum, chunk_prefix
from tests.faults.proxy import Flipper, Proxy
from tests.faults.support import (
    BLOCK,
    COMPLETE,
    DEADLINE,
    INCOMPLETE,
    LAYERS,
    Capture,
    Ring,
    Shippers,
    Store,
    named_rows,
)
from tests.waiting import wait_for


@pytest.fixture
def start_proxy() -> Iterator[Callable[..., Proxy]]:
    proxies: list[Proxy] = []

    def start(store: Store, change: Callable[[bytes], bytes]) -> Proxy:
        proxies.append(Proxy(store.port, change))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()


@pytest.mark.parametrize("once", [True, False])
def test_a_byte_that_changes_between_shipper_and_store_is_never_stored(
    once: bool,
    start_store: Callable[..., Store],
    start_ring: Callable[..., Ring],
    start_shippers: Callable[..., Shippers],
    start_proxy: Callable[..., Proxy],
) -> None:
    """The store rejects a wrong checksum and the shipper sends again; after a second failure it reports a loss."""
    store, ring = start_store(), start_ring()
    capture, other = Capture("changed", 4 * BLOCK), Capture("other", 4 * BLOCK)
    rows = [capture.values([1], [position]).tobytes() for position in range(BLOCK, 2 * BLOCK)]
    flipper = Flipper(rows, once=once)
    start_shippers(start_proxy(store, flipper).endpoint)
    for each in (capture, other):
        store.open(each)
    for mine, theirs in zip(capture.blocks(), other.blocks(), strict=True):
        ring.publish_rows(capture, mine)
        ring.publish_rows(other, theirs)
    assert ring.drain(DEADLINE)
    assert flipper.flipped == 1 if once else flipper.flipped >= 2
    store.seal_and_check(other)
    if once:
        store.seal_and_check(capture)
        return
    store.seal(capture)
    manifest = store.manifest(capture, wait=True)
    assert manifest.state == INCOMPLETE
    assert manifest.incomplete_reason == capture_pb2.INCOMPLETE_REASON_WRITE_FAILED
    assert "checksum" in manifest.incomplete_detail
    missing = {(layer, position) for layer in LAYERS for position in range(BLOCK, 2 * BLOCK)}
    assert named_rows(manifest.missing) == missing
    found = store.read(capture)
    assert (set(found.times), found.doubled, found.wrong) == (capture.rows() - missing, 0, 0)


def messages(capture: Capture, sender: Capture, cuts: Sequence[range]) -> Iterator[bytes]:
    """Yield a stream's messages with rows of one capture, in these chunks. The values depend on the sender's name."""
    for number, positions in enumerate(cuts, start=1):
        payload = sender.values(LAYERS, positions).tobytes()
        chunk = chunk_prefix(capture.header(positions), checksum(payload), len(payload)) + payload
        yield append_prefix(number, capture.name, len(chunk)) + chunk


def test_two_writers_of_one_capture_store_each_row_once_and_the_first_one_stays(
    start_store: Callable[..., Store],
) -> None:
    """Both writers send every row in different chunks and, although no writer should, with different values."""
    store = start_store()
    capture, other = Capture("both", 1024), Capture("another", 1024)
    store.open(capture)
    append = store.channel.stream_stream(
        "/residuum.v1.StoreService/AppendChunks", None, store_pb2.AppendChunksResponse.FromString
    )
    started = threading.Barrier(2)

    def write(sender: Capture, step: int, acked: list[int]) -> None:
        cuts = [range(at, min(at + step, capture.length)) for at in range(0, capture.length, step)]
        started.wait(DEADLINE)
        answers = list(append(messages(capture, sender, cuts), timeout=DEADLINE))
        assert not any(answer.rejections for answer in answers)
        acked.append(answers[-1].committed_through == len(cuts))

    acked: list[int] = []
    writers = [
        threading.Thread(target=write, args=(sender, step, acked)) for sender, step in ((capture, 7), (other, 32))
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert acked == [True, True]

    before = {key: values.tobytes() for key, values in stored_values(store, capture).items()}
    assert before.keys() == capture.rows()
    for (layer, position), value in before.items():
        either = {sender.values([layer], [position]).tobytes() for sender in (capture, other)}
        assert value in either, "each row comes from one writer"
    list(append(messages(capture, other, list(capture.blocks())), timeout=DEADLINE))
    store.seal(capture)
    assert store.manifest(capture, wait=True).state == COMPLETE
    assert {key: values.tobytes() for key, values in stored_values(store, capture).items()} == before


def stored_values(store: Store, capture: Capture) -> dict:
    """Return each row's values. Fails on a duplicate row."""
    rows = {}
    for answer in store.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id=capture.name)):
        header = answer.chunk.header
        values = memoryview(answer.chunk.payload)
        row_bytes = 4 * capture.width
        places = ((layer, position) for layer in header.layers for position in header.positions)
        for at, place in enumerate(places):
            assert place not in rows
            rows[place] = values[at * row_bytes : (at + 1) * row_bytes]
    return rows


def test_a_shipper_that_continues_after_it_was_replaced_duplicates_nothing(
    start_store: Callable[..., Store], start_ring: Callable[..., Ring], start_shippers: Callable[..., Shippers]
) -> None:
    """A shipper loses its worker while the store is suspended. It and its successor send the same rows."""
    store, ring = start_store(), start_ring()
    capture = Capture("twice", 8 * BLOCK)
    store.open(capture)
    start_shippers(store.endpoint)
    wait_for(lambda: ring.stats().connected_shippers == 1, "a shipper")
    with store.standing_still():
        for block in capture.blocks():
            ring.publish_rows(capture, block)
        wait_for(lambda: not ring._dispatcher._inbox, "a shipper with rows")
        (link,) = ring._dispatcher._links
        link.connection.shutdown(socket.SHUT_RDWR)
        wait_for(lambda: link not in ring._dispatcher._links, "a broken connection")
        wait_for(lambda: ring.stats().connected_shippers == 1, "a new connection of the shipper")
    assert ring.drain(DEADLINE)
    store.seal_and_check(capture)
    stats = store.stub.GetStats(store_pb2.GetStatsRequest())
    assert (stats.chunks_written, stats.chunks_repeated) == (8, 8)
