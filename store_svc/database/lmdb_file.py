"""One LMDB file of the database. No other module uses LMDB.

Durability. LMDB always syncs the data pages of a transaction before it writes the root page (`sync=True`). So a power
failure never leaves a damaged tree, if the disk keeps what fdatasync promises. The root page depends on `sync_roots`:

* With `sync_roots`, LMDB writes the root page synchronously. A commit survives a power failure once it returns.
* Without it, the root page stays in the kernel's page cache. A commit survives the death of the process once it
  returns. It survives a power failure after the file's next commit, whose sync covers it, or after `sync`.

Two LMDB options are not offered:

* `sync=False` lets the kernel write the root page before the pages it points to. LMDB reuses freed pages, so a power
  failure could then damage data that was synced long ago.
* `writemap` leaves holes in the file. On a full disk, writing to one ends the process with SIGBUS instead of an error.
  And LMDB then writes its root page in place. Its source writes the transaction's number last, but a compiler may
  change that order. So a process that is killed in between may leave a damaged tree, even on tmpfs.

The map has the greatest size that the database may reach. This takes address space, not memory; the file grows as data
is written. So the map never moves, and readers need no lock.

The file always has some bytes allocated beyond its pages in use, its reserve, so that other programs cannot take them.
Some file systems cannot allocate bytes in advance (ZFS, some network file systems). There, a write to a full disk only
works if LMDB has a free page.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb

from store_svc.database.large_values import LargeValues

_KEEP_SIZE = 1
"""The flag FALLOC_FL_KEEP_SIZE of fallocate(2)."""
_GROWTH_STEP = 64 << 10
"""The file's allocation grows by multiples of this, so that not every transaction asks the file system."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Errors that LMDB raises when the disk is full. A truncated write is EIO, as is a write to a bad disk."""

_CANNOT_ALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}
"""Errors of file systems that cannot allocate bytes in advance."""

TRIAL = b"trial"
"""META's key of a trial's bytes. Its value is empty between trials."""


class Table(enum.Enum):
    """The tables."""

    FRAMES = b"frames"
    """FrameKey -> the bytes of a Chunk, as received; its payload alone, if HEADS has the same key."""
    HEADS = b"heads"
    """FrameKey -> the bytes of a Chunk without its payload; see `frames`."""
    LIVE = b"live"
    """Number -> CaptureManifest of an open capture, without its rows, which follow from the frames."""
    ENDED = b"ended"
    """Number -> the whole CaptureManifest of an ended capture."""
    SEALS = b"seals"
    """Number -> SealCaptureRequest."""
    LOSSES = b"losses"
    """Number and index -> RowLoss."""
    DOOMED = b"doomed"
    """Number of a deleted capture with frames still to free -> an empty value. If only its frames in this database are
    to be freed, because the archive has them: ROWS_ONLY."""
    LABELS = b"labels"
    """Number -> CaptureManifest with nothing but the labels of a capture that has any. Databases that were made before
    labels get this table and the next one, empty, when they are opened."""
    LABEL_INDEX = b"label_index"
    """Digest of a tenant, a label and its value, and number -> an empty value."""
    ARCHIVED = b"archived"
    """Number -> how far a capture is in the archive, and the name of its objects; see `archive.records`."""
    PLACES = b"places"
    """FrameKey -> where the archive has the frame. Complete once ARCHIVED says that the capture is there."""
    ARCHIVE_WORK = b"archive_work"
    """What the archive must still be told; see `archive.records`."""
    META = b"meta"
    """Name -> value: the format, the shards, the store's own ID, the next capture number."""


class StoreFullError(Exception):
    """The map has reached its limit, or the disk or quota is full. Nothing was written."""


class DamagedError(Exception):
    """This process can no longer use the database; the message says why."""


