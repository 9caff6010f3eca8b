"""The database. No other file uses LMDB.

Durability. LMDB always syncs the data pages of a transaction before it writes the root page (`sync=True`). So a power
failure never leaves a damaged tree, if the disk keeps what fdatasync promises. The root page depends on `sync_roots`:

* With `sync_roots`, LMDB writes the root page synchronously. A commit survives a power failure once `write` returns.
* Without it, the root page stays in the kernel's page cache. A commit survives the death of the process once `write`
  returns. It survives a power failure after the next `write`, whose sync covers it, or after `sync`.

Opening a database syncs its contents first. An earlier process may have been killed between a commit and its sync, and
the store tells writers that repeat such rows that it has them. Opening also syncs the folders it creates: without that,
a power failure can lose the file's name.

Two LMDB options are not offered:

* `sync=False` lets the kernel write the root page before the pages it points to. LMDB reuses freed pages, so a power
  failure could then damage data that was synced long ago.
* `writemap` leaves holes in the file. On a full disk, writing to one ends the process with SIGBUS instead of an error.

The map has the greatest size that the database may reach. This takes address space, not memory; the file grows as data
is written. So the map never moves, and readers need no lock.

A full store must still be able to end and delete captures, and that writes pages too. So chunks never get all the room:

* Of the map, an eighth is reserved, at most 64 MiB.
* Of the disk, 4 MiB are reserved. The file always has that many bytes allocated beyond its pages in use, so that other
  programs cannot take them. Some file systems cannot allocate bytes in advance (ZFS, some network file systems). There,
  ending and deleting captures on a full disk only works if LMDB has a free page.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import lmdb

_T = TypeVar("_T")

_FORMAT = b"2"
_LARGEST_RESERVE = 64 << 20
_DISK_RESERVE = 4 << 20
"""Bytes on the disk that chunks leave free; see the module's docstring."""
_KEEP_SIZE = 1
"""The flag FALLOC_FL_KEEP_SIZE of fallocate(2)."""
_GROWTH_STEP = 64 << 10
"""The file's allocation grows by multiples of this, so that not every transaction asks the file system."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Errors that LMDB raises when the disk is full. A truncated write is EIO, as is a write to a bad disk."""

_CANNOT_ALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}
"""Errors of file systems that cannot allocate bytes in advance."""

_NOT_FOR_FOLDERS = {errno.EINVAL, errno.ENOTSUP}
"""Errors of file systems on which folders cannot be synced, or need no sync."""


class Table(enum.Enum):
    """The tables."""

    FRAMES = b"frames"
    """FrameKey -> the bytes of a Chunk, as received."""
    LIVE = b"live"
    """Number -> CaptureManifest of an open capture, without its rows, which follow from the frames."""
    ENDED = b"ended"
    """Number -> the whole CaptureManifest of an ended capture."""
    SEALS = b"seals"
    """Number -> SealCaptureRequest."""
    LOSSES = b"losses"
    """Number and index -> RowLoss."""
    DOOMED = b"doomed"
    """Number of a deleted capture with frames still to free -> an empty value."""
    LABELS = b"labels"
    """Number -> CaptureManifest with nothing but the labels of a capture that has any. Databases that were made before
    labels get this table and the next one, empty, when they are opened."""
    LABEL_INDEX = b"label_index"
    """Digest of a tenant, a label and its value, and number -> an empty value."""
    META = b"meta"
    """Name -> value: the format, the store's own ID, the next capture number."""


