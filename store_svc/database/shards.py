"""Shards: the table of frames, spread over several files that threads write at the same time.

LMDB has one writer for each file. It lets go of the GIL while it copies, writes and syncs, so several files are written
on several cores. All other tables stay in the main file, which commits last. A transaction has these steps:

1. `Shards.commit` writes and commits the frames, one thread for each file. Many bytes take several commits; see
   `_COMMIT_BYTES`.
2. If the main file changes, `Shards.commit` then syncs the files of the frames.
3. The main file commits.

Before it deletes frames, step 1 syncs the main file. An earlier transaction may have deleted their capture there, and a
power failure must not undo that alone.

So the main file never refers to frames that are not there, even after a power failure. If the process ends between the
steps, frames are left that nobody acknowledged:

* Frames of an open capture become rows of it when the catalog is loaded, as if they had been acknowledged.
* Frames of a capture that was not committed are freed; see `catalog_loading`.

If a step fails but the process goes on, `take_back` deletes these frames and syncs that, before anything else is
written. Otherwise a chunk that is sent again, cut in another way, could be stored next to them.

The fullest shard decides how long a transaction takes. So a frame may lie in either of two shards, and is written to
the one that has less to write in this transaction (M. Mitzenmacher, "The Power of Two Choices in Randomized Load
Balancing", 2001).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

from residuum.wire.rows.frame_keys import unpack_frame
from store_svc.database.frames import PlacedFrame
from store_svc.database.keys import pack_number
from store_svc.database.lmdb_file import LmdbFile, StoreFullError, Table, next_key

_BLOCK = 32
"""Positions that a model's worker passes on together."""

_INDEX_BYTES = 16 << 10
"""Room for the pages of a file's index that a transaction changes."""

_LARGE = 1024
"""LMDB gives larger values pages of their own."""

_COMMIT_BYTES = 4 << 20
"""Bytes of values after which a shard commits. LMDB copies each value, the store reads the copy to check it, and the
commit reads it again to write it to the file. The copies of all shards should fit the processor's cache: otherwise both
read them from memory."""


_Put: TypeAlias = tuple[Table, bytes, bytes | memoryview]
"""A table, a key and its new value."""


class Placement:
    """Finds, from the key of a frame, the two shards in which it may lie.

    Frames that are written together should spread evenly without the second choice, because a read looks there last.
    A random hash would give the fullest of 8 shards twice its share of 16 frames. So the first choices differ by one in
    steps: consecutive captures, sequences, groups of layers and blocks of positions.

    The first choice of each run of captures is secret. So callers cannot choose captures that all begin in one shard.
    """

    def __init__(self, count: int, secret: bytes) -> None:
        """Create the placement.

        Args:
            count: The number of shards.
            secret: Bytes that never change for a database.
        """
        self._count = count
        self._secret = secret
        self._last = (-1, 0)  # the start of the run of captures that was asked for last: reads ask for one many times

    def of(self, key: bytes) -> tuple[int, int]:
        """Return the indexes of a frame's first and second choice of a shard."""
        first = self._first(key)
        return first, (first + 1 + zlib.crc32(key) % (self._count - 1)) % self._count

    def _first(self, key: bytes) -> int:
        frame = unpack_frame(key)
        group = frame.first_layer // (frame.last_layer - frame.first_layer + 1)
        block = frame.first_position // _BLOCK + frame.first_position % _BLOCK
        return (self._start(frame.number) + frame.sequence + frame.site + group + block) % self._count

    def _start(self, number: int) -> int:
        run, start = self._last
        if run != number // self._count:
            run = number // self._count
            digest = hashlib.blake2b(pack_number(run), key=self._secret, digest_size=4).digest()
            start = int.from_bytes(digest, "big")
            self._last = (run, start)
        return number + start