class LmdbFile:
    """One LMDB environment. Any thread may read; one thread at a time may write."""

    def __init__(
        self,
        folder: Path,
        tables: Iterable[Table],
        max_bytes: int,
        *,
        map_reserve: int,
        disk_reserve: int,
        sync_roots: bool,
        max_readers: int,
    ) -> None:
        """Open the file, or create it.

        Args:
            folder: Its folder, which exists.
            tables: Its tables.
            max_bytes: The size of the map.
            map_reserve: Bytes of the map for ending and deleting captures.
            disk_reserve: Bytes on the disk that `allocate` keeps beyond the pages in use.
            sync_roots: Whether a commit is synced when it returns; see the module's docstring.
            max_readers: How many threads may read at once.

        Raises:
            DamagedError: The folder holds something else, or the file cannot be opened.
        """
        self.folder = folder
        self._data = folder / "data.mdb"
        self._disk_reserve: int | None = disk_reserve  # None: not possible here
        self._sync_roots = sync_roots
        self._max_bytes = self._map_bytes = max_bytes
        self._map_reserve = map_reserve
        try:
            self._env = lmdb.Environment(
                str(folder),
                map_size=max_bytes,
                max_dbs=len(Table),
                max_readers=max_readers,
                sync=True,
                metasync=sync_roots,
                writemap=False,
            )
            self.page_bytes = int(self._env.stat()["psize"])
            self.large_values = LargeValues(self._data, self.page_bytes)
            """Finds frames for read transactions."""
            self.tables = {table: self._env.open_db(table.value) for table in tables}
        except lmdb.Error as error:
            raise DamagedError(f"Cannot open the database in {folder}: {error}.") from error
        self._opened = self._data.open("r+b", buffering=0)  # kept: later the process may have too many open files
        self._allocated = self._data.stat().st_size
        self.is_synced = False
        """Whether every commit survives a power failure. An earlier process may have left commits that do not."""
        with self.reading() as raw:
            self.used_bytes = self.measure(raw)
            """Bytes of the pages in use. LMDB reuses the pages of what was deleted."""
        if self.used_bytes + map_reserve > max_bytes:
            # The limit was greater before. Deleting writes pages too, so without more room nothing could be deleted.
            self._map_bytes = max(max_bytes, self._allocated + map_reserve)
            self._env.set_mapsize(self._map_bytes)

    def begin(self) -> Any:
        """Begin a read transaction, which the caller aborts.

        Raises:
            DamagedError: LMDB failed.
        """
        try:
            return self._env.begin(buffers=True)
        except lmdb.Error as error:
            raise DamagedError(str(error)) from error

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """Yield a read transaction."""
        raw = self.begin()
        try:
            yield raw
        finally:
            raw.abort()

    @contextmanager
    def writing(self) -> Iterator[Any]:
        """Yield a write transaction, and commit it. If the context raises, nothing is written.

        Raises:
            StoreFullError: There is no room. Nothing was written.
            DamagedError: LMDB failed in another way.
        """
        with self._failures():
            with self._env.begin(write=True, buffers=True) as raw:
                yield raw
                number, used = raw.id(), self.measure(raw)
            if self._env.info()["last_txnid"] == number:  # LMDB commits nothing if nothing was changed
                self.used_bytes = used
                self.is_synced = self._sync_roots

    def commit_nothing(self) -> None:
        """Commit a transaction that means nothing: LMDB uses freed pages only two transactions later.

        It empties a trial. If there is no room, it does nothing.

        Raises:
            DamagedError: LMDB failed in another way.
        """
        with suppress(StoreFullError), self.writing() as raw:
            raw.put(TRIAL, b"", db=self.tables[Table.META])

    def measure(self, raw: Any) -> int:
        """Return the bytes of the pages that the tables take, as a transaction sees them."""
        stats = (raw.stat(table) for table in self.tables.values())
        pages = sum(int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) for stat in stats)
        return pages * self.page_bytes

    def sync(self) -> None:
        """Sync all commits to disk.

        Raises:
            StoreFullError: The disk is full or failing.
            DamagedError: LMDB failed in another way.
        """
        with self._failures():
            self._env.sync(True)
        self.is_synced = True

    def allocate(self, used_bytes: int) -> None:
        """Make sure that the reserve on the disk remains when the pages in use take this many bytes.

        Raises:
            StoreFullError: It would not.
        """
        if self._disk_reserve is None or used_bytes + self._disk_reserve <= self._allocated:
            return
        end = -(-(used_bytes + self._disk_reserve) // _GROWTH_STEP) * _GROWTH_STEP
        try:
            _allocate(self._opened.fileno(), self._allocated, end)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise StoreFullError(f"the disk is full: {error.strerror}") from error
            if error.errno not in _CANNOT_ALLOCATE:
                raise
            self._disk_reserve = None
        else:
            self._allocated = end

    def check_reserve(self) -> None:
        """Make sure that half of the reserves of the map and on the disk is left.

        Raises:
            StoreFullError: It is not.
        """
        if self.used_bytes + self._map_reserve // 2 > self._map_bytes:
            raise StoreFullError(limit_text(self._max_bytes))
        self.allocate(self.used_bytes - (self._disk_reserve or 0) // 2)

    def disk_bytes(self) -> int:
        """Return the bytes that the file takes on disk."""
        return self._data.stat().st_blocks * 512

    def free_disk_bytes(self) -> int:
        """Return the bytes on the file's disk that are free for unprivileged programs."""
        disk = os.statvfs(self._data)
        return disk.f_bavail * disk.f_frsize

    def close(self) -> None:
        """Close the file. It must not be used afterwards."""
        self._opened.close()
        self._env.close()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except lmdb.MapFullError:
            raise StoreFullError(limit_text(self._max_bytes)) from None
        except lmdb.Error as error:
            if error.code in _NO_ROOM:
                raise StoreFullError(f"the disk is full or failing: {error}") from error
            raise DamagedError(str(error)) from error


def limit_text(max_bytes: int) -> str:
    """Return why a database is full that has reached this size."""
    return f"the database has reached its limit of {max_bytes} bytes"


def next_key(raw: Any, table: Any, at: bytes) -> bytes | None:
    """Return the first key of a table not less than `at`, or None, without touching its value."""
    cursor = raw.cursor(db=table)
    return bytes(cursor.key()) if cursor.set_range(at) else None


def items(raw: Any, table: Any, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the entries of a table whose key starts with `prefix`, in key order."""
    cursor = raw.cursor(db=table)
    found = cursor.set_range(prefix) if prefix else cursor.first()
    while found and (key := bytes(cursor.key())).startswith(prefix):
        yield key, cursor.value()
        found = cursor.next()


def _allocate(descriptor: int, start: int, end: int) -> None:
    """Allocate bytes of a file on its disk, without changing its size.

    Raises:
        OSError: There is no room, or the file system cannot do it.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)  # os.posix_fallocate changes the size
    if fallocate is None:
        raise OSError(errno.ENOSYS, "this system has no fallocate")
    if fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(end - start)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