def bytes_for_appends(max_bytes: int) -> int:
    """Return how many bytes of a map are for chunks. The rest is reserved for ending and deleting captures."""
    return max_bytes - min(max_bytes // 8, _LARGEST_RESERVE)


class StoreFullError(Exception):
    """The map has reached its limit, or the disk or quota is full. Nothing was written."""


class DamagedError(Exception):
    """This process can no longer use the database; the message says why."""


class Txn:
    """A transaction. The views that it returns are valid until it ends or writes."""

    def __init__(self, raw: Any, tables: dict[Table, Any]) -> None:
        self._raw = raw
        self._tables = tables
        self.wrote = False
        """Whether `put` was called. LMDB commits and syncs nothing if a transaction changed nothing."""

    def get(self, table: Table, key: bytes) -> memoryview | None:
        """Return the value of a key, or None."""
        value: memoryview | None = self._raw.get(key, db=self._tables[table])
        return value

    def put(self, table: Table, key: bytes, value: bytes | memoryview) -> None:
        """Write a value."""
        self.wrote = True
        self._raw.put(key, value, db=self._tables[table])

    def delete(self, table: Table, key: bytes) -> None:
        """Delete a key and its value, if present."""
        self._raw.delete(key, db=self._tables[table])

    def count(self, table: Table) -> int:
        """Return the number of entries in a table."""
        return int(self._raw.stat(self._tables[table])["entries"])

    def items(self, table: Table, prefix: bytes = b"") -> Iterator[tuple[bytes, memoryview]]:
        """Yield the entries whose key starts with `prefix`, in key order."""
        cursor = self._raw.cursor(db=self._tables[table])
        found = cursor.set_range(prefix) if prefix else cursor.first()
        while found and (key := bytes(cursor.key())).startswith(prefix):
            yield key, cursor.value()
            found = cursor.next()

    def next_key(self, table: Table, at: bytes) -> bytes | None:
        """Return the first key not less than `at`, or None, without touching its value."""
        cursor = self._raw.cursor(db=self._tables[table])
        return bytes(cursor.key()) if cursor.set_range(at) else None

    def keys_before(self, table: Table, prefix: bytes, at: bytes, limit: int) -> list[bytes]:
        """Return at most `limit` keys below `at` that start with `prefix`, the largest first."""
        cursor = self._raw.cursor(db=self._tables[table])
        keys: list[bytes] = []
        found = cursor.prev() if cursor.set_range(at) else cursor.last()
        while found and len(keys) < limit and (key := bytes(cursor.key())).startswith(prefix):
            keys.append(key)
            found = cursor.prev()
        return keys

    def delete_some(self, table: Table, prefix: bytes, limit: int) -> int:
        """Delete at most `limit` entries whose key starts with `prefix`; return how many were deleted."""
        cursor = self._raw.cursor(db=self._tables[table])
        found, deleted = cursor.set_range(prefix), 0
        while found and deleted < limit and bytes(cursor.key()).startswith(prefix):
            found = cursor.delete()  # moves to the next entry
            deleted += 1
            found = found and bool(cursor.key())
        return deleted

    def used_pages(self) -> int:
        """Return how many pages the tables take, including those of this transaction."""
        stats = (self._raw.stat(table) for table in self._tables.values())
        return sum(int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) for stat in stats)


