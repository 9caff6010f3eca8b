"""The writer: one thread that groups queued work into transactions and acknowledges what it committed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from typing import TypeVar

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, store_pb2
from store_svc.captures.capture_names import CaptureName
from store_svc.captures.catalog import Catalog
from store_svc.captures.lifecycle import Capture, Wait
from store_svc.database.db import DamagedError, Database, PayloadChangedError, StoreFullError, Txn
from store_svc.writing.changes import Batch, purge_some
from store_svc.writing.retention import Expired, Retention, RetentionPolicy
from store_svc.writing.room import Room, store_full
from store_svc.writing.write_queue import Acks, Append, Command, Work, WorkQueue
from svc_common.logs import bind_request, get_logger, request_scope
from svc_common.rpc.serving import internal_failure
from svc_common.security.tokens_file import Limits, no_limits

_T = TypeVar("_T")

_PURGE_FRAMES = 1024
"""Frames of deleted captures that one transaction frees. It frees as many as were just written if these are more, so
that freeing keeps up with writing."""

_MAX_TIMED_OUT = 1024
"""Timed-out captures that one transaction ends, for each kind of wait."""

_RETRY_SECONDS = 1.0
"""Pause before a full store tries housekeeping again."""

_log = get_logger(__name__)


@dataclass
class Counters:
    """Counts of the writer's work since the store started."""

    written: int = 0
    """Chunks with at least one row that was stored."""
    repeated: int = 0
    """Chunks whose rows were stored already."""
    rejected: int = 0
    """Messages that can never be written."""
    refused: int = 0
    """Messages for which there was no room. Their writers send them again."""
    bytes_written: int = 0
    """Bytes of the written chunks."""
    commits: int = 0
    """Committed transactions."""
    expired_by_age: int = 0
    """Captures deleted because they were too old."""
    expired_by_size: int = 0
    """Captures deleted because all captures together took too many bytes."""
    bytes_expired: int = 0
    """Bytes of the chunks of expired captures."""


@dataclass(frozen=True)
class WriterOptions:
    """The writer's options."""

    ack_synced: bool
    """Whether commits count as synced at once. The database must then sync every commit's root page (`sync_roots`)."""
    sync_interval: float
    """Seconds without writes after which the writer syncs what is committed."""
    waits: Mapping[Wait, float]
    """Seconds without progress after which a capture times out, by what it waits for."""
    full_wait: float = 120.0
    """The same while the store is full, for captures that wait for their seal or for expected rows."""
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    """How long, and how many, ended captures are kept."""
    limits_of: Callable[[str], Limits] = no_limits
    """Returns a tenant's limits."""


