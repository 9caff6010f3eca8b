"""The database: a main file, and perhaps shards, which are further files for the frames.

With one shard, all tables are in the main file. With more, the frames are in as many files in subfolders, and the main
file has the other tables; see `shards`. The number of shards is fixed when the database is made.

A commit survives the death of the process once `write` returns. With `sync_roots`, it also survives a power failure.
Without, it survives a power failure after the next `write`, or after `sync`; see `lmdb_file`.

Opening a database syncs its contents first. An earlier process may have been killed between a commit and its sync, and
the store tells writers that repeat such rows that it has them. Opening also syncs the folders it creates: without that,
a power failure can lose the file's name.

A full store must still be able to end and delete captures, and that writes pages too. So chunks never get all the room:

* Of the greatest size, an eighth is reserved, at most 64 MiB.
* Of the disk, 4 MiB are reserved for the main file, and as much for the shards together, to free what was deleted.

Copies to an archive also use the reserve, because a full store may drop what is copied. They leave half of it; see
`check_reserve`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from store_svc.database.frames import PayloadChangedError, PlacedFrame, StoredFrame
from store_svc.database.large_values import LargeValues
from store_svc.database.lmdb_file import (
    TRIAL,
    DamagedError,
    LmdbFile,
    StoreFullError,
    Table,
    items,
    limit_text,
    next_key,
)
from store_svc.database.shards import FrameChanges, FrameView, Shards

__all__ = [
    "DamagedError",
    "Database",
    "PayloadChangedError",
    "StoreFullError",
    "Table",
    "Txn",
    "bytes_for_appends",
]

_T = TypeVar("_T")

_FORMAT = b"2"
_SHARDED = b"3"
"""The format of a database with several shards. Versions of the store that know no shards refuse it."""
_WITH_HEADS = b"4"
"""The format of a database that has had a frame in two parts, with or without shards. Older versions refuse it."""
_WITHOUT_ROWS = b"5"
"""The format of a database that has had captures whose rows are only in an archive. Otherwise it is as format 4."""
_SECOND_CHOICES = b"6"
"""The format of a database with a frame in its second choice of a shard. Otherwise it is as format 5."""
_FORMATS = (_FORMAT, _SHARDED, _WITH_HEADS, _WITHOUT_ROWS, _SECOND_CHOICES)
_SHARDS = struct.Struct(">16sH")
"""The value of META's key `shards`: the secret of the placement, and in the main file the number of shards. In a shard,
it is the shard's index, so that files of two databases are not mixed up."""

_LARGEST_RESERVE = 64 << 20
_DISK_RESERVE = 4 << 20
"""Bytes on the disk that chunks leave free; see the module's docstring."""
_LEAST_SHARD_RESERVE = 256 << 10
"""Bytes of it for a shard, at least."""

_OF_FRAMES = {Table.FRAMES, Table.HEADS}
"""The tables that shards have."""

_NOT_FOR_FOLDERS = {errno.EINVAL, errno.ENOTSUP}
"""Errors of file systems on which folders cannot be synced, or need no sync."""


