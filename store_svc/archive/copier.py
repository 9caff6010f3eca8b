"""The threads that copy ended captures to the archive, and the captures that wait for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from store_svc.archive import records
from store_svc.archive.access import LOOK_SECONDS, ArchiveAccess
from store_svc.archive.copying import DamagedCaptureError, GoneError, capture_object, chunk_objects
from store_svc.archive.link import StoppedError
from store_svc.database.db import StoreFullError
from store_svc.writing.changes import Batch
from store_svc.writing.room import store_full
from svc_common.logs import get_logger

_RETRY_SECONDS = 10.0
"""The pause before a copy is tried again that a bug has prevented."""

_PLACES_AT_ONCE = 4096
"""Places of frames that one transaction notes."""

_FORGOTTEN_AT_ONCE = 1024
"""Deleted captures that may wait to be copied."""

_log = get_logger(__name__)


class Copier:
    """Copies captures that have ended."""

    def __init__(self, access: ArchiveAccess) -> None:
        self._access = access
        self._changed = access.changed
        self._waiting: deque[tuple[int, float]] = deque()  # captures to copy, and since when they wait
        self._copying: dict[int, float] = {}
        self._failed: deque[tuple[float, int, float]] = deque()  # when to try again, the capture, since when it waits
        self._damaged: set[int] = set()  # captures that cannot be copied

    def load(self) -> None:
        """Find the captures that wait since the store ran before. Call it before `run`."""
        for number, summary in self._access.catalog.oldest_ended():
            if summary.archive_state == records.PENDING:
                self._waiting.append((number, time.monotonic()))

    def add(self, number: int) -> None:
        """Add a capture that has ended."""
        with self._changed:
            self._waiting.append((number, time.monotonic()))
            self._changed.notify_all()

    @property
    def num_damaged(self) -> int:
        """Captures that cannot be copied, because a chunk is damaged. The log names them."""
        return len(self._damaged)

    def is_damaged(self, number: int) -> bool:
        """Return whether a capture cannot be copied, because a chunk is damaged."""
        return number in self._damaged

    @property
    def seconds_behind(self) -> float:
        """Age of the oldest capture that waits to be copied, in seconds; 0 if none waits."""
        with self._changed:
            since = [*self._copying.values(), *(item[2] for item in self._failed)]
            since += [self._waiting[0][1]] if self._waiting else []
        return time.monotonic() - min(since) if since else 0.0

    def copied_now(self) -> set[int]:
        """Return the captures that threads are copying. Such a copy may still write objects."""
        with self._changed:
            return set(self._copying)

    def forget_deleted(self) -> None:
        """Forget captures that were deleted while they waited: the oldest ones, and all if there are many."""
        catalog = self._access.catalog
        with self._changed:
            while self._waiting and catalog.summary_of(self._waiting[0][0]) is None:
                self._waiting.popleft()
            self._damaged = {number for number in self._damaged if catalog.summary_of(number) is not None}
            if len(self._waiting) > 2 * catalog.num_captures + _FORGOTTEN_AT_ONCE:
                self._waiting = deque(item for item in self._waiting if catalog.summary_of(item[0]) is not None)

    def run(self) -> None:
        """Copy captures until the store stops. Several threads run this."""
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
                    summary = self._access.catalog.summary_of(number)
                    _log.error(
                        "a capture is not copied: the checksum of a chunk does not match",
                        request_id=summary.capture_id if summary is not None else "",
                        number=number,
                    )
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
                self._access.link.check()
                if self._failed and self._failed[0][0] <= time.monotonic():
                    _, number, since = self._failed.popleft()
                    self._copying[number] = since
                    return number
                if self._waiting and self._access.is_claimed:
                    number, since = self._waiting.popleft()
                    self._copying[number] = since
                    return number
                self._changed.wait(LOOK_SECONDS)

    def _copy(self, number: int) -> None:
        """Copy a capture: its chunks, then its own object, and then note it.

        Raises:
            GoneError: It was deleted.
            DamagedCaptureError: A chunk is damaged.
            StoppedError: The store is stopping.
        """
        access = self._access
        key = access.change(lambda batch: batch.begin_copy(number))
        if key is None:
            return
        num_bytes = 0
        for path, content, places in chunk_objects(access.read, number, key):
            self._put(path, content)
            num_bytes += len(content)
            for start in range(0, len(places), _PLACES_AT_ONCE):
                self._note(number, key, places[start : start + _PLACES_AT_ONCE])
        path, data, _ = capture_object(access.read, number, key)
        self._put(path, data)
        self._note(number, key, is_last=True)
        access.counters.captures_copied += 1
        access.counters.bytes_copied += num_bytes

    def _note(
        self, number: int, key: str, places: Sequence[tuple[bytes, records.Place]] = (), *, is_last: bool = False
    ) -> None:
        def note(batch: Batch) -> bool:
            if places:
                self._check_reserve()
            return batch.note_copied(number, key, places, is_last=is_last)

        if not self._access.change(note):
            raise GoneError

    def _check_reserve(self) -> None:
        """Check, in the writer's thread, that captures can still be ended and deleted once places are written.

        Raises:
            Failure: STORE_FULL. The store is then full for rows, too, so it drops those that are copied.
        """
        try:
            self._access.db.check_reserve()
        except StoreFullError as error:
            self._access.writer.room.refused(error)
            raise store_full(str(error), "") from error

    def _put(self, path: str, content: bytes | memoryview) -> None:
        self._access.link.until_done(lambda: self._access.objects.put(path, content))