class Database:
    """An LMDB environment in its own folder, locked against other processes."""

    def __init__(self, path: Path, max_bytes: int, *, sync_roots: bool, max_readers: int = 512) -> None:
        """Open the database, or create it.

        Args:
            path: The folder.
            max_bytes: The greatest size that the database may reach.
            sync_roots: Whether a commit is synced when `write` returns; see the module's docstring.
            max_readers: How many threads may read at once.

        Raises:
            DamagedError: Another store uses the folder, it holds something else, or it cannot be synced.
        """
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        self.max_bytes = max_bytes
        """The greatest size that the database may reach."""
        self.ordinary_bytes = bytes_for_appends(max_bytes)
        """The part of `max_bytes` that is for chunks."""
        self._data = path / "data.mdb"
        self._disk_reserve: int | None = min(max_bytes - self.ordinary_bytes, _DISK_RESERVE)  # None: not possible here
        self._lock = _lock(path / "store.lock")
        try:
            self._env = lmdb.Environment(
                str(path),
                map_size=max_bytes,
                max_dbs=len(Table),
                max_readers=max_readers,
                sync=True,
                metasync=sync_roots,
                writemap=False,
            )
            self._page_bytes = int(self._env.stat()["psize"])
            self._tables = {table: self._env.open_db(table.value) for table in Table}
        except lmdb.Error as error:
            raise DamagedError(f"Cannot open the database in {path}: {error}.") from error
        self._allocated = self._data.stat().st_size
        self._check_format(path)
        self.sync()
        for folder in (path, *(folder.parent for folder in made)):
            _sync_folder(folder)
        with suppress(StoreFullError):  # stored captures can still be read and deleted
            self._check_disk(self.used_bytes())

    def read(self) -> _Reading:
        """Return a context manager of a read transaction. Keep it short: copy the data and leave the context."""
        return _Reading(self._env, self._tables)

    def write(self, change: Callable[[Txn], _T], *, reserve: bool = False) -> _T:
        """Run a change in a transaction and commit it.

        Args:
            change: The change. If it raises, nothing is written.
            reserve: Whether it may use the space of the map and of the disk that is reserved for ending and deleting
                captures. Both must work in a full store.

        Returns:
            What the change returned.

        Raises:
            StoreFullError: There is no room. Nothing was written.
            DamagedError: LMDB failed in another way.
        """
        try:
            with self._env.begin(write=True, buffers=True) as raw:
                txn = Txn(raw, self._tables)
                result = change(txn)
                if txn.wrote and not reserve:
                    self._check_room(txn.used_pages() * self._page_bytes)
                return result
        except lmdb.MapFullError:
            raise StoreFullError(self._limit_text()) from None
        except lmdb.Error as error:
            if error.code in _NO_ROOM:
                raise StoreFullError(f"the disk is full or failing: {error}") from error
            raise DamagedError(str(error)) from error

    def sync(self) -> None:
        """Sync all commits to disk."""
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise DamagedError(f"Cannot sync the database: {error}.") from error

    def disk_bytes(self) -> int:
        """Return the bytes that the database takes on disk."""
        return self._data.stat().st_blocks * 512

    def free_disk_bytes(self) -> int:
        """Return the bytes on the database's disk that are free for unprivileged programs."""
        disk = os.statvfs(self._data)
        return disk.f_bavail * disk.f_frsize

    def num_chunks(self) -> int:
        """Return the number of chunks, including those of deleted captures that are not freed yet."""
        with self.read() as txn:
            return txn.count(Table.FRAMES)

    def used_bytes(self) -> int:
        """Return the bytes of the pages in use. LMDB reuses the pages of deleted captures."""
        with self.read() as txn:
            return txn.used_pages() * self._page_bytes

    def close(self) -> None:
        """Close the database. It must not be used afterwards."""
        self._env.close()
        self._lock.close()

    def _check_room(self, used_bytes: int) -> None:
        """Make sure that the reserves remain when the pages in use take this many bytes.

        Raises:
            StoreFullError: They would not.
        """
        if used_bytes > self.ordinary_bytes:
            raise StoreFullError(self._limit_text())
        self._check_disk(used_bytes)

    def _check_disk(self, used_bytes: int) -> None:
        if self._disk_reserve is None or used_bytes + self._disk_reserve <= self._allocated:
            return
        end = -(-(used_bytes + self._disk_reserve) // _GROWTH_STEP) * _GROWTH_STEP
        try:
            _allocate(self._data, self._allocated, end)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise StoreFullError(f"the disk is full: {error.strerror}") from error
            if error.errno not in _CANNOT_ALLOCATE:
                raise
            self._disk_reserve = None
        else:
            self._allocated = end

    def _limit_text(self) -> str:
        return f"the database has reached its limit of {self.max_bytes} bytes"

    def _check_format(self, path: Path) -> None:
        with self.read() as txn:
            value = txn.get(Table.META, b"format")
            found = bytes(value) if value is not None else None
        if found is None:
            self.write(lambda txn: txn.put(Table.META, b"format", _FORMAT))
        elif found != _FORMAT:
            raise DamagedError(
                f"{path} holds a database of format {found!r}, but this version of the store reads format {_FORMAT!r}. "
                "Use the version that wrote it, or another --path."
            )


class _Reading:
    """The context manager of a read transaction. It is a class for speed: the store enters one for each frame."""

    def __init__(self, env: Any, tables: dict[Table, Any]) -> None:
        self._env, self._tables = env, tables

    def __enter__(self) -> Txn:
        try:
            self._raw = self._env.begin(buffers=True)
        except lmdb.Error as error:
            raise DamagedError(str(error)) from error
        return Txn(self._raw, self._tables)

    def __exit__(self, *_: object) -> None:
        self._raw.abort()


def _allocate(path: Path, start: int, end: int) -> None:
    """Allocate bytes of a file on its disk, without changing its size.

    Raises:
        OSError: There is no room, or the file system cannot do it.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)  # os.posix_fallocate changes the size
    if fallocate is None:
        raise OSError(errno.ENOSYS, "this system has no fallocate")
    descriptor = os.open(path, os.O_RDWR)
    try:
        if fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(end - start)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)


def _lock(path: Path) -> IO[bytes]:
    handle = path.open("wb")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise DamagedError(
            f"{path.parent} is in use by another store. Stop that store, or choose another --path."
        ) from None
    return handle


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            raise DamagedError(f"Cannot sync {path}: {error}.") from error
    finally:
        os.close(descriptor)
