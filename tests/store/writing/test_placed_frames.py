"""Frames whose payload comes from shared memory: how they are kept, and what is left of one that does not match."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import store_pb2
from residuum.wire.rows.frames import ChunkView, parse_chunk, parse_stored, split_chunk
from store_svc.captures.capture_names import CaptureName
from store_svc.captures.catalog import Catalog
from store_svc.captures.catalog_loading import load_catalog
from store_svc.captures.lifecycle import Wait
from store_svc.database.db import DamagedError, Database, PayloadChangedError, Table, Txn
from store_svc.database.frames import PlacedFrame
from store_svc.writing import placed
from store_svc.writing.changes import Batch, purge_some
from store_svc.writing.placed import placed_frame
from store_svc.writing.write_queue import Append, Command
from store_svc.writing.writer import Writer, WriterOptions
from tests.store.database.test_shards import key
from tests.store.support import ONE_AND_SEVERAL, cells_of, describe, grid, make_chunk, serving, whole_frames

pytestmark = ONE_AND_SEVERAL

MIB = 1 << 20
LAYERS = [0, 1, 2]
NAME = CaptureName("", "a")
Open = Callable[[], Database]


@pytest.fixture
def opened(tmp_path: Path, shards: int) -> Iterator[Open]:
    """Opens the same database again and again, and closes the one before."""
    last: list[Database] = []

    def reopen() -> Database:
        while last:
            last.pop().close()
        last.append(Database(tmp_path / "db", 64 * MIB, sync_roots=False, shards=shards))
        return last[0]

    yield reopen
    while last:
        last.pop().close()


def frame_of(chunk: bytes, memory: bytearray | None = None) -> PlacedFrame:
    """Return the frame of a chunk. Its payload is in `memory` if given."""
    head, payload = split_chunk(chunk)
    where = memoryview(memory if memory is not None else bytearray(len(payload)))
    where[:] = payload
    return PlacedFrame(bytes(head), where, parse_chunk(chunk).crc32c)


def damaged_frame_of(chunk: bytes) -> PlacedFrame:
    """Return the frame of a chunk whose payload does not match its checksum."""
    frame = frame_of(chunk)
    frame.payload[0] ^= 1
    return frame


def kept(db: Database) -> dict[bytes, bytes]:
    with db.read() as txn:
        return whole_frames(txn)


def test_both_kinds_of_frames_are_kept_until_they_are_deleted(opened: Open) -> None:
    chunks = {key(1, position=at): make_chunk(LAYERS, [at]) for at in range(20)}

    def put(txn: Txn) -> None:
        for at, (found, chunk) in enumerate(chunks.items()):
            txn.put_frame(found, chunk if at % 3 == 0 else frame_of(chunk))

    db = opened()
    db.write(put)
    assert kept(db) == chunks
    db = opened()
    assert kept(db) == chunks
    with db.read() as txn:
        assert txn.frame(key(2)) is None
        assert txn.frame(key(1, position=4)).parse().verify()
    db.write(lambda txn: txn.delete(Table.FRAMES, key(1, position=1)))
    del chunks[key(1, position=1)]
    assert kept(db) == chunks
    db.write(lambda txn: txn.put(Table.DOOMED, key(1)[:8], b""))
    while db.write(partial(purge_some, limit=3), reserve=True):
        pass
    with db.read() as txn:
        assert txn.count(Table.FRAMES) == 0
        assert not any(txn.get(Table.HEADS, found) for found in chunks)


def test_the_format_changes_with_the_first_frame_in_two_parts(opened: Open) -> None:
    """Older stores would take a payload for a Chunk, so they must refuse the database; see DamagedError in `db`."""
    db = opened()
    db.write(lambda txn: txn.put_frame(key(1), make_chunk(LAYERS, [0])))
    with db.read() as txn:
        assert bytes(txn.get(Table.META, b"format") or b"") in {b"2", b"3"}
    db.write(lambda txn: txn.put_frame(key(1, position=1), frame_of(make_chunk(LAYERS, [1]))))
    with db.read() as txn:
        assert txn.get(Table.META, b"format") == b"4"
    db = opened()
    assert len(kept(db)) == 2
    db.write(lambda txn: txn.put(Table.META, b"format", b"7"))
    with pytest.raises(DamagedError, match="reads the formats"):
        opened()


def test_a_payload_that_does_not_match_writes_nothing_at_all(opened: Open) -> None:
    db = opened()
    good = {key(1, position=at): make_chunk(LAYERS, [at]) for at in range(8)}
    bad = damaged_frame_of(make_chunk(LAYERS, [8]))

    def put(txn: Txn) -> None:
        txn.put(Table.META, b"beside", b"it")
        for found, chunk in good.items():
            txn.put_frame(found, frame_of(chunk))
        txn.put_frame(key(1, position=8), bad)

    with pytest.raises(PayloadChangedError):
        db.write(put)
    db = opened()
    assert kept(db) == {}
    with db.read() as txn:
        assert txn.get(Table.META, b"beside") is None


def test_open_captures_are_loaded_from_frames_in_two_parts(opened: Open, tmp_path: Path) -> None:
    db = opened()
    catalog = load_catalog(db)
    for change in (
        lambda batch: batch.open(describe("a")),
        lambda batch: batch.append(NAME, frame_of(make_chunk(LAYERS, [0, 1])), parse_chunk(make_chunk(LAYERS, [0, 1]))),
    ):
        db.write(lambda txn, change=change: _changed(txn, catalog, change)).publish()
    before = catalog.feed_of(1).capture
    opened().close()
    with serving(tmp_path / "db") as (_, client):
        assert client.read()[0] == grid(LAYERS, [0, 1])
        assert client.get().num_bytes == before.num_bytes == len(make_chunk(LAYERS, [0, 1]))


def _changed(txn: Txn, catalog: Catalog, change: Callable[[Batch], object]) -> Batch:
    batch = Batch(txn, catalog)
    change(batch)
    return batch


class Stream:
    """A stream that records which messages were rejected, and waits for the last."""

    failed = False

    def __init__(self, last: int) -> None:
        self.last = last
        self.rejected: dict[int, str] = {}
        self.done = threading.Event()

    def committed(self, number: int, rejections: list[store_pb2.ChunkRejection]) -> None:
        self.rejected |= {rejection.number: rejection.error.reason for rejection in rejections}
        if number == self.last:
            self.done.set()

    def synced(self, _number: int) -> None:
        pass

    def fail(self, failure: Failure) -> None:
        raise AssertionError(failure)

    def finished(self) -> None:
        pass


@pytest.fixture
def written(opened: Open) -> Iterator[tuple[Writer, Catalog]]:
    catalog = Catalog()
    options = WriterOptions(ack_synced=False, sync_interval=3600.0, waits=dict.fromkeys(Wait, 3600.0))
    writer = Writer(opened(), catalog, options, on_death=lambda: None)
    writer.queue.call(Command(partial(Batch.open, description=describe()), "a", reserve=False))
    yield writer, catalog
    writer.stop()


def queue(writer: Writer, stream: Stream, number: int, frame: PlacedFrame) -> None:
    writer.queue.append(Append(stream, number, NAME, (frame, parse_stored(frame.head, frame.payload)), frame.num_bytes))


def test_only_the_payloads_that_do_not_match_are_rejected(written: tuple[Writer, Catalog]) -> None:
    writer, catalog = written
    stream = Stream(last=30)
    for number in range(1, 31):
        frame_of_it = frame_of if number % 7 else damaged_frame_of
        queue(writer, stream, number, frame_of_it(make_chunk(LAYERS, [number])))
    writer.start()
    assert stream.done.wait(10)
    mismatch = Reason.ERROR_REASON_CHECKSUM_MISMATCH
    assert stream.rejected == dict.fromkeys((7, 14, 21, 28), mismatch)
    good = [number for number in range(1, 31) if number % 7]
    assert cells_of(catalog.feed_of(1).capture.manifest().present) == grid(LAYERS, good)


def test_a_writer_that_keeps_changing_its_memory_costs_one_more_transaction(
    written: tuple[Writer, Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check of a transaction finds another payload changed. So the second try must not depend on the memory."""
    writer, catalog = written
    memories = [bytearray(len(split_chunk(make_chunk(LAYERS, [number]))[1])) for number in range(1, 9)]
    stream = Stream(last=8)
    tries = []
    write = writer._db.write

    def spoil_and_write(change, *, reserve):
        if not reserve:  # housekeeping
            memories[len(tries)][0] ^= 1
            tries.append(change)
        return write(change, reserve=reserve)

    monkeypatch.setattr(writer._db, "write", spoil_and_write)
    for number, memory in enumerate(memories, 1):
        queue(writer, stream, number, frame_of(make_chunk(LAYERS, [number]), memory))
    writer.start()
    assert stream.done.wait(10)
    assert set(stream.rejected) == {1}, "the second payload was copied before it changed"
    assert len(tries) == 2
    assert cells_of(catalog.feed_of(1).capture.manifest().present) == grid(LAYERS, range(2, 9))


