"""Reads frames from the archive, ahead of the caller, in ranges of neighbouring frames."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from residuum.rpc.errors import Failure, Reason
from residuum.rpc.objects import ArchiveError, MissingObjectError, Objects
from residuum.wire.rows.archive import chunks_path
from residuum.wire.rows.frames import checksum
from store_svc.archive.records import Place
from store_svc.archive.workers import Workers
from svc_common.logs import get_logger

_log = get_logger(__name__)

_RANGE_BYTES = 1 << 20
"""The most bytes of a range of several frames. A range of one frame may have 8 MiB."""

_AHEAD_BYTES = 4 << 20
"""Bytes of one reader that are fetched or wait for it, unless one range has more."""

_MAX_AHEAD = 8
"""Ranges, or frames in the database, that wait at most."""

_THREADS = 32
"""Ranges that are fetched at once, for all readers."""


@dataclass(frozen=True)
class Away:
    """A frame to fetch."""

    key: bytes
    """The frame's key in the database."""
    place: Place
    """Where the archive has it."""
    archive_key: str
    """The name of the capture in the archive."""


@dataclass
class _Range:
    """Neighbouring frames of one object, or the key of one frame that is in the database."""

    local_key: bytes = b""
    items: list[Away] = field(default_factory=list)
    num_bytes: int = 0
    future: Future[memoryview] | None = None


class Fetcher:
    """Fetches frames. Thread-safe; each reader has its own iterators."""

    def __init__(self, objects: Objects) -> None:
        """Prepare to fetch from an archive."""
        self._objects = objects
        self._threads = Workers(_THREADS, "fetch")
        self.num_bytes = 0
        """Bytes that were fetched."""
        self.failures = 0
        """Fetches that failed."""
        self._in_a_row = 0
        self._stopped = False

    def ahead(
        self, frames: Iterable[Away | bytes], capture_id: str, tick: float
    ) -> Iterator[tuple[bytes, memoryview | None] | None]:
        """Yield the key and the bytes of each frame, in order, while the next ones are fetched.

        Args:
            frames: The frames. A key alone is that of a frame in the database; its bytes are None.
            capture_id: Their capture, for errors.
            tick: Yield None whenever nothing has come for this many seconds, so that the caller can end the wait.

        Raises:
            Failure: ARCHIVE_UNREACHABLE, CHECKSUM_MISMATCH if an object is missing or damaged, or NOT_SERVING after
                `stop`.
        """
        waiting: deque[_Range] = deque()
        num_bytes = 0
        try:
            for found in _ranges(frames):
                while waiting and (len(waiting) >= _MAX_AHEAD or num_bytes + found.num_bytes > _AHEAD_BYTES):
                    num_bytes -= waiting[0].num_bytes
                    yield from self._unpacked(waiting.popleft(), capture_id, tick)
                if found.items:
                    found.future = self._threads.submit(self._fetch, found.items)
                    num_bytes += found.num_bytes
                waiting.append(found)
            while waiting:
                yield from self._unpacked(waiting.popleft(), capture_id, tick)
        finally:
            for found in waiting:
                if found.future is not None:
                    found.future.cancel()

    def stop(self) -> None:
        """End the reads that wait for the archive, and the threads."""
        self._stopped = True
        self._threads.close()

    def _unpacked(
        self, found: _Range, capture_id: str, tick: float
    ) -> Iterator[tuple[bytes, memoryview | None] | None]:
        if found.future is None:
            yield found.local_key, None
            return
        try:
            while not self._is_done(found.future, tick):
                yield None
        finally:
            found.future.cancel()  # no thread fetches it any more if the caller has ended the wait
        data = _outcome(found.future, capture_id)
        at = 0
        for item in found.items:
            yield item.key, _checked(item, data[at : at + item.place.num_bytes], capture_id)
            at += item.place.num_bytes

    def _is_done(self, future: Future[memoryview], seconds: float) -> bool:
        """Wait for some seconds; return whether a fetch has ended.

        Raises:
            Failure: NOT_SERVING.
        """
        wait([future], 0 if future.done() else seconds)
        if future.cancelled() or (self._stopped and not future.done()):
            raise Failure(Reason.ERROR_REASON_NOT_SERVING, "The store is stopping; try again later.")
        return future.done()

    def _fetch(self, items: list[Away]) -> memoryview:
        first, last = items[0], items[-1].place
        path = chunks_path(first.archive_key, first.place.object)
        start, length = first.place.offset, last.offset + last.num_bytes - first.place.offset
        try:
            data = self._objects.get_range(path, start, length)
        except ArchiveError as error:
            self.failures += 1
            self._in_a_row += 1
            if self._in_a_row & (self._in_a_row - 1) == 0:  # the first, second, fourth, eighth and so on
                _log.warning("rows cannot be read from the archive", error=str(error), failures=self.failures)
            raise
        self._in_a_row = 0
        self.num_bytes += length
        return data


def _ranges(frames: Iterable[Away | bytes]) -> Iterator[_Range]:
    """Join neighbouring frames into ranges."""
    current: _Range | None = None
    for frame in frames:
        if isinstance(frame, bytes):
            if current is not None:
                yield current
                current = None
            yield _Range(frame)
            continue
        if current is not None and (
            current.num_bytes + frame.place.num_bytes > _RANGE_BYTES or not _follows(current.items[-1], frame)
        ):
            yield current
            current = None
        if current is None:
            current = _Range()
        current.items.append(frame)
        current.num_bytes += frame.place.num_bytes
    if current is not None:
        yield current


def _follows(before: Away, frame: Away) -> bool:
    a, b = before.place, frame.place
    return before.archive_key == frame.archive_key and a.object == b.object and a.offset + a.num_bytes == b.offset


def _outcome(future: Future[memoryview], capture_id: str) -> memoryview:
    """Return the bytes that were fetched. Callers learn neither names nor addresses of the archive; the log has them.

    Raises:
        Failure: ARCHIVE_UNREACHABLE, or CHECKSUM_MISMATCH if the object is missing.
    """
    try:
        return future.result()
    except MissingObjectError:
        message = f"The archive lacks rows of {capture_id!r}. The store's log says which object is missing."
        raise Failure(Reason.ERROR_REASON_CHECKSUM_MISMATCH, message, capture_id=capture_id) from None
    except ArchiveError:
        message = (
            f"The rows of {capture_id!r} are only in the archive, which cannot be read at the moment. The store's log "
            "says why. Try again later."
        )
        raise Failure(Reason.ERROR_REASON_ARCHIVE_UNREACHABLE, message, capture_id=capture_id) from None


def _checked(frame: Away, data: memoryview, capture_id: str) -> memoryview:
    if len(data) != frame.place.num_bytes or checksum(data) != frame.place.crc32c:
        message = f"A chunk of {capture_id!r} in the archive is damaged: its checksum does not match."
        raise Failure(Reason.ERROR_REASON_CHECKSUM_MISMATCH, message, capture_id=capture_id)
    return data
