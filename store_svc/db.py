"""The database: the only file that knows LMDB.

What survives what. Data pages of a transaction are synced before its root page is written (`sync=True`), always. So a
loss of power never leaves a damaged tree, as far as the disk keeps what fdatasync promised. The root page itself:

* with `sync_roots`, it is written synchronously too: a commit survives the loss of power when `write` returns;
* without, it stays in the kernel's page cache: a commit survives the end of the process, however sudden, when `write`
  returns, and the loss of power after the next `write` (whose sync covers it) or after `sync`.

`sync=False` would let the kernel write the root before the pages it points to, and LMDB writes over pages that were
freed since: a loss of power could then damage what was synced long ago. It is not offered. `writemap` is not used
either: a file with holes and a full disk would end the process by SIGBUS instead of raising.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import lmdb

_T = TypeVar("_T")

_FORMAT = b"1"
_FIRST_MAP = 256 << 20
_RESERVE = 64 << 20
"""Room beyond the limit for what must work in a full store: ending and deleting captures."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Table(enum.Enum):
    """The tables."""

    FRAMES = b"frames"
    """FrameKey -> the bytes of a Chunk, as they came."""
    LIVE = b"live"
    """Number -> CaptureManifest of a capture that may still change, without its rows: those follow from the frames."""
    SETTLED = b"settled"
    """Number -> CaptureManifest of a settled capture, whole."""
    IDS = b"ids"
    """Capture id -> number."""
    SEALS = b"seals"
    """Number -> SealCaptureRequest."""
    LOSSES = b"losses"
    """Number and index -> RowLoss."""
    DOOMED = b"doomed"
    """Number of a deleted capture whose frames are not all freed yet -> nothing."""
    META = b"meta"
    """Name -> value: the format, the store's own id, the next capture number."""


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
            DamagedError: The folder is in use by another store, or holds something else.
        """
        path.mkdir(parents=True, exist_ok=True)
        self.max_bytes = max_bytes
        self._data = path / "data.mdb"
        self._lock = _lock(path / "store.lock")
        self._gate = _Gate()
        size = self._data.stat().st_size if self._data.exists() else 0
        try:
            self._env = lmdb.Environment(
                str(path),
                map_size=max(min(_FIRST_MAP, max_bytes), size),
                max_dbs=len(Table),
                max_readers=max_readers,
                sync=True,
                metasync=sync_roots,
                writemap=False,
                readahead=False,  # one layer of one capture is a few pages here and there
            )
            self._tables = {table: self._env.open_db(table.value) for table in Table}
        except lmdb.Error as error:
            raise DamagedError(f"cannot open the database in {path}: {error}") from error
        self._check_format(path)

    def read(self) -> _Reading:
        """Return a context manager that yields a short read transaction. Copy out what is wanted and end it."""
        return _Reading(self._env, self._tables, self._gate)

    def write(self, change: Callable[[Txn], _T], *, reserve: bool = False) -> _T:
        """Run a change in a transaction and commit it. The map grows as far as it may, and the change runs again.

        Args:
            change: What to do; it may run several times, and must have no effect but on its transaction.
            reserve: The change may use the room that is kept for ending and deleting captures.

        Returns:
            What the change returned.

        Raises:
            StoreFullError: There is no room. Nothing was written.
            DamagedError: LMDB cannot go on.
        """
        limit = self.max_bytes + (_RESERVE if reserve else 0)
        while True:
            try:
                with self._env.begin(write=True, buffers=True) as raw:
                    return change(Txn(raw, self._tables))
            except lmdb.MapFullError:
                self._grow(limit)
            except lmdb.Error as error:
                if error.code in _FULL:
                    raise StoreFullError(f"the disk is full: {error}") from error
                raise DamagedError(str(error)) from error
            finally:
                self._shrink(reserve)

    def sync(self) -> None:
        """Sync everything that is committed."""
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise DamagedError(f"cannot sync: {error}") from error

    def disk_bytes(self) -> int:
        """Return the bytes that the database takes on disk."""
        return self._data.stat().st_blocks * 512

    def close(self) -> None:
        """Close the database. Nobody may use it any more."""
        self._env.close()
        self._lock.close()

    def _grow(self, limit: int) -> None:
        size = self._env.info()["map_size"]
        if size >= limit:
            raise StoreFullError(f"the database has reached its limit of {self.max_bytes} bytes")
        ceiling = self.max_bytes if size < self.max_bytes else limit
        with self._gate.alone():  # LMDB moves the map: a reader's views would point nowhere
            self._env.set_mapsize(min(size * 2, ceiling))

    def _shrink(self, reserve: bool) -> None:  # noqa: FBT001 - one private caller
        if reserve and self._env.info()["map_size"] > self.max_bytes:
            with self._gate.alone():
                self._env.set_mapsize(self.max_bytes)

    def _check_format(self, path: Path) -> None:
        with self.read() as txn:
            value = txn.get(Table.META, b"format")
            found = bytes(value) if value is not None else None
        if found is None:
            self.write(lambda txn: txn.put(Table.META, b"format", _FORMAT))
        elif found != _FORMAT:
            raise DamagedError(f"{path} holds a database of format {found!r}; this version reads {_FORMAT!r}")


class _Gate:
    """Many readers, or one that moves the map. py-lmdb does not keep them apart."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._moving = False

    def enter(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._moving)
            self._readers += 1

    def leave(self) -> None:
        with self._condition:
            self._readers -= 1
            if self._moving and not self._readers:
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._condition:
            self._moving = True
            self._condition.wait_for(lambda: not self._readers)
            try:
                yield
            finally:
                self._moving = False
                self._condition.notify_all()


class _Reading:
    """The context manager of a read transaction."""

    def __init__(self, env: Any, tables: dict[Table, Any], gate: _Gate) -> None:
        self._env, self._tables, self._gate = env, tables, gate

    def __enter__(self) -> Txn:
        self._gate.enter()
        try:
            self._raw = self._env.begin(buffers=True)
        except lmdb.Error as error:
            self._gate.leave()
            raise DamagedError(str(error)) from error
        return Txn(self._raw, self._tables)

    def __exit__(self, *_: object) -> None:
        self._raw.abort()
        self._gate.leave()


def _lock(path: Path) -> IO[bytes]:
    handle = path.open("wb")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise DamagedError(f"{path.parent} is in use by another store") from None
    return handle
