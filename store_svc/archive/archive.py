"""The archive of a store: threads that copy ended captures, delete deleted ones, and drop rows from the database.

Nothing waits for these threads: neither writers nor readers. If the archive does not work, they try again. What they
have to do is in the database.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from residuum.rpc.errors import Failure
from residuum.v1 import store_pb2
from store_svc.archive import owner, records
from store_svc.archive.copying import COPIERS, DamagedCaptureError, GoneError, capture_object, chunk_objects
from store_svc.archive.fetching import Fetcher
from store_svc.archive.layout import capture_path, chunks_folder, number_of
from store_svc.archive.link import Link, StoppedError
from store_svc.archive.objects import ArchiveError, ArchiveRefusedError, Objects
from store_svc.captures.catalog import Catalog
from store_svc.database.db import Database, Txn
from store_svc.writing.changes import Batch
from store_svc.writing.writer import Writer
from svc_common.logs import get_logger

_T = TypeVar("_T")

_DELETERS = 8
"""Captures that are deleted at once."""

_DELETED_AT_ONCE = 64
_DROPPED_AT_ONCE = 1024
_PLACES_AT_ONCE = 4096
"""Places of frames that one transaction notes."""

_LOOK_SECONDS = 1.0
"""How often the keeper looks for work that nobody has told it of."""

_log = get_logger(__name__)


@dataclass
class ArchiveCounters:
    """Counts of the archive's work since the store started."""

    captures_copied: int = 0
    bytes_copied: int = 0
    captures_deleted: int = 0
    captures_dropped: int = 0
    bytes_dropped: int = 0
    captures_not_copied: int = 0
    """Captures that are not copied, because a chunk is damaged or a bug prevents it. The log says which and why."""


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
        self._resident: OrderedDict[int, None] = OrderedDict()  # copied captures with rows here, read last at the end
        self._db_use = threading.Lock()
        self._is_claimed = False
        self._threads = [
            threading.Thread(target=work, name="archive", daemon=True)
            for work in (*[self._copy_all] * COPIERS, self._keep)
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
            elif summary.archive_state == records.COPIED:
                self._resident[number] = None
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
        with self._db_use:  # from now on, `_read` raises
            pass

    def close(self) -> None:
        """End the threads of reads, once no read runs."""
        self.fetcher.close()

    def ended(self, number: int) -> None:
        """Note that a capture has ended, so that it is copied."""
        with self._changed:
            self._waiting.append((number, time.monotonic()))
            self._changed.notify()

    def touched(self, number: int) -> None:
        """Note that a capture is read. Captures that were not read for long are dropped first."""
        with self._changed:
            if number in self._resident:
                self._resident.move_to_end(number)

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
            bytes_copied=self.counters.bytes_copied,
            bytes_fetched=self.fetcher.num_bytes,
        )

    @property
    def seconds_behind(self) -> float:
        """For how long the capture has waited that has waited longest to be copied; 0 if none waits."""
        with self._changed:
            since = [*self._copying.values(), *([self._waiting[0][1]] if self._waiting else [])]
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
            StoppedError: The store is stopping.
        """
        while True:
            self.link.check()
            try:
                return self._writer.call(capture_id, change, reserve=True)
            except Failure:  # the store is full, or stopping
                self.link.pause()

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
                    self.counters.captures_not_copied += 1
                    _log.error("a capture is not copied: the checksum of a chunk does not match", number=number)
                except Exception:  # noqa: BLE001 - a bug: other captures must be copied nevertheless
                    self.counters.captures_not_copied += 1
                    _log.exception("a capture is not copied", number=number)
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
        places: list[tuple[bytes, records.Place]] = []
        num_bytes = 0
        for path, content, part in chunk_objects(self._read, number, key):
            self._put(path, content)
            places += part
            num_bytes += len(content)
        path, data, _ = capture_object(self._read, number, key, places)
        self._put(path, data)
        for start in range(0, max(len(places), 1), _PLACES_AT_ONCE):
            part, is_last = places[start : start + _PLACES_AT_ONCE], start + _PLACES_AT_ONCE >= len(places)
            if not self._change(lambda batch: batch.note_copied(number, key, part, is_last=is_last)):  # noqa: B023
                raise GoneError
        self.counters.captures_copied += 1
        self.counters.bytes_copied += num_bytes
        with self._changed:
            self._resident[number] = None

    def _put(self, path: str, content: bytes | memoryview) -> None:
        self.link.until_done(lambda: self._objects.put(path, content))

    # ------------------------------------------------------------------------------------------------------ keeping

    def _keep(self) -> None:
        """Delete what was deleted, write changed labels, and drop rows."""
        with ThreadPoolExecutor(_DELETERS, thread_name_prefix="archive-delete") as deleters:
            try:
                while True:
                    self._drop()
                    try:
                        if not self._is_claimed:
                            self.link.once(self._check_owner)
                            self._change(Batch.claim_archive)
                            self._is_claimed = True
                        while self._delete_some(deleters):
                            self._drop()
                        self._write_labels()
                    except ArchiveError:
                        self.link.pause()
                    except StoppedError:
                        raise
                    except Exception:  # noqa: BLE001 - a bug: rows must be dropped nevertheless
                        _log.exception("the archive's work has failed")
                        self.link.pause()
                    with self._changed:
                        self._forget_deleted()
                        self._changed.wait(_LOOK_SECONDS)
                    self.link.check()
            except StoppedError:
                return

    def _forget_deleted(self) -> None:
        """Forget captures that were deleted while they waited, if there are many.

        Otherwise they would pile up while the archive is away.
        """
        if len(self._waiting) > 2 * self._catalog.num_captures + _DROPPED_AT_ONCE:
            self._waiting = deque(item for item in self._waiting if self._catalog.summary_of(item[0]) is not None)

    def _delete_some(self, deleters: ThreadPoolExecutor) -> bool:
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
        list(deleters.map(lambda key: self.link.once(lambda: self._delete(key)), keys))
        self._change(lambda batch: batch.end_deletions(keys))
        self.counters.captures_deleted += len(keys)
        with self._changed:
            for key in keys:
                self._resident.pop(number_of(key), None)
        return True

    def _delete(self, key: str) -> None:
        """Delete the objects of a capture. Its own object goes first: without it, the capture does not exist."""
        self._objects.delete([capture_path(key)])
        self._objects.delete(list(self._objects.list(chunks_folder(key))))

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

    def _drop(self) -> None:
        """Drop rows of copied captures while those in the database are too many, or the store is full."""
        while numbers := self._to_drop():
            self._change(lambda batch: batch.drop_rows(numbers))

    def _to_drop(self) -> list[int]:
        excess = self._catalog.num_bytes - self._keep_bytes
        if self._writer.room.why_full:
            excess = max(excess, self._db.ordinary_bytes // 8)
        numbers: list[int] = []
        with self._changed:
            for number in list(self._resident):
                if excess <= 0 or len(numbers) == _DROPPED_AT_ONCE:
                    break
                if self._catalog.is_read(number):
                    continue
                del self._resident[number]
                summary = self._catalog.summary_of(number)
                if summary is not None and summary.archive_state == records.COPIED:
                    numbers.append(number)
                    excess -= summary.num_bytes
                    self.counters.captures_dropped += 1
                    self.counters.bytes_dropped += summary.num_bytes
        return numbers
