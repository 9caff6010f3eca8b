"""The writer thread and the streams, without a server: what it tells streams, and when."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import store_pb2
from residuum.wire.rows.frames import parse_chunk
from store_svc.captures.capture_names import CaptureName
from store_svc.captures.catalog import Catalog
from store_svc.captures.lifecycle import Wait
from store_svc.database.db import Database
from store_svc.writing.append import AppendStream
from store_svc.writing.changes import Batch
from store_svc.writing.early_rows import ArrivedOpens
from store_svc.writing.write_queue import Append, Command, WorkQueue
from store_svc.writing.writer import Writer, WriterOptions
from svc_common.security.tokens_file import ANYBODY
from tests.store.support import (
    ABORTED,
    ONE_AND_SEVERAL,
    POST,
    cells_of,
    describe,
    grid,
    make_chunk,
    seal_request,
    without_collections,
)
from tests.waiting import wait_for

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


def append(queue: WorkQueue, stream: Stream, number: int, capture_id: str = "a") -> None:
    """Queue a chunk at the position equal to its number."""
    frame = memoryview(make_chunk(LAYERS, [number]))
    queue.append(Append(stream, number, CaptureName("", capture_id), (frame, parse_chunk(frame)), len(frame)))


def test_queued_messages_of_a_failed_stream_are_dropped(writer: Writer, catalog: Catalog) -> None:
    """The stream has failed, so its client knows that nothing after the last acknowledgement was written."""
    failed, good = Stream(failed=True), Stream()
    append(writer.queue, failed, 1)
    append(writer.queue, good, 2)
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
    append(writer.queue, stream, 1)
    stream.wait_for("committed", 1)
    append(writer.queue, stream, 2)
    stream.wait_for("committed", 2)
    assert stream.told == [("committed", 1), ("synced", 1), ("committed", 2)]
    writer.queue.finish(stream)
    assert stream.ended.wait(10)
    assert stream.told[-1] == ("synced", 2)


def test_calls_that_change_nothing_do_not_put_off_a_sync(tmp_path: Path, catalog: Catalog, shards: int) -> None:
    db = Database(tmp_path / "db", 64 << 20, sync_roots=False, shards=shards)
    options = WriterOptions(ack_synced=False, sync_interval=0.5, waits=dict.fromkeys(Wait, LONG))
    writer = Writer(db, catalog, options, on_death=lambda: None)
    stream = Stream()
    writer.start()
    try:
        writer.call("a", partial(Batch.open, description=describe()))
        append(writer.queue, stream, 1)
        until = time.monotonic() + 5
        while ("synced", 1) not in stream.told and time.monotonic() < until:
            with suppress(Failure):
                writer.call("b", partial(Batch.delete, name=CaptureName("", "b")), reserve=True)
        assert stream.told == [("committed", 1), ("synced", 1)]
    finally:
        writer.stop()
        db.close()


def test_a_capture_that_ends_in_the_transaction_that_opens_it_counts_once(writer: Writer, catalog: Catalog) -> None:
    append(writer.queue, Stream(), 0)
    seal = seal_request(generated=(1,), outcome=ABORTED)
    loss = store_pb2.RowLoss(layers=LAYERS, sites=[POST], positions=[1, 2, 3], reason=1)
    name = CaptureName("", "a")
    writer.queue.call(Command(partial(Batch.lose, name=name, loss=loss), "a", reserve=True))
    writer.queue.call(Command(partial(Batch.seal, name=name, seal=seal), "a", reserve=True))
    writer.start()
    writer.call("a", lambda _: None)
    wait_for(lambda: catalog.state_of(name) == ABORTED, "the end", 10)
    assert catalog.states() == {ABORTED: 1}
    writer.call("a", partial(Batch.delete, name=name), reserve=True)
    assert catalog.states() == {}


def opening(name: str) -> Command:
    return Command(partial(Batch.open, description=describe(name)), name, reserve=False)


def test_a_burst_of_commands_takes_several_transactions(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first one of thousands would be acknowledged only after the last one."""
    monkeypatch.setattr("store_svc.writing.write_queue._GROUP_COMMANDS", 10)
    burst = [opening(f"c{number}") for number in range(34)]
    writer.queue.call(*burst)
    writer.start()
    assert [command.future.result(10) for command in burst] == [None] * 34
    writer.stop()
    assert writer.counters.commits == 4, "for 35 commands: the fixture queued one, too"


def test_rows_are_written_after_every_command_that_was_queued_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a command may open their capture. Commands that were queued after them do not hold them up."""
    monkeypatch.setattr("store_svc.writing.write_queue._GROUP_COMMANDS", 2)
    queue, early, late = WorkQueue(), Stream(), Stream()
    queue.call(opening("a"))
    append(queue, early, 1)
    queue.call(*(opening(f"c{number}") for number in range(4)), opening("late"))
    append(queue, late, 1, "late")
    for stream in (early, late):
        queue.finish(stream)
    works = [queue.take(0) for _ in range(3)]
    assert [[command.capture_id for command in work.commands] for work in works if work] == [
        ["a", "c0"], ["c1", "c2"], ["c3", "late"]
    ]  # fmt: skip
    assert [[item.capture_id for item in work.appends] for work in works if work] == [["a"], [], ["late"]]
    assert [work.endings for work in works if work] == [[], [], [early, late]]


def test_all_that_a_closed_queue_holds_can_still_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is more than one transaction takes."""
    monkeypatch.setattr("store_svc.writing.write_queue._GROUP_COMMANDS", 2)
    queue, stream = WorkQueue(), Stream()
    queue.call(*(opening(f"c{number}") for number in range(5)))
    for number in (1, 2):
        append(queue, stream, number)
    queue.finish(stream)
    queue.close()
    works = [queue.take(0) for _ in range(4)]
    assert [work and [command.capture_id for command in work.commands] for work in works] == [
        ["c0", "c1"], ["c2", "c3"], ["c4"], None
    ]  # fmt: skip
    assert [[item.number for item in work.appends] for work in works if work] == [[], [], [1, 2]]
    assert [work.endings for work in works if work] == [[], [], [stream]]


def rejection(number: int) -> store_pb2.ChunkRejection:
    failure = Failure(Reason.ERROR_REASON_UNKNOWN_CAPTURE, "no such capture")
    return store_pb2.ChunkRejection(number=number, error=failure.to_item_error())


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_no_acknowledgement_passes_a_rejection_that_it_does_not_carry(end: str) -> None:
    stream = AppendStream(WorkQueue(), ANYBODY, ArrivedOpens(lambda _: False))
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


def test_a_stream_that_has_failed_is_freed_at_once() -> None:
    stream = AppendStream(WorkQueue(), ANYBODY, ArrivedOpens(lambda _: False))
    stream.fail(Failure(Reason.ERROR_REASON_NOT_SERVING, "The store is stopping."))
    with without_collections():
        with suppress(Failure):
            list(stream.responses())
        freed = weakref.ref(stream)
        del stream
        assert freed() is None