class FrameView:
    """The frames of all shards, as one transaction sees them. It begins to read a shard when it first needs it."""

    def __init__(self, files: Sequence[LmdbFile], placement: Placement) -> None:
        self._files = files
        self._placement = placement
        self._raws: list[Any] = [None] * len(files)
        self._at = b""
        self._heads: list[bytes | None] | None = None
        self._found: tuple[bytes, int] | None = None  # the frame that was found last, and its shard

    def get(self, table: Table, key: bytes) -> memoryview | None:
        """Return the value of a frame in FRAMES or HEADS, or None."""
        for shard in self._where(key):
            value = self._get(shard, table, key)
            if value is not None:
                self._found = key, shard
                return value
        return None

    def count(self) -> int:
        """Return the number of frames."""
        return sum(int(self._raw(shard).stat(self._table(shard))["entries"]) for shard in self._shards)

    def next_key(self, at: bytes) -> bytes | None:
        """Return the first key not less than `at`, or None. A scan in key order looks at few shards for each key."""
        if self._heads is None or at < self._at:
            self._heads = [self._seek(shard, at) for shard in self._shards]
        for shard, head in enumerate(self._heads):
            if head is not None and head < at:
                self._heads[shard] = self._seek(shard, at)
        self._at = at
        self._found = min(((head, shard) for shard, head in enumerate(self._heads) if head is not None), default=None)
        return None if self._found is None else self._found[0]

    def close(self) -> None:
        """End the transaction."""
        for raw in self._raws:
            if raw is not None:
                raw.abort()
        self._raws = [None] * len(self._files)

    @property
    def _shards(self) -> range:
        return range(len(self._files))

    def _where(self, key: bytes) -> tuple[int, ...]:
        """Return the shards in which a frame may lie."""
        if self._found is not None and self._found[0] == key:
            return (self._found[1],)
        return self._placement.of(key)

    def _get(self, shard: int, table: Table, key: bytes) -> memoryview | None:
        raw, file = self._raw(shard), self._files[shard]
        if table is Table.FRAMES:
            return file.large_values.get(raw, file.tables[table], key)
        value: memoryview | None = raw.get(key, db=file.tables[table])
        return value

    def _raw(self, shard: int) -> Any:
        if self._raws[shard] is None:
            self._raws[shard] = self._files[shard].begin()
        return self._raws[shard]

    def _table(self, shard: int) -> Any:
        return self._files[shard].tables[Table.FRAMES]

    def _seek(self, shard: int, at: bytes) -> bytes | None:
        return next_key(self._raw(shard), self._table(shard), at)


