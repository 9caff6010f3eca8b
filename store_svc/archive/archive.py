"""The archive of a store: threads that copy ended captures, delete deleted ones, and drop rows from the database.

Nothing waits for these threads: neither writers nor readers. If the archive does not work, they try again. What they
have to do is in the database.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from residuum.rpc.errors import Failure, Reason
from residuum.rpc.objects import ArchiveError, ArchiveRefusedError, Objects
from residuum.v1 import store_pb2
from residuum.wire.archive import capture_path, chunks_folder, number_of
from store_svc.archive import owner, records
from store_svc.archive.copying import COPIERS, DamagedCaptureError, GoneError, capture_object, chunk_objects
from store_svc.archive.fetching import Fetcher
from store_svc.archive.link import Link, StoppedError
from store_svc.archive.workers import Workers
from store_svc.captures.catalog import Catalog
from store_svc.database.db import Database, Table, Txn
from store_svc.writing.changes import Batch
from store_svc.writing.writer import Writer
from svc_common.logs import get_logger

_T = TypeVar("_T")

_DELETERS = 8
"""Captures that are deleted at once."""

_OBJECTS_AT_ONCE = 100
"""Objects that are deleted between two looks at whether the store is stopping."""

_DELETED_AT_ONCE = 64
_DROPPED_AT_ONCE = 1024
_PLACES_AT_ONCE = 4096
"""Places of frames that one transaction notes."""

_RETRY_SECONDS = 10.0
"""The pause before a copy is tried again that a bug has prevented."""

_LOOK_SECONDS = 1.0
"""How often the keeper looks for work that nobody has told it of."""

_PASSING = (Reason.ERROR_REASON_STORE_FULL, Reason.ERROR_REASON_NOT_SERVING)
"""Why a change may fail now and succeed later, unless the store is stopping."""

_log = get_logger(__name__)


@dataclass
class ArchiveCounters:
    """Counts of the archive's work since the store started."""

    captures_copied: int = 0
    bytes_copied: int = 0
    captures_deleted: int = 0


