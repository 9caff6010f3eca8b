"""The writer thread and the streams, without a server: what it tells streams, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import store_pb2
from residuum.wire.frames import parse_chunk
from store_svc.captures.capture_names import CaptureName
from store_svc.captures.catalog import Catalog
from store_svc.captures.lifecycle import Wait
from store_svc.database.db import Database
from store_svc.writing.append import AppendStream
from store_svc.writing.changes import Batch
from store_svc.writing.write_queue import Append, Command, WorkQueue
from store_svc.writing.writer import Writer, WriterOptions
from svc_common.security.tokens_file import ANYBODY
from tests.store.support import ONE_AND_SEVERAL, cells_of, describe, grid, make_chunk

pytestmark = ONE_AND_SEVERAL

LAYERS = [0, 1, 2]
LONG = 3600.0


class Stream:
    """A stream that records what the writer tells it."""

    def __init__(self, *, failed: bool = False) -> None:
        self.failed = failed
        self.told: list[tuple[str, int]] = []
        self.ended = threading.Event()
        self._acked = threading.Condition()

    def committed(self, number: int, rejections: list[store_pb2.ChunkRejection]) -> None:
        assert not rejections
        self._note("committed", number)

    def synced(self, number: int) -> None:
        self._note("synced", number)

    def fail(self, _failure: Failure) -> None:
        self._note("failed", 0)

    def finished(self) -> None:
        self.ended.set()

    def wait_for(self, word: str, number: int) -> None:
        with self._acked:
            assert self._acked.wait_for(lambda: (word, number) in self.told, 10)

    def _note(self, word: str, number: int) -> None:
        with self._acked:
            self.told.append((word, number))
            self._acked.notify_all()


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
def writer(tmp_path: Path, catalog: Catalog, shards: int) -> Iterator[Writer]:
    """A writer that is not started and never syncs by time. Its first work opens a capture."""
    db = Database(tmp_path / "db", 64 << 20, sync_roots=False, shards=shards)
    options = WriterOptions(ack_synced=False, sync_interval=LONG, waits=dict.fromkeys(Wait, LONG))
    writer = Writer(db, catalog, options, on_death=lambda: None)
    writer.queue.call(Command(partial(Batch.open, description=describe()), "a", reserve=False))
    yield writer
    writer.stop()
    db.close()


def append(writer: Writer, stream: Stream, number: int) -> None:
    """Queue a chunk at the position equal to its number."""
    frame = memoryview(make_chunk(LAYERS, [number]))
    writer.queue.append(Append(stream, number, CaptureName("", "a"), (frame, parse_chunk(frame)), len(frame)))


def test_queued_messages_of_a_failed_stream_are_dropped(writer: Writer, catalog: Catalog) -> None:
    """The stream has failed, so its client knows that nothing after the last acknowledgement was written."""
    failed, good = Stream(failed=True), Stream()
    append(writer, failed, 1)
    append(writer, good, 2)
    writer.queue.finish(good)
    writer.start()
    assert good.ended.wait(10)
    feed = catalog.feed_of(1)
    assert feed
    assert cells_of(feed.capture.manifest().present) == grid(LAYERS, [2])
    assert failed.told == []


def test_a_commit_syncs_the_one_before(writer: Writer) -> None:
    stream = Stream()
    writer.start()
    append(writer, stream, 1)
    stream.wait_for("committed", 1)
    append(writer, stream, 2)
    stream.wait_for("committed", 2)
    assert stream.told == [("committed", 1), ("synced", 1), ("committed", 2)]
    writer.queue.finish(stream)
    assert stream.ended.wait(10)
    assert stream.told[-1] == ("synced", 2)


def rejection(number: int) -> store_pb2.ChunkRejection:
    failure = Failure(Reason.ERROR_REASON_UNKNOWN_CAPTURE, "no such capture")
    return store_pb2.ChunkRejection(number=number, error=failure.to_item_error())


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_no_acknowledgement_passes_a_rejection_that_it_does_not_carry(end: str) -> None:
    stream = AppendStream(WorkQueue(), ANYBODY)
    stream.committed(5000, [rejection(number) for number in range(2, 5001, 2)])
    stream.synced(5000)
    if end == "finished":
        stream.finished()
    else:
        stream.fail(Failure(Reason.ERROR_REASON_NOT_SERVING, "The store is stopping."))
    answers = stream.responses()
    told: list[int] = []
    for through in (2049, 4097, 5000):
        answer = next(answers)
        assert (answer.committed_through, answer.synced_through) == (through, through)
        told += [item.number for item in answer.rejections]
        assert told == list(range(2, through + 1, 2))
    if end == "finished":
        assert list(answers) == []
    else:
        with pytest.raises(Failure, match="stopping"):
            next(answers)