class FrameChanges(FrameView):
    """The changes of one transaction to the frames. They are kept until the commit; reads do not see them."""

    def __init__(self, files: Sequence[LmdbFile], placement: Placement) -> None:
        super().__init__(files, placement)
        self.puts: list[list[_Put]] = [[] for _ in files]
        """For each shard, what is written."""
        self.placed: list[dict[bytes, PlacedFrame]] = [{} for _ in files]
        """For each shard, those of the written frames that must be compared with their checksums, by key."""
        self.deletes: list[list[bytes]] = [[] for _ in files]
        """For each shard, the keys of frames that are deleted before that."""
        self.has_second_choices = False
        """Whether a frame is written to its second choice of a shard."""
        self._load = [0 for _ in files]

    def put(self, key: bytes, value: bytes | memoryview) -> None:
        """Write a frame. Its key is new."""
        self.puts[self._choose(key, len(value))].append((Table.FRAMES, key, value))

    def put_placed(self, key: bytes, frame: PlacedFrame) -> None:
        """Write a frame whose payload is in shared memory. Its key is new."""
        shard = self._choose(key, len(frame.payload))
        self.puts[shard] += [(Table.HEADS, key, frame.head), (Table.FRAMES, key, frame.payload)]
        self.placed[shard][key] = frame

    def put_meta(self, shard: int, name: bytes, value: bytes) -> None:
        """Write a value of META to one shard."""
        self.puts[shard].append((Table.META, name, value))

    def delete(self, key: bytes) -> None:
        """Delete a frame, if present."""
        for shard in self._where(key):
            if self._raw(shard).cursor(db=self._table(shard)).set_key(key):
                self.deletes[shard].append(key)

    def delete_some(self, prefix: bytes, limit: int) -> int:
        """Delete at most `limit` frames whose key starts with `prefix`; return how many."""
        deleted, key = 0, self.next_key(prefix)
        while key is not None and deleted < limit and key.startswith(prefix):
            self.delete(key)
            deleted += 1
            key = self.next_key(key + b"\0")
        return deleted

    def _choose(self, key: bytes, num_bytes: int) -> int:
        """Return the shard to write a frame to: the first choice, unless the second one has less to write."""
        first, second = self._placement.of(key)
        is_second = self._load[second] + num_bytes <= self._load[first]
        self.has_second_choices |= is_second
        shard = second if is_second else first
        self._load[shard] += num_bytes
        return shard

    def growth(self, shard: int) -> int:
        """Return about how many bytes of a file the changes take, and rather too many."""
        puts = self.puts[shard]
        if not puts and not self.deletes[shard]:
            return 0
        page = self._files[shard].page_bytes
        values = sum(
            -(-(len(value) + 16) // page) * page if len(value) > _LARGE else 2 * (len(value) + 64)
            for _, _, value in puts
        )
        return values + _INDEX_BYTES * (1 + values // _COMMIT_BYTES)


class Shards:
    """The files of the frames. Only one thread at a time may write."""

    def __init__(self, files: Sequence[LmdbFile], secret: bytes) -> None:
        """Start with opened files.

        Args:
            files: The files.
            secret: See `Placement`.
        """
        self.files = files
        self._placement = Placement(len(files), secret)
        self._threads = ThreadPoolExecutor(len(files), thread_name_prefix="shard")
        self._unsettled: dict[int, list[tuple[Table, bytes]]] = {}

    def view(self) -> FrameView:
        """Return the frames as they are now."""
        return FrameView(self.files, self._placement)

    def changes(self) -> FrameChanges:
        """Return an empty set of changes."""
        return FrameChanges(self.files, self._placement)

    def commit(self, changes: FrameChanges, main: LmdbFile, *, main_changes: bool, keeps_reserve: bool) -> None:
        """Commit changes to the frames. Afterwards every earlier commit is synced, as after a commit of a single file.

        Call `settle` once the main file has committed; if it fails, or this does, call `take_back`.

        Args:
            changes: The changes.
            main: The main file.
            main_changes: Whether it commits a change after this.
            keeps_reserve: Whether the reserve of each file must remain. Some file systems write zeros to what they
                allocate, so each file is allocated in its own thread.

        Raises:
            StoreFullError: There is no room.
            PayloadChangedError: A payload in shared memory does not match its checksum.
            DamagedError: LMDB failed in another way.
        """
        changes.close()
        if any(changes.deletes) and not main.is_synced:
            main.sync()
        changed = [shard for shard in range(len(self.files)) if changes.puts[shard] or changes.deletes[shard]]
        steps: list[Callable[[], None]] = [
            partial(self._commit, shard, changes, keeps_reserve=keeps_reserve) for shard in changed
        ]
        steps += [file.sync for at, file in enumerate(self.files) if not file.is_synced and at not in changed]
        if not main_changes and not main.is_synced:
            steps.append(main.sync)
        self._run(steps)
        if main_changes:
            self.sync()

    def settle(self) -> None:
        """Note that the main file has committed."""
        self._unsettled.clear()

    def take_back(self) -> None:
        """Delete what was committed for a transaction that then failed. Do nothing if there is none.

        Raises:
            StoreFullError: There is no room. Call this again before anything else is written.
            DamagedError: LMDB failed in another way.
        """
        self._run([partial(self._take_back, shard) for shard in list(self._unsettled)])

    def sync(self) -> None:
        """Sync all commits to disk.

        Raises:
            StoreFullError: A disk is full or failing.
            DamagedError: LMDB failed in another way.
        """
        self._run([file.sync for file in self.files if not file.is_synced])

    def close(self) -> None:
        """Close the files."""
        self._threads.shutdown()
        for file in self.files:
            file.close()

    def _commit(self, shard: int, changes: FrameChanges, *, keeps_reserve: bool) -> None:
        file, puts = self.files[shard], changes.puts[shard]
        if keeps_reserve:
            file.allocate(file.used_bytes + changes.growth(shard))
        placed, deletes = changes.placed[shard], changes.deletes[shard]
        for part in _parts(puts):
            with file.writing() as raw:
                for key in deletes:
                    raw.delete(key, db=file.tables[Table.FRAMES])
                    raw.delete(key, db=file.tables[Table.HEADS])
                for table, key, value in part:
                    raw.put(key, value, db=file.tables[table])
                    if table is Table.FRAMES and key in placed:
                        placed[key].check(raw.get(key, db=file.tables[table]))
            deletes = []
            if part:
                self._unsettled.setdefault(shard, []).extend((table, key) for table, key, _ in part)

    def _take_back(self, shard: int) -> None:
        file = self.files[shard]
        with file.writing() as raw:
            for table, key in self._unsettled[shard]:
                raw.delete(key, db=file.tables[table])
        file.commit_nothing()  # so the next write can use the pages, and a smaller part of the work may fit
        file.sync()
        del self._unsettled[shard]

    def _run(self, steps: Sequence[Callable[[], None]]) -> None:
        """Run steps at the same time, the first in this thread, and wait for all. Raise the worst of their errors."""
        if not steps:
            return
        others = [self._threads.submit(step) for step in steps[1:]]
        errors: list[BaseException] = []
        try:
            steps[0]()
        except BaseException as error:  # noqa: BLE001 - raised below, once no step runs any more
            errors.append(error)
        errors += [failure for other in others if (failure := other.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, StoreFullError)), errors[0])


def _parts(puts: Sequence[_Put]) -> list[list[_Put]]:
    """Split what a shard writes into one part for each commit, at least one. Both values of a frame are in one part."""
    parts: list[list[_Put]] = [[]]
    size = 0
    for put in puts:
        if size >= _COMMIT_BYTES and put[1] != parts[-1][-1][1]:
            parts.append([])
            size = 0
        parts[-1].append(put)
        size += len(put[2])
    return parts