def test_rows_that_are_there_already_are_cut_out_of_a_verified_copy(written: tuple[Writer, Catalog]) -> None:
    writer, catalog = written
    stream = Stream(last=3)
    chunk = make_chunk(LAYERS, [0, 1])
    queue(writer, stream, 1, frame_of(make_chunk(LAYERS, [0])))
    queue(writer, stream, 2, damaged_frame_of(chunk))
    queue(writer, stream, 3, frame_of(chunk))
    writer.start()
    assert stream.done.wait(10)
    assert set(stream.rejected) == {2}
    assert cells_of(catalog.feed_of(1).capture.manifest().present) == grid(LAYERS, [0, 1])
    assert all(chunk.verify() for chunk in _chunks(writer))


def _chunks(writer: Writer) -> list[ChunkView]:
    with writer._db.read() as txn:
        return [parse_chunk(frame) for frame in whole_frames(txn).values()]


def test_a_placed_frame_is_a_view_of_the_memory() -> None:
    """Nothing is copied before LMDB does."""
    chunk = parse_chunk(make_chunk(LAYERS, [0]))
    memory = np.zeros(4096, dtype=np.uint8)
    memory[16 : 16 + len(chunk.payload)] = np.frombuffer(chunk.payload, dtype=np.uint8)
    message = store_pb2.PlacedChunk(header=chunk.header, crc32c=chunk.crc32c, offset=16, num_bytes=len(chunk.payload))
    frame, _ = placed.placed_frame(memory, message)
    assert np.shares_memory(np.frombuffer(frame.payload, dtype=np.uint8), memory)
    assert frame.copied()[0] == placed_frame(memory, message)[0].copied()[0]