def bytes_for_appends(max_bytes: int) -> int:
    """Return how many bytes of a map are for chunks. The rest is reserved for ending and deleting captures."""
    return max_bytes - min(max_bytes // 8, _LARGEST_RESERVE)


class _NewerFormatError(Exception):
    """A change needs a newer format, which must be on the disk before a shard commits."""

    def __init__(self, least: bytes) -> None:
        super().__init__(least)
        self.least = least


class Txn:
    """A transaction. The views that it returns are valid until it ends or writes.

    With several shards, a write transaction writes frames when it commits: its own reads do not see them.
    """

    def __init__(
        self, raw: Any, tables: dict[Table, Any], frames: FrameView | None, large_values: LargeValues | None = None
    ) -> None:
        self._raw = raw
        self._tables = tables
        self._frames = frames  # None: the frames are in a table like the others
        self._large_values = large_values  # None: this transaction writes
        self.wrote = False
        """Whether `put` was called. LMDB commits and syncs nothing if a transaction changed nothing."""
        self.changed_main = False
        """Whether a table of the main file was changed."""

    def get(self, table: Table, key: bytes) -> memoryview | None:
        """Return the value of a key, or None."""
        if self._frames is not None and table in _OF_FRAMES:
            return self._frames.get(table, key)
        if self._large_values is not None and table is Table.FRAMES:
            return self._large_values.get(self._raw, self._tables[table], key)
        value: memoryview | None = self._raw.get(key, db=self._tables[table])
        return value

    def put(self, table: Table, key: bytes, value: bytes | memoryview) -> None:
        """Write a value. The key of a frame is new."""
        self.wrote = True
        if changes := self._changes(table):
            changes.put(key, value)
        else:
            self.changed_main = True
            self._raw.put(key, value, db=self._tables[table])

    def put_frame(self, key: bytes, frame: bytes | memoryview | PlacedFrame) -> None:
        """Write a frame. Its key is new.

        Raises:
            PayloadChangedError: Its payload is in shared memory and does not match its checksum. With several shards,
                the commit raises this.
        """
        if not isinstance(frame, PlacedFrame):
            self.put(Table.FRAMES, key, frame)
            return
        self._note_format(_WITH_HEADS)
        if changes := self._changes(Table.FRAMES):
            self.wrote = True
            changes.put_placed(key, frame)
        else:
            self.put(Table.HEADS, key, frame.head)
            self.put(Table.FRAMES, key, frame.payload)
            frame.check(self._raw.get(key, db=self._tables[Table.FRAMES]))

    def note_rows_elsewhere(self) -> None:
        """Note that rows of a capture are only in an archive. Older versions of the store then refuse the database."""
        self._note_format(_WITHOUT_ROWS)

    def note_second_choices(self) -> None:
        """Note that frames are in their second choice of a shard. Older versions then refuse the database."""
        self._note_format(_SECOND_CHOICES)

    def frame(self, key: bytes) -> StoredFrame | None:
        """Return a frame, or None.

        Raises:
            FrameError: It is damaged.
        """
        value = self.get(Table.FRAMES, key)
        return None if value is None else StoredFrame.of(self.get(Table.HEADS, key), value)

    def frame_keys(self, prefix: bytes = b"") -> Iterator[bytes]:
        """Yield the keys of frames that start with `prefix`, in order."""
        key = self.next_key(Table.FRAMES, prefix)
        while key is not None and key.startswith(prefix):
            yield key
            key = self.next_key(Table.FRAMES, key + b"\0")

    def put_trial(self, shard: int, value: bytes) -> None:
        """Write a value that means nothing to a file that holds frames."""
        if changes := self._changes(Table.FRAMES):
            self.wrote = True
            changes.put_meta(shard, TRIAL, value)
        else:
            self.put(Table.META, TRIAL, value)

    def delete(self, table: Table, key: bytes) -> None:
        """Delete a key and its value, if present."""
        if changes := self._changes(table):
            changes.delete(key)
        else:
            self.changed_main = True
            self._delete(table, key)

    def count(self, table: Table) -> int:
        """Return the number of entries in a table."""
        if self._frames is not None and table is Table.FRAMES:
            return self._frames.count()
        return int(self._raw.stat(self._tables[table])["entries"])

    def items(self, table: Table, prefix: bytes = b"") -> Iterator[tuple[bytes, memoryview]]:
        """Yield the entries whose key starts with `prefix`, in key order. Not for frames; see `frame_keys`."""
        return items(self._raw, self._tables[table], prefix)

    def next_key(self, table: Table, at: bytes) -> bytes | None:
        """Return the first key not less than `at`, or None, without touching its value."""
        if self._frames is not None and table is Table.FRAMES:
            return self._frames.next_key(at)
        return next_key(self._raw, self._tables[table], at)

    def keys_before(self, table: Table, prefix: bytes, at: bytes, limit: int) -> list[bytes]:
        """Return at most `limit` keys below `at` that start with `prefix`, the largest first. Not for frames."""
        cursor = self._raw.cursor(db=self._tables[table])
        keys: list[bytes] = []
        found = cursor.prev() if cursor.set_range(at) else cursor.last()
        while found and len(keys) < limit and (key := bytes(cursor.key())).startswith(prefix):
            keys.append(key)
            found = cursor.prev()
        return keys

    def delete_some(self, table: Table, prefix: bytes, limit: int) -> int:
        """Delete at most `limit` entries whose key starts with `prefix`; return how many were deleted."""
        if changes := self._changes(table):
            return changes.delete_some(prefix, limit)
        deleted, key = 0, self.next_key(table, prefix)
        while key is not None and deleted < limit and key.startswith(prefix):
            self.changed_main = True
            self._delete(table, key)
            deleted += 1
            key = self.next_key(table, key + b"\0")
        return deleted

    def _note_format(self, least: bytes) -> None:
        if bytes(self.get(Table.META, b"format") or b"") >= least:
            return
        if self._frames is not None:
            raise _NewerFormatError(least)
        self.put(Table.META, b"format", least)

    def _delete(self, table: Table, key: bytes) -> None:
        self._raw.delete(key, db=self._tables[table])
        if table is Table.FRAMES:
            self._raw.delete(key, db=self._tables[Table.HEADS])

    def _changes(self, table: Table) -> FrameChanges | None:
        """Return where changes of a table are collected, or None if it is in the main file."""
        return self._frames if table is Table.FRAMES and isinstance(self._frames, FrameChanges) else None


class Database:
    """The files of a database in one folder, locked against other processes."""

    def __init__(
        self, path: Path, max_bytes: int, *, sync_roots: bool, max_readers: int = 512, shards: int = 1
    ) -> None:
        """Open the database, or create it.

        Args:
            path: The folder.
            max_bytes: The greatest size that the database may reach: the pages in use of all files together.
            sync_roots: Whether a commit is synced when `write` returns; see the module's docstring.
            max_readers: How many threads may read at once.
            shards: In how many files a new database has its frames. An existing one keeps its number.

        Raises:
            DamagedError: Another store uses the folder, it holds something else, or it cannot be synced.
            StoreFullError: There is no room for a new database.
        """
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        self.max_bytes = max_bytes
        """The greatest size that the database may reach."""
        self.ordinary_bytes = bytes_for_appends(max_bytes)
        """The part of `max_bytes` that is for chunks."""
        self._path = path
        self._sync_roots, self._max_readers = sync_roots, max_readers
        self._disk_reserve = min(max_bytes - self.ordinary_bytes, _DISK_RESERVE)
        self._lock = _lock(path / "store.lock")
        self._main = self._open(path, Table, self._disk_reserve)
        self._tables = dict(self._main.tables)
        self._shards = self._open_shards(shards)
        if self._shards is not None:
            del self._tables[Table.FRAMES], self._tables[Table.HEADS]
        self.sync()
        for folder in (path, *(folder.parent for folder in made)):
            _sync_folder(folder)
        with suppress(StoreFullError):  # stored captures can still be read and deleted
            for file in self._files:
                file.allocate(file.used_bytes)

    @property
    def num_shards(self) -> int:
        """The number of files that hold frames."""
        return len(self._frame_files)

    def read(self) -> _Reading:
        """Return a context manager of a read transaction. Keep it short: copy the data and leave the context."""
        return _Reading(self._main, self._tables, self._shards)

    def write(self, change: Callable[[Txn], _T], *, reserve: bool = False) -> _T:
        """Run a change in a transaction and commit it.

        Args:
            change: The change. If it raises, nothing is written. It runs again if it needs a newer format.
            reserve: Whether it may use the space of the map and of the disk that is reserved for ending and deleting
                captures. Both must work in a full store.

        Returns:
            What the change returned.

        Raises:
            StoreFullError: There is no room. Nothing was written.
            PayloadChangedError: A payload in shared memory does not match its checksum. Nothing was written.
            DamagedError: LMDB failed in another way.
        """
        shards = self._shards
        if shards is None:
            return self._write(change, None, reserve=reserve)
        shards.take_back()  # what a failed write could not take back for want of room
        while True:
            try:
                return self._write_shards(change, shards, reserve=reserve)
            except _NewerFormatError as error:
                self._commit_format(error.least)

    def try_room(self, num_bytes: int) -> None:
        """Find out whether this many bytes can be written to each file that holds frames: write and delete them.

        It tries one file after another. Together they would take that many bytes of `--max-bytes` for each file.

        Raises:
            StoreFullError: They cannot.
            DamagedError: LMDB failed in another way.
        """
        value = bytes(num_bytes)
        for shard, file in enumerate(self._frame_files):
            self.write(partial(Txn.put_trial, shard=shard, value=value))
            file.commit_nothing()

    def commit_nothing(self) -> None:
        """Commit a transaction to each file that holds frames: LMDB uses freed pages only two transactions later.

        If there is no room, do nothing.

        Raises:
            DamagedError: LMDB failed in another way.
        """
        for file in self._frame_files:
            file.commit_nothing()

    def check_reserve(self) -> None:
        """Make sure that half of what is reserved for ending and deleting captures is left in the main file.

        Only the thread that writes may call this.

        Raises:
            StoreFullError: It is not.
        """
        self._main.check_reserve()

    def sync(self) -> None:
        """Sync all commits to disk.

        Raises:
            DamagedError: A file cannot be synced.
        """
        try:
            if self._shards is not None:
                self._shards.sync()
            self._main.sync()
        except (StoreFullError, DamagedError) as error:
            raise DamagedError(f"Cannot sync the database: {error}.") from error

    def disk_bytes(self) -> int:
        """Return the bytes that the database takes on disk."""
        return sum(file.disk_bytes() for file in self._files)

    def free_disk_bytes(self) -> int:
        """Return the bytes on the database's disk that are free for unprivileged programs."""
        return self._main.free_disk_bytes()

    def num_chunks(self) -> int:
        """Return the number of chunks, including those of deleted captures that are not freed yet."""
        with self.read() as txn:
            return txn.count(Table.FRAMES)

    def used_bytes(self) -> int:
        """Return the bytes of the pages in use. LMDB reuses the pages of deleted captures."""
        return sum(file.used_bytes for file in self._files)

    def close(self) -> None:
        """Close the database. It must not be used afterwards."""
        if self._shards is not None:
            self._shards.close()
        self._main.close()
        self._lock.close()

    @property
    def _frame_files(self) -> Sequence[LmdbFile]:
        return self._shards.files if self._shards is not None else [self._main]

    @property
    def _files(self) -> list[LmdbFile]:
        return [self._main, *(self._shards.files if self._shards is not None else ())]

    def _write(self, change: Callable[[Txn], _T], frames: FrameChanges | None, *, reserve: bool) -> _T:
        with self._main.writing() as raw:
            txn = Txn(raw, self._tables, frames)
            result = change(txn)
            keeps_reserve = txn.wrote and not reserve
            if keeps_reserve:
                self._check_room(self._main.measure(raw), frames)
            if frames is not None and self._shards is not None:
                if frames.has_second_choices:
                    txn.note_second_choices()
                self._shards.commit(frames, self._main, main_changes=txn.changed_main, keeps_reserve=keeps_reserve)
            return result

    def _write_shards(self, change: Callable[[Txn], _T], shards: Shards, *, reserve: bool) -> _T:
        frames = shards.changes()
        try:
            result = self._write(change, frames, reserve=reserve)
        except BaseException:
            with suppress(StoreFullError):  # the next write tries again
                shards.take_back()
            raise
        finally:
            frames.close()
        shards.settle()
        return result

    def _commit_format(self, least: bytes) -> None:
        """Commit a newer format and sync it.

        The shards commit before the main file. If the process ended in between, an older store would open the database,
        and not find the frames.
        """
        with self._main.writing() as raw:
            raw.put(b"format", least, db=self._main.tables[Table.META])
        self._main.sync()

    def _check_room(self, main_bytes: int, frames: FrameChanges | None) -> None:
        """Make sure that the reserves of the map and of the main file remain after a transaction.

        Args:
            main_bytes: The bytes that the main file's pages in use then take.
            frames: The changes to the shards.

        Raises:
            StoreFullError: They would not.
        """
        shards = self._shards.files if frames is not None and self._shards is not None else ()
        shard_bytes = sum(file.used_bytes + frames.growth(at) for at, file in enumerate(shards)) if frames else 0
        if main_bytes + shard_bytes > self.ordinary_bytes:
            raise StoreFullError(limit_text(self.max_bytes))
        self._main.allocate(main_bytes)

    def _open(self, folder: Path, tables: Iterable[Table], disk_reserve: int) -> LmdbFile:
        return LmdbFile(
            folder,
            tables,
            self.max_bytes,
            map_reserve=self.max_bytes - self.ordinary_bytes,
            disk_reserve=disk_reserve,
            sync_roots=self._sync_roots,
            max_readers=self._max_readers,
        )

    def _open_shards(self, count: int) -> Shards | None:
        """Return the shards, or None if the frames are in the main file. A new database gets `count` shards."""
        with self._main.reading() as raw:
            meta = self._main.tables[Table.META]
            value, layout = raw.get(b"format", db=meta), raw.get(b"shards", db=meta)
            found = bytes(value) if value is not None else None
            secret, kept = _SHARDS.unpack(layout) if layout is not None else (b"", 1)
        if found is None:
            return self._make(count)
        if found not in _FORMATS:
            raise DamagedError(
                f"{self._path} holds a database of format {found!r}, but this version of the store reads the formats "
                f"{_FORMATS[0]!r} to {_FORMATS[-1]!r}. Use the version that wrote it, or another --path."
            )
        if kept == 1:
            return None
        for shard in range(kept):
            self._check_exists(shard, kept)
        files = [self._open_shard(shard, kept) for shard in range(kept)]
        for shard, file in enumerate(files):
            if _stamp(file) != _SHARDS.pack(secret, shard):
                raise DamagedError(
                    f"{file.folder} belongs to another database than {self._path}. Put the folder back that belongs "
                    "there."
                )
        return Shards(files, secret)

    def _make(self, count: int) -> Shards | None:
        """Make a new database. The main file names the shards only when they are on the disk."""
        secret = secrets.token_bytes(16)
        files = []
        for shard in range(count) if count > 1 else ():
            self._folder(shard).mkdir(exist_ok=True)
            file = self._open_shard(shard, count)
            with file.reading() as raw:
                holds_frames = raw.stat(file.tables[Table.FRAMES])["entries"]
            if holds_frames:
                raise DamagedError(
                    f"{file.folder} holds rows, but {self._path} has no database that they belong to. Restore its "
                    "data.mdb, or delete the folder."
                )
            with file.writing() as raw:
                raw.put(b"shard", _SHARDS.pack(secret, shard), db=file.tables[Table.META])
            file.sync()
            _sync_folder(file.folder)
            files.append(file)
        _sync_folder(self._path)
        with self._main.writing() as raw:
            meta = self._main.tables[Table.META]
            raw.put(b"format", _SHARDED if files else _FORMAT, db=meta)
            if files:
                raw.put(b"shards", _SHARDS.pack(secret, count), db=meta)
        return Shards(files, secret) if files else None

    def _open_shard(self, shard: int, count: int) -> LmdbFile:
        reserve = max(self._disk_reserve // count, _LEAST_SHARD_RESERVE)
        return self._open(self._folder(shard), (Table.FRAMES, Table.HEADS, Table.META), reserve)

    def _check_exists(self, shard: int, count: int) -> None:
        if not (self._folder(shard) / "data.mdb").exists():
            raise DamagedError(
                f"{self._folder(shard)} is missing: it holds one part in {count} of the rows. Put the folder back."
            )

    def _folder(self, shard: int) -> Path:
        return self._path / f"shard-{shard}"


class _Reading:
    """The context manager of a read transaction. It is a class for speed: the store enters one for each frame."""

    def __init__(self, main: LmdbFile, tables: dict[Table, Any], shards: Shards | None) -> None:
        self._main, self._tables, self._shards = main, tables, shards
        self._frames: FrameView | None = None

    def __enter__(self) -> Txn:
        self._raw = self._main.begin()
        if self._shards is not None:
            self._frames = self._shards.view()
        return Txn(self._raw, self._tables, self._frames, self._main.large_values)

    def __exit__(self, *_: object) -> None:
        if self._frames is not None:
            self._frames.close()
        self._raw.abort()
        del self._raw  # as long as the object lives, it has one of LMDB's places for readers


def _stamp(file: LmdbFile) -> bytes:
    """Return which shard of which database a file says it is."""
    with file.reading() as raw:
        return bytes(raw.get(b"shard", db=file.tables[Table.META]) or b"")


def _lock(path: Path) -> IO[bytes]:
    handle = path.open("wb")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise DamagedError(
            f"{path.parent} is in use by another store. Stop that store, or choose another folder: --path, "
            "or --data of residuum serve."
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