class Archive:
    """The archive of a serving store."""

    def __init__(
        self, objects: Objects, db: Database, catalog: Catalog, writer: Writer, *, store_id: bytes, keep_bytes: int
    ) -> None:
        """Prepare; `start` starts the threads.

        Args:
            objects: Where the archive is.
            db: The database.
            catalog: The published captures.
            writer: Makes all changes of the database.
            store_id: The store's own ID.
            keep_bytes: Beyond these bytes of chunks, the rows of copied captures are dropped from the database.
        """
        self.url = objects.url
        self.link = Link()
        """Whether the archive can be written."""
        self.fetcher = Fetcher(objects)
        """Reads from the archive."""
        self.counters = ArchiveCounters()
        self._objects = objects
        self._db = db
        self._catalog = catalog
        self._writer = writer
        self._store_id = store_id
        self._keep_bytes = keep_bytes
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, float]] = deque()  # captures to copy, and since when they wait
        self._copying: dict[int, float] = {}
        self._failed: deque[tuple[float, int, float]] = deque()  # when to try again, the capture, since when it waits
        self._damaged: set[int] = set()  # captures that cannot be copied
        self._db_use = threading.Lock()
        self._deleters = Workers(_DELETERS, "archive-delete")
        self._is_claimed = False
        self._threads = [
            threading.Thread(target=work, name="archive", daemon=True)
            for work in (*[self._copy_all] * COPIERS, self._keep, self._drop_all)
        ]

    def check(self) -> None:
        """Check that the archive can be written, and is this store's. Call it before the writer starts.

        If the archive does not answer, the store serves nevertheless, and checks it later.

        Raises:
            ArchiveRefusedError: It is not this store's, or cannot be written.
        """
        try:
            self._check_owner()
        except ArchiveRefusedError:
            raise
        except ArchiveError as error:
            _log.warning("the archive does not answer; the store serves without it until it does", error=str(error))
        else:
            self._db.write(records.claim, reserve=True)
            self._is_claimed = True

    def start(self) -> None:
        """Start the threads. Call it after `check`, and before the writer starts."""
        for number, summary in self._catalog.oldest_ended():
            if summary.archive_state == records.PENDING:
                self._waiting.append((number, time.monotonic()))
        for thread in self._threads:
            thread.start()

    def stop(self, seconds: float) -> None:
        """Stop using the database, and end the threads, except those that wait for the archive for longer than this."""
        self.link.stop()
        with self._changed:
            self._changed.notify_all()
        until = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(until - time.monotonic(), 0.0))
        self._deleters.close()
        with self._db_use:  # from now on, `_read` raises
            pass

    def end_reads(self) -> None:
        """End the reads that wait for the archive."""
        self.fetcher.stop()

    def ended(self, number: int) -> None:
        """Note that a capture has ended, so that it is copied."""
        with self._changed:
            self._waiting.append((number, time.monotonic()))
            self._changed.notify_all()

    def wait(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Wait until something is over, but at most for some seconds. It is asked after each copy, and now and then."""
        until = time.monotonic() + seconds
        with self._changed:
            while not is_over() and (left := until - time.monotonic()) > 0:
                self._changed.wait(min(left, _LOOK_SECONDS))

    def stats(self) -> store_pb2.ArchiveStats:
        """Return what is in the archive, and what was copied and read since the store started."""
        states = self._catalog.archive_states()
        return store_pb2.ArchiveStats(
            url=self.url,
            captures_pending=states.get(records.PENDING, 0),
            captures_copied=states.get(records.COPIED, 0),
            captures_moved=states.get(records.MOVED, 0),
            why_behind=self.link.why_behind,
            captures_not_copied=self.num_not_copied,
            bytes_copied=self.counters.bytes_copied,
            bytes_fetched=self.fetcher.num_bytes,
        )

    @property
    def num_not_copied(self) -> int:
        """Captures that cannot be copied, because a chunk is damaged. The log names them."""
        return len(self._damaged)

    @property
    def seconds_behind(self) -> float:
        """Age of the oldest capture that waits to be copied, in seconds; 0 if none waits."""
        with self._changed:
            since = [*self._copying.values(), *(item[2] for item in self._failed)]
            since += [self._waiting[0][1]] if self._waiting else []
        return time.monotonic() - min(since) if since else 0.0

    def _check_owner(self) -> None:
        with self._read() as txn:
            was_claimed = records.is_claimed(txn)
        owner.claim(self._objects, self._store_id, was_claimed=was_claimed)

    @contextmanager
    def _read(self) -> Iterator[Txn]:
        """Begin a read transaction. After `stop`, the database may be closed, so this raises StoppedError."""
        with self._db_use:
            self.link.check()
            with self._db.read() as txn:
                yield txn

    def _change(self, change: Callable[[Batch], _T], capture_id: str = "") -> _T:
        """Change the database, as soon as it has room.

        Raises:
            Failure: The change itself failed.
            StoppedError: The store is stopping.
        """
        while True:
            self.link.check()
            try:
                return self._writer.call(capture_id, change, reserve=True)
            except Failure as failure:
                if failure.reason not in _PASSING:
                    raise
                with self._changed:
                    self._changed.wait(_LOOK_SECONDS)

    # ------------------------------------------------------------------------------------------------------ copying

    def _copy_all(self) -> None:
        try:
            while True:
                number = self._next()
                try:
                    self._copy(number)
                except GoneError:
                    pass
                except StoppedError:
                    raise
                except DamagedCaptureError:
                    _log.error("a capture is not copied: the checksum of a chunk does not match", number=number)
                    with self._changed:
                        self._damaged.add(number)
                except Exception:  # noqa: BLE001 - a bug: other captures must be copied nevertheless
                    _log.exception("copying a capture has failed; the store tries it again later", number=number)
                    with self._changed:
                        self._failed.append((time.monotonic() + _RETRY_SECONDS, number, self._copying[number]))
                finally:
                    with self._changed:
                        self._copying.pop(number, None)
                        self._changed.notify_all()
        except StoppedError:
            return

    def _next(self) -> int:
        """Wait for a capture to copy."""
        with self._changed:
            while True:
                self.link.check()
                if self._failed and self._failed[0][0] <= time.monotonic():
                    _, number, since = self._failed.popleft()
                    self._copying[number] = since
                    return number
                if self._waiting and self._is_claimed:
                    number, since = self._waiting.popleft()
                    self._copying[number] = since
                    return number
                self._changed.wait(_LOOK_SECONDS)

    def _copy(self, number: int) -> None:
        """Copy a capture: its chunks, then its own object, and then note it.

        Raises:
            GoneError: It was deleted.
            DamagedCaptureError: A chunk is damaged.
            StoppedError: The store is stopping.
        """
        key = self._change(lambda batch: batch.begin_copy(number))
        if key is None:
            return
        num_bytes = 0
        for path, content, places in chunk_objects(self._read, number, key):
            self._put(path, content)
            num_bytes += len(content)
            for start in range(0, len(places), _PLACES_AT_ONCE):
                self._note(number, key, places[start : start + _PLACES_AT_ONCE])
        path, data, _ = capture_object(self._read, number, key)
        self._put(path, data)
        self._note(number, key, is_last=True)
        self.counters.captures_copied += 1
        self.counters.bytes_copied += num_bytes

    def _note(
        self, number: int, key: str, places: Sequence[tuple[bytes, records.Place]] = (), *, is_last: bool = False
    ) -> None:
        if not self._change(lambda batch: batch.note_copied(number, key, places, is_last=is_last)):
            raise GoneError

    def _put(self, path: str, content: bytes | memoryview) -> None:
        self.link.until_done(lambda: self._objects.put(path, content))

    # ----------------------------------------------------------------------------------------------------- dropping

    def _drop_all(self) -> None:
        """Drop rows, and forget captures that were deleted before they were copied. This needs no network."""
        try:
            while True:
                try:
                    self._drop()
                    self._forget_deleted()
                except StoppedError:
                    raise
                except Exception:  # noqa: BLE001 - a bug: the thread must go on
                    _log.exception("dropping rows has failed")
                self._sleep()
        except StoppedError:
            return

    def _drop(self) -> None:
        """Drop rows of copied captures while those in the database are too many, or the store is full."""
        while numbers := self._catalog.to_drop(self._excess(), _DROPPED_AT_ONCE):
            self._change(lambda batch: batch.drop_rows(numbers))

    def _excess(self) -> int:
        """Return how many bytes of rows to drop."""
        excess = self._catalog.num_bytes - self._keep_bytes
        if self._writer.room.why_full:
            with self._read() as txn:
                is_freeing = txn.next_key(Table.DOOMED, b"") is not None
            if not is_freeing:  # the rows that were dropped before were not enough
                excess = max(excess, self._db.ordinary_bytes // 8)
        return excess

    def _forget_deleted(self) -> None:
        """Forget captures that were deleted while they waited: the oldest ones, and all if there are many."""
        with self._changed:
            while self._waiting and self._catalog.summary_of(self._waiting[0][0]) is None:
                self._waiting.popleft()
            self._damaged = {number for number in self._damaged if self._catalog.summary_of(number) is not None}
            if len(self._waiting) > 2 * self._catalog.num_captures + _DROPPED_AT_ONCE:
                self._waiting = deque(item for item in self._waiting if self._catalog.summary_of(item[0]) is not None)

    # ------------------------------------------------------------------------------------------------------ keeping

    def _keep(self) -> None:
        """Delete what was deleted, and write changed labels."""
        try:
            while True:
                try:
                    self._claim()
                    while self._delete_some():
                        pass
                    self._write_labels()
                except ArchiveError:
                    self.link.pause()
                except StoppedError:
                    raise
                except Exception:  # noqa: BLE001 - a bug: the thread must go on
                    _log.exception("the archive's work has failed")
                    self.link.pause()
                self._sleep()
        except StoppedError:
            return

    def _sleep(self) -> None:
        """Wait for news, but not for long.

        Raises:
            StoppedError: The store is stopping.
        """
        with self._changed:
            self.link.check()
            self._changed.wait(_LOOK_SECONDS)
        self.link.check()

    def _claim(self) -> None:
        if not self._is_claimed:
            self.link.once(self._check_owner)
            self._change(Batch.claim_archive)
            self._is_claimed = True

    def _delete_some(self) -> bool:
        """Delete the objects of deleted captures. Return whether there may be more.

        Raises:
            ArchiveError: The archive does not work.
        """
        with self._read() as txn:
            keys = records.deletions(txn, _DELETED_AT_ONCE)
        with self._changed:
            copied_now = set(self._copying)  # such a copy could still write objects
        keys = [key for key in keys if number_of(key) not in copied_now]
        if not keys:
            return False
        self._change(lambda batch: batch.begin_deletions(keys))
        for done in [self._deleters.submit(self._delete, key) for key in keys]:
            done.result()
        self._change(lambda batch: batch.end_deletions(keys))
        self.counters.captures_deleted += len(keys)
        return True

    def _delete(self, key: str) -> None:
        """Delete the objects of a capture. Its own object goes first: without it, the capture does not exist."""
        self.link.once(lambda: self._objects.delete([capture_path(key)]))
        paths = self.link.once(lambda: list(self._objects.list(chunks_folder(key))))
        for start in range(0, len(paths), _OBJECTS_AT_ONCE):
            part = paths[start : start + _OBJECTS_AT_ONCE]
            self.link.once(lambda: self._objects.delete(part))  # noqa: B023

    def _write_labels(self) -> None:
        """Write the own objects of captures again whose labels have changed.

        Raises:
            ArchiveError: The archive does not work.
        """
        with self._read() as txn:
            numbers = records.label_changes(txn)
        for number in numbers:
            with self._read() as txn:
                record = records.read_record(txn, number)
            if record is None or record.state == records.PENDING:
                continue
            try:
                path, data, labels = capture_object(self._read, number, record.key)
            except GoneError:
                continue
            self.link.once(lambda: self._objects.put(path, data))  # noqa: B023
            self._change(lambda batch: batch.note_labels_copied(number, labels))  # noqa: B023
