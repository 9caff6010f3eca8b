"""The frames of captures, wherever they are: in the database, or in the archive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from residuum.wire.rows.frame_keys import unpack_frame
from residuum.wire.rows.frames import FrameError
from store_svc.archive import records
from store_svc.archive.fetching import Away, Fetcher
from store_svc.captures.capture_names import unknown_capture
from store_svc.database.db import Database, Table, Txn
from store_svc.database.frames import StoredFrame
from store_svc.database.keys import after_group, pack_number
from store_svc.reading.open_read import check_not_cancelled
from store_svc.reading.query import Query
from store_svc.reading.stored_chunks import damaged

_KEYS_AT_ONCE = 1024
"""Keys that one read transaction looks at."""

_LOOK_SECONDS = 0.25
"""How often a read that waits for the archive looks whether its caller has cancelled."""

IsCancelled = Callable[[], bool]
"""Returns whether the caller has cancelled."""


class Frame:
    """One frame. Entering it yields a StoredFrame, valid until the exit; it can be entered several times.

    It is a class for speed: the store enters one for each frame. A frame that is dropped from the database meanwhile
    comes from the archive.
    """

    def __init__(
        self,
        db: Database,
        fetcher: Fetcher | None,
        key: bytes,
        capture_id: str,
        is_cancelled: IsCancelled,
        data: memoryview | None = None,
    ) -> None:
        """Prepare to read a frame. `data` are its bytes, if they were fetched already."""
        self.key = key
        self._db = db
        self._fetcher = fetcher
        self._capture_id = capture_id
        self._is_cancelled = is_cancelled
        self._data = data

    @property
    def is_fetched(self) -> bool:
        """Whether the frame's bytes came from the archive."""
        return self._data is not None

    def __enter__(self) -> StoredFrame:
        if self._data is None:
            self._reading = self._db.read()
            txn = self._reading.__enter__()
            try:
                frame = txn.frame(self.key)
                if frame is not None:
                    return frame
            except FrameError:
                self._reading.__exit__()
                raise damaged(self._capture_id) from None
            except BaseException:
                self._reading.__exit__()
                raise
            self._reading.__exit__()
            if self._fetcher is None:
                raise unknown_capture(self._capture_id)
            fetched = _fetched(self._fetcher, [self._where()], self._capture_id, self._is_cancelled)
            self._data = next(data for _, data in fetched if data is not None)
        try:
            return StoredFrame.of(None, self._data)
        except FrameError:
            raise damaged(self._capture_id) from None

    def __exit__(self, *_: object) -> None:
        if self._data is None:
            self._reading.__exit__()

    def _where(self) -> Away:
        """Return where the archive has the frame, in a transaction that began after the frame was dropped.

        Raises:
            Failure: UNKNOWN_CAPTURE: it has not; the capture was deleted.
        """
        with self._db.read() as txn:
            record = records.read_record(txn, unpack_frame(self.key).number)
            place = records.place_of(txn, self.key)
        if record is None or place is None:
            raise unknown_capture(self._capture_id)
        return Away(self.key, place, record.key)


class FrameAccess:
    """Finds the frames of captures, and fetches those that are only in the archive."""

    def __init__(self, db: Database, fetcher: Fetcher | None = None) -> None:
        """Use a database, and perhaps an archive."""
        self._db = db
        self._fetcher = fetcher

    def frame(self, key: bytes, capture_id: str, is_cancelled: IsCancelled) -> Frame:
        """Return a frame."""
        return Frame(self._db, self._fetcher, key, capture_id, is_cancelled)

    def wanted(self, number: int, query: Query, is_cancelled: IsCancelled) -> Iterator[Frame]:
        """Yield the wanted frames of an ended capture. Those in the archive are fetched ahead.

        Raises:
            Failure: ARCHIVE_UNREACHABLE or CHECKSUM_MISMATCH, or the caller has cancelled.
        """
        found = self._scan(number, query)
        if self._fetcher is None:
            yield from (Frame(self._db, None, _key(item), query.capture_id, is_cancelled) for item in found)
            return
        for key, data in _fetched(self._fetcher, found, query.capture_id, is_cancelled):
            yield Frame(self._db, self._fetcher, key, query.capture_id, is_cancelled, data)

    def _scan(self, number: int, query: Query) -> Iterator[bytes | Away]:
        """Yield the keys of the wanted frames, with their places if they are only in the archive."""
        prefix = at = pack_number(number)
        while at:
            found, at = self._collect(number, prefix, at, query)
            yield from found

    def _collect(self, number: int, prefix: bytes, at: bytes, query: Query) -> tuple[list[bytes | Away], bytes]:
        """Return the next wanted frames from a key on, and the key to continue from, empty after the last."""
        found: list[bytes | Away] = []
        with reading_rows(self._db, number) as (txn, record):
            table = records.frames_table(record)
            for _ in range(_KEYS_AT_ONCE):
                raw = txn.next_key(table, at)
                if raw is None or not raw.startswith(prefix):
                    return found, b""
                key = unpack_frame(raw)
                if not query.wants_group(key):
                    at = after_group(raw)
                    continue
                if query.wants(key):
                    found.append(located(txn, raw, record))
                at = raw + b"\0"
        return found, at


def _fetched(
    fetcher: Fetcher, frames: Iterable[Away | bytes], capture_id: str, is_cancelled: IsCancelled
) -> Iterator[tuple[bytes, memoryview | None]]:
    """Yield the key and the bytes of each frame; None for those of a frame in the database.

    Raises:
        Failure: As `Fetcher.ahead`, or the caller has cancelled while the archive did not answer.
    """
    for item in fetcher.ahead(frames, capture_id, _LOOK_SECONDS):
        if item is None:
            check_not_cancelled(is_cancelled)
        else:
            yield item


@contextmanager
def reading_rows(db: Database, number: int) -> Iterator[tuple[Txn, records.Record | None]]:
    """Yield a read transaction, and the record of a capture in it, with which all frames of the capture are found.

    A transaction sees shards as they are a little later than the main file. Frames may be dropped in between. With the
    record from before, a reader would look for them only in the database.
    """
    while True:
        with db.read() as txn:
            record = records.read_record(txn, number)
            txn.next_key(Table.FRAMES, b"")  # from now on it sees the shards as they are
            with db.read() as later:
                is_current = records.read_record(later, number) == record
            if is_current:
                yield txn, record
                return


def located(txn: Txn, key: bytes, record: records.Record | None) -> bytes | Away:
    """Return the key of a frame, with its place if only the archive has it.

    Args:
        txn: The transaction.
        key: The key.
        record: The record of its capture.
    """
    if record is None or record.state != records.MOVED or txn.next_key(Table.FRAMES, key) == key:
        return key
    place = records.place_of(txn, key)
    return key if place is None else Away(key, place, record.key)


def _key(item: bytes | Away) -> bytes:
    return item if isinstance(item, bytes) else item.key