class Writer:
    """Makes every change to the database, in one thread.

    A transaction takes the work that was queued while the previous one was written, up to the queue's limits for one
    transaction. So transactions grow with the load, and a single chunk is written at once.
    """

    def __init__(
        self,
        db: Database,
        catalog: Catalog,
        options: WriterOptions,
        on_death: Callable[[], None],
        on_commit: Callable[[float], None] = lambda _: None,
        on_end: Callable[[Capture], None] = lambda _: None,
    ) -> None:
        """Create the writer; `start` starts its thread.

        Args:
            db: The database.
            catalog: Where the writer publishes changes.
            options: The options.
            on_death: Called in the writer's thread when the writer has failed. The process should then end.
            on_commit: Called with the duration of each transaction in seconds.
            on_end: Called with each capture that has ended.
        """
        self.counters = Counters()
        self.queue = WorkQueue(db.num_shards)
        self.room = Room(db)
        """Whether the store has room."""
        self._db = db
        self._catalog = catalog
        self._options = options
        self._on_death = on_death
        self._on_commit = on_commit
        self._on_end = on_end
        self._retention = Retention(options.retention, catalog)
        self._unsynced: dict[Acks, int] = {}
        self._sync_at: float | None = None
        self._purging = True  # captures deleted before the last stop may still have frames to free
        self._purge_parts = 1  # how many transactions free what one could with enough room
        self._try_room_at = 0.0
        self._above_limit = False
        self._housekeeping_at = 0.0
        self._thread = threading.Thread(target=self._run, name="writer")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write what is queued, sync, and end the thread."""
        self.queue.close()
        self._thread.join()

    def call(self, capture_id: str, run: Callable[[Batch], _T], *, reserve: bool = False) -> _T:
        """Run a change in a transaction and wait for the commit.

        Args:
            capture_id: The capture that the change is about.
            run: The change. It may run several times, each time with a new batch.
            reserve: Whether it may use the space reserved for ending and deleting captures.

        Returns:
            What the change returned.

        Raises:
            Failure: The change raised it; or STORE_FULL; or NOT_SERVING if the store is stopping.
        """
        return self.submit(capture_id, run, reserve=reserve).result()

    def submit(self, capture_id: str, run: Callable[[Batch], _T], *, reserve: bool = False) -> Future[_T]:
        """Queue a change as `call` does, and return at once. What is queued later is written after it.

        Raises:
            Failure: NOT_SERVING if the store is stopping. The others are the future's exceptions.
        """
        command = Command(run, capture_id, reserve)
        self.queue.call(command)
        return command.future

    def submit_many(
        self, changes: Iterable[tuple[str, Callable[[Batch], _T]]], *, reserve: bool = False
    ) -> list[Future[_T]]:
        """Queue changes, each with its capture's ID, as `submit` does. They share transactions, usually one.

        If one fails, the others are made nevertheless.

        Raises:
            Failure: NOT_SERVING if the store is stopping.
        """
        commands = [Command(run, capture_id, reserve) for capture_id, run in changes]
        self.queue.call(*commands)
        return [command.future for command in commands]

    def submit_deletions(self, names: Iterable[CaptureName]) -> list[Future[int]]:
        """Queue the deletion of captures, and return at once. They share transactions, and none depends on another.

        Returns:
            For each capture the bytes of its frames; see `Batch.delete` for the exceptions.

        Raises:
            Failure: NOT_SERVING if the store is stopping.
        """
        commands = [_deletion(name) for name in names]
        self.queue.call(*commands)
        return [command.future for command in commands]

    def _run(self) -> None:
        work: Work | None = None
        try:
            self._finish_captures()
            while (work := self.queue.take(self._seconds_to_next())) is not None:
                self._commit(work)
                self._keep_house(len(work.appends))
                self._sync_if_due(work.endings)
            self._sync()
        except Exception:  # noqa: BLE001 - whatever failed, callers must not wait for a dead thread
            _log.exception("the writer has failed")
            self._die(work)

    def _die(self, work: Work | None) -> None:
        text = "The store is stopping: its writer has failed. The store's log says why. Try again after its restart."
        self.queue.close()
        while work is not None:
            work.fail(lambda _: Failure(Reason.ERROR_REASON_NOT_SERVING, text))
            work = self.queue.take(0)
        self._on_death()

    def _commit(self, work: Work) -> None:
        work.appends = [item for item in work.appends if not item.stream.failed]
        if not work:
            return
        try:
            batch, outcomes = self._write(work)
        except DamagedError:
            raise
        except PayloadChangedError:
            for item in work.appends:
                item.copy()
            self._commit(work)
        except StoreFullError as error:
            self._commit_when_full(work, error)
        except Exception:  # noqa: BLE001 - a bug; _commit_one_by_one logs it with the work that triggers it
            self._commit_one_by_one(work)
        else:
            self._publish(batch)
            self._deliver(work, outcomes)

    def _commit_when_full(self, work: Work, error: StoreFullError) -> None:
        """Write as much as fits: commands first, then half of the messages, then half of that half, and so on.

        Otherwise every retry would fail the same way. LMDB reuses the pages of deleted data only two transactions
        later, and the waiting work may be larger than the remaining space.
        """
        if work.commands and work.appends:
            self._commit(Work(commands=work.commands))
            self._commit(Work(appends=work.appends))
        elif work.commands:
            self._commit_privileged(work.commands, error)
        else:
            half = len(work.appends) // 2
            self._commit(Work(appends=work.appends[:half]))
            rest = Work(appends=work.appends[half:])
            self._note_full(error, rest)
            rest.fail(partial(store_full, str(error)))

    def _commit_privileged(self, commands: list[Command], error: StoreFullError) -> None:
        why = partial(store_full, str(error))
        ordinary = Work([command for command in commands if not command.reserve])
        if ordinary:
            self._note_full(error, ordinary)
            ordinary.fail(why)
        privileged = Work([command for command in commands if command.reserve])
        if not privileged:
            return
        try:
            batch, outcomes = self._write(privileged, reserve=True)
        except StoreFullError as fuller:
            self._note_full(fuller, privileged)
            self._housekeeping_at = time.monotonic() + _RETRY_SECONDS
            if len(privileged.commands) == 1:
                privileged.fail(why)
            else:
                for part in privileged.parts():
                    self._commit_privileged(part.commands, fuller)
        else:
            self._publish(batch)
            self._deliver(privileged, outcomes)

    def _commit_one_by_one(self, work: Work) -> None:
        """Write each part of the work alone after a bug, so that only the part that triggers it fails."""
        parts = work.parts()
        if len(parts) == 1:
            with request_scope():
                bind_request(work.capture_ids[0])
                failure = internal_failure(_log, "write")
            work.fail(lambda _: failure)
            return
        for part in parts:
            self._commit(part)

    def _write(self, work: Work, *, reserve: bool = False) -> tuple[Batch, list[object]]:
        start = time.monotonic()
        batch, outcomes = self._db.write(lambda txn: self._apply(txn, work), reserve=reserve)
        if batch.wrote:
            self._on_commit(time.monotonic() - start)
        return batch, outcomes

    def _apply(self, txn: Txn, work: Work) -> tuple[Batch, list[object]]:
        batch = Batch(txn, self._catalog, self._options.limits_of, self.room.why_full)
        outcomes: list[object] = [_outcome(command.run, batch) for command in work.commands]
        outcomes += [_outcome(item.apply, batch) for item in work.appends]
        return batch, outcomes

    def _publish(self, batch: Batch) -> None:
        if batch.wrote:
            self.counters.commits += 1
            # This commit's sync also covered the root page of the previous commit.
            self._mark_synced()
        self._purging = self._purging or batch.deletes
        if batch.wrote or self._sync_at is None:  # calls that change nothing must not put off a sync for ever
            self._sync_at = time.monotonic() + self._options.sync_interval
        for capture in batch.publish():
            if capture.ended:
                _log_ended(capture)
                self._on_end(capture)

    def _deliver(self, work: Work, outcomes: list[object]) -> None:
        for command, outcome in zip(work.commands, outcomes, strict=False):
            if isinstance(outcome, Failure):
                command.future.set_exception(outcome)
            else:
                command.future.set_result(outcome)
        rejections: dict[Acks, list[store_pb2.ChunkRejection]] = {}
        for item, outcome in zip(work.appends, outcomes[len(work.commands) :], strict=True):
            refused = rejections.setdefault(item.stream, [])
            self._count(item, outcome)
            if isinstance(outcome, Failure):
                refused.append(store_pb2.ChunkRejection(number=item.number, error=outcome.to_item_error()))
            self._unsynced[item.stream] = item.number
        for stream, refused in rejections.items():
            self._acknowledge(stream, refused)

    def _acknowledge(self, stream: Acks, rejections: list[store_pb2.ChunkRejection]) -> None:
        number = self._unsynced[stream]
        stream.committed(number, rejections)
        if self._options.ack_synced:
            stream.synced(number)
            del self._unsynced[stream]

    def _count(self, item: Append, outcome: object) -> None:
        if isinstance(outcome, Failure):
            self.counters.rejected += 1
        elif outcome is True:
            self.counters.written += 1
            self.counters.bytes_written += item.num_bytes
            self.room.wrote(item.num_bytes)
        elif outcome is False:
            self.counters.repeated += 1

    def _sync_if_due(self, endings: list[Acks]) -> None:
        if endings or (self._sync_at is not None and time.monotonic() >= self._sync_at):
            self._sync()
        for stream in endings:
            stream.finished()

    def _sync(self) -> None:
        if self._sync_at is None:
            return
        self._db.sync()
        self._sync_at = None
        self._mark_synced()

    def _mark_synced(self) -> None:
        for stream, number in self._unsynced.items():
            stream.synced(number)
        self._unsynced.clear()

    def _keep_house(self, just_written: int) -> None:
        """End captures that time out or whose service has died, delete expired ones, and free frames of deleted ones.

        Each step does at most one transaction's work, so that newly queued work does not wait for housekeeping.
        """
        if self.room.why_full and time.monotonic() >= self._try_room_at:
            self._try_room_at = time.monotonic() + _RETRY_SECONDS
            self.room.try_again()
        if time.monotonic() < self._housekeeping_at:
            return
        self._abandon_captures()
        timed_out = [capture for wait in Wait for capture in self._timed_out(wait)]
        if timed_out:
            self._commit(Work([self._time_out(capture) for capture in timed_out]))
        self._expire()
        if self._purging:
            self._purge(max(_PURGE_FRAMES, just_written))

    def _purge(self, most: int) -> None:
        """Free frames of deleted captures in one transaction. If so many do not fit, the next one frees half as many.

        LMDB writes a list of all pages that a transaction frees, to pages in a row. The frames may be so large that the
        list takes more than the reserve, and a full file may have no such row.
        """
        limit = max(most // self._purge_parts, 1)
        try:
            self._purging = self._db.write(partial(purge_some, limit=limit), reserve=True)
            self._purge_parts = max(self._purge_parts // 2, 1)
            self.room.try_again(freed=True)
        except StoreFullError as error:
            if limit > 1:
                self._purge_parts *= 2
                return
            self.room.refused(error)
            self._housekeeping_at = time.monotonic() + _RETRY_SECONDS

    def _finish_captures(self) -> None:
        """End captures whose last rows were committed just before the last store was killed, but not their end."""
        done = [
            capture
            for wait in (Wait.ROWS, Wait.REMNANTS)
            for capture in self._catalog.waiting(wait)
            if capture.seal is not None and not capture.ledger.outstanding
        ]
        self._commit(Work([self._finish(capture) for capture in done]))

    def _finish(self, capture: Capture) -> Command:
        return Command(partial(Batch.finish, number=capture.number), capture.description.capture_id, reserve=True)

    def _abandon_captures(self) -> None:
        """Stop waiting for the seals of services whose lease has run out."""
        lapsed = self._catalog.leases.take_lapsed()
        captures = [
            capture
            for capture in (self._catalog.waiting(Wait.SEAL) if lapsed else ())
            if capture.description.service_instance in lapsed
            and not self._catalog.leases.is_held(capture.description.service_instance, capture.description.tenant)
        ]
        if captures:
            _log.warning(
                "the lease of an inference service has run out: its open captures end once no rows arrive",
                services=sorted({capture.description.service_instance for capture in captures}),
                captures=len(captures),
            )
            self._commit(Work([self._abandonment(capture) for capture in captures]))

    def _abandonment(self, capture: Capture) -> Command:
        return Command(partial(Batch.abandon, number=capture.number), capture.description.capture_id, reserve=True)

    def _expire(self) -> None:
        if numbers := self._retention.to_drop():
            self._commit(Work([Command(partial(Batch.drop_rows, numbers=numbers), "", reserve=True)]))
        expired = self._retention.take()
        if expired:
            commands = [_deletion(item.name) for item in expired]
            self._commit(Work(commands))
            done = [command.future.exception() is None for command in commands]
            self._note_expired([item for item, is_done in zip(expired, done, strict=True) if is_done])
            if not all(done):
                self._retention.give_back(item for item, is_done in zip(expired, done, strict=True) if not is_done)
        self._note_excess(self._retention.excess)

    def _note_expired(self, expired: list[Expired]) -> None:
        for item in expired:
            if item.cause == "age":
                self.counters.expired_by_age += 1
            else:
                self.counters.expired_by_size += 1
            self.counters.bytes_expired += item.num_bytes
            _log.info(
                "capture expired",
                request_id=item.name.capture_id,
                cause=item.cause,
                age_seconds=round(item.age, 1),
                bytes=item.num_bytes,
            )

    def _note_excess(self, excess: int) -> None:
        """Log once when retention cannot delete enough; log again only after the excess was gone."""
        if excess and not self._above_limit:
            text = "captures exceed retain-bytes: the others are open, being read, or wait for the archive to answer"
            _log.warning(text, excess_bytes=excess)
        self._above_limit = excess > 0

    def _note_full(self, error: StoreFullError, work: Work) -> None:
        """Note that there was no room for any part of this work."""
        self.counters.refused += len(work.appends)
        self.room.refused(error, max((item.num_bytes for item in work.appends), default=0))

    def _timed_out(self, wait: Wait) -> Iterator[Capture]:
        now = time.monotonic()
        timed_out = takewhile(lambda capture: self._deadline(capture) <= now, self._catalog.waiting(wait))
        return islice(timed_out, _MAX_TIMED_OUT)

    def _deadline(self, capture: Capture) -> float:
        since = self.room.full_since if self.room.why_full else self.room.regained
        return max(capture.progress, since) + self._patience(capture)

    def _patience(self, capture: Capture) -> float:
        """Return for how many seconds a capture may make no progress."""
        return self._options.full_wait if self._waits_for_room(capture) else self._options.waits[capture.wait]

    def _waits_for_room(self, capture: Capture) -> bool:
        return bool(self.room.why_full) and capture.wait is not Wait.REMNANTS

    def _time_out(self, capture: Capture) -> Command:
        why_full = self.room.why_full if self._waits_for_room(capture) else ""
        run = partial(Batch.time_out, number=capture.number, waited=self._patience(capture), why_full=why_full)
        return Command(run, capture.description.capture_id, reserve=True)

    def _seconds_to_next(self) -> float | None:
        """Return the seconds until housekeeping or a sync is due; None if neither is."""
        first = (capture for wait in Wait for capture in islice(self._catalog.waiting(wait), 1))
        due = [max(self._deadline(capture), self._housekeeping_at) for capture in first]
        if self._purging:
            due.append(self._housekeeping_at)
        if self.room.why_full:
            due.append(self._try_room_at)
        if self._sync_at is not None:
            due.append(self._sync_at)
        lease_end = self._catalog.leases.next_end()
        if lease_end is not None:
            due.append(max(lease_end, self._housekeeping_at))
        retention = self._retention.seconds_to_next()
        if retention is not None:
            due.append(max(time.monotonic() + retention, self._housekeeping_at))
        return max(min(due) - time.monotonic(), 0.0) if due else None


def _deletion(name: CaptureName) -> Command:
    return Command(partial(Batch.delete, name=name), name.capture_id, reserve=True)


def _outcome(run: Callable[[Batch], object], batch: Batch) -> object:
    """Return what a change returned, or the Failure that it raised."""
    try:
        return run(batch)
    except Failure as failure:
        return failure


def _log_ended(capture: Capture) -> None:
    state = capture_pb2.CaptureState.Name(capture.state).removeprefix("CAPTURE_STATE_").lower()
    _log.info(
        "capture ended",
        request_id=capture.description.capture_id,
        state=state,
        rows=capture.ledger.num_rows,
        missing=capture.ledger.missing,
        bytes=capture.num_bytes,
    )
