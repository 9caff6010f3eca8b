"""The database: the only file that knows LMDB.

What survives what. Data pages of a transaction are synced before its root page is written (`sync=True`), always. So a
loss of power never leaves a damaged tree, as far as the disk keeps what fdatasync promised. The root page itself:

* with `sync_roots`, it is written synchronously too: a commit survives the loss of power when `write` returns;
* without, it stays in the kernel's page cache: a commit survives the end of the process, however sudden, when `write`
  returns, and the loss of power after the next `write` (whose sync covers it) or after `sync`.

What is there when the database is opened is synced first: a process before, perhaps with another setting, may have been
killed between a commit and its sync, and whoever sends a row again is told that it is there. So are the folders that
were made, without which a file has no name.

`sync=False` would let the kernel write the root before the pages it points to, and LMDB writes over pages that were
freed since: a loss of power could then damage what was synced long ago. It is not offered. `writemap` is not used
either: a file with holes and a full disk would end the process by SIGBUS instead of raising.

The map is as large as the database may ever become: that costs address space, not memory, and the file grows with what
is written. So the map never moves, and readers need no lock.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import lmdb

_T = TypeVar("_T")

_FORMAT = b"2"
_LARGEST_RESERVE = 64 << 20

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""What LMDB raises when the disk is full: a write that was cut short is EIO, like one that met a bad disk."""

_NOT_FOR_FOLDERS = {errno.EINVAL, errno.ENOTSUP}
"""What a file system says that needs, or knows, no sync of folders."""


class Table(enum.Enum):
    """The tables."""

    FRAMES = b"frames"
    """FrameKey -> the bytes of a Chunk, as they came."""
    LIVE = b"live"
    """Number -> CaptureManifest of a capture that has not ended, without its rows: those follow from the frames."""
    ENDED = b"ended"
    """Number -> CaptureManifest of an ended capture, whole."""
    SEALS = b"seals"
    """Number -> SealCaptureRequest."""
    LOSSES = b"losses"
    """Number and index -> RowLoss."""
    DOOMED = b"doomed"
    """Number of a deleted capture whose frames are not all freed yet -> nothing."""
    META = b"meta"
    """Name -> value: the format, the store's own id, the next capture number."""


def bytes_for_appends(max_bytes: int) -> int:
    """Return how much of a map is for chunks; the rest is kept for ending and deleting captures."""
    return max_bytes - min(max_bytes // 8, _LARGEST_RESERVE)


class StoreFullError(Exception):
    """There is no room: the map has reached its limit, or the disk or quota is full. Nothing was written."""


class DamagedError(Exception):
    """The database cannot be used any more by this process; its text says why."""


class Txn:
    """A transaction. Views that it returns are valid until it ends or writes."""

    def __init__(self, raw: Any, tables: dict[Table, Any]) -> None:
        self._raw = raw
        self._tables = tables
        self.wrote = False
        """Whether anything was put. LMDB does nothing, and syncs nothing, when a transaction without changes ends."""

    def get(self, table: Table, key: bytes) -> memoryview | None:
        """Return a value, or None."""
        value: memoryview | None = self._raw.get(key, db=self._tables[table])
        return value

    def put(self, table: Table, key: bytes, value: bytes | memoryview) -> None:
        """Write a value."""
        self.wrote = True
        self._raw.put(key, value, db=self._tables[table])

    def delete(self, table: Table, key: bytes) -> None:
        """Delete a value if it is there."""
        self._raw.delete(key, db=self._tables[table])

    def count(self, table: Table) -> int:
        """Return the number of a table's entries."""
        return int(self._raw.stat(self._tables[table])["entries"])

    def items(self, table: Table, prefix: bytes = b"") -> Iterator[tuple[bytes, memoryview]]:
        """Yield the entries whose key starts with `prefix`, in the order of their keys."""
        cursor = self._raw.cursor(db=self._tables[table])
        found = cursor.set_range(prefix) if prefix else cursor.first()
        while found and (key := bytes(cursor.key())).startswith(prefix):
            yield key, cursor.value()
            found = cursor.next()

    def next_key(self, table: Table, at: bytes) -> bytes | None:
        """Return the least key that does not sort before `at`, or None, without touching its value."""
        cursor = self._raw.cursor(db=self._tables[table])
        return bytes(cursor.key()) if cursor.set_range(at) else None

    def delete_some(self, table: Table, prefix: bytes, limit: int) -> int:
        """Delete at most `limit` entries whose key starts with `prefix`; return how many it deleted."""
        cursor = self._raw.cursor(db=self._tables[table])
        found, deleted = cursor.set_range(prefix), 0
        while found and deleted < limit and bytes(cursor.key()).startswith(prefix):
            found = cursor.delete()  # moves to the next entry
            deleted += 1
            found = found and bool(cursor.key())
        return deleted

    def used_pages(self) -> int:
        """Return how many pages the tables take, this transaction's own included."""
        stats = (self._raw.stat(table) for table in self._tables.values())
        return sum(int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) for stat in stats)


class Database:
    """An LMDB environment in a folder of its own, locked against a second process."""

    def __init__(self, path: Path, max_bytes: int, *, sync_roots: bool, max_readers: int = 512) -> None:
        """Open the database, or make it.

        Args:
            path: The folder.
            max_bytes: The greatest size that it may grow to.
            sync_roots: Whether a commit is synced when `write` returns; see the module.
            max_readers: Threads that may read at once.

        Raises:
            DamagedError: The folder is in use by another store, or holds something else; or it cannot be synced.
        """
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        self.max_bytes = max_bytes
        """The greatest size that it may grow to."""
        self.ordinary_bytes = bytes_for_appends(max_bytes)
        """How much of it is for chunks."""
        self._data = path / "data.mdb"
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
            raise DamagedError(f"cannot open the database in {path}: {error}") from error
        self._check_format(path)
        self.sync()
        for folder in (path, *(folder.parent for folder in made)):
            _sync_folder(folder)

    def read(self) -> _Reading:
        """Return a context manager that yields a short read transaction. Copy out what is wanted and end it."""
        return _Reading(self._env, self._tables)

    def write(self, change: Callable[[Txn], _T], *, reserve: bool = False) -> _T:
        """Run a change in a transaction and commit it.

        Args:
            change: What to do. When it raises, nothing is written.
            reserve: It may use the room that is kept for ending and deleting captures, which must work in a full store.

        Returns:
            What the change returned.

        Raises:
            StoreFullError: There is no room. Nothing was written.
            DamagedError: LMDB cannot go on.
        """
        try:
            with self._env.begin(write=True, buffers=True) as raw:
                txn = Txn(raw, self._tables)
                result = change(txn)
                if txn.wrote and not reserve and txn.used_pages() * self._page_bytes > self.ordinary_bytes:
                    raise StoreFullError(self._limit_text())
                return result
        except lmdb.MapFullError:
            raise StoreFullError(self._limit_text()) from None
        except lmdb.Error as error:
            if error.code in _NO_ROOM:
                raise StoreFullError(f"the disk is full, or fails: {error}") from error
            raise DamagedError(str(error)) from error

    def sync(self) -> None:
        """Sync everything that is committed."""
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise DamagedError(f"cannot sync: {error}") from error

    def disk_bytes(self) -> int:
        """Return the bytes that the database takes on disk."""
        return self._data.stat().st_blocks * 512

    def free_disk_bytes(self) -> int:
        """Return the bytes that are free on its disk, for programs without privileges."""
        disk = os.statvfs(self._data)
        return disk.f_bavail * disk.f_frsize

    def num_chunks(self) -> int:
        """Return how many chunks there are, those of deleted captures included that are not freed yet."""
        with self.read() as txn:
            return txn.count(Table.FRAMES)

    def used_bytes(self) -> int:
        """Return the bytes of the pages that hold something; those of deleted captures are used again."""
        with self.read() as txn:
            return txn.used_pages() * self._page_bytes

    def close(self) -> None:
        """Close the database. Nobody may use it any more."""
        self._env.close()
        self._lock.close()

    def _limit_text(self) -> str:
        return f"the database has reached its limit of {self.max_bytes} bytes"

    def _check_format(self, path: Path) -> None:
        with self.read() as txn:
            value = txn.get(Table.META, b"format")
            found = bytes(value) if value is not None else None
        if found is None:
            self.write(lambda txn: txn.put(Table.META, b"format", _FORMAT))
        elif found != _FORMAT:
            raise DamagedError(f"{path} holds a database of format {found!r}; this version reads {_FORMAT!r}")


class _Reading:
    """The context manager of a read transaction; a class, for it is entered once for each frame that is read."""

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


def _lock(path: Path) -> IO[bytes]:
    handle = path.open("wb")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise DamagedError(f"{path.parent} is in use by another store") from None
    return handle


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            raise DamagedError(f"cannot sync {path}: {error}") from error
    finally:
        os.close(descriptor)
