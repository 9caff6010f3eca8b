"""A random order of rows that can be read at the speed of the disk.

Rows are read in blocks of consecutive rows. The blocks come in random order. Several of them, from everywhere in the
files, are in memory as one group, whose rows are shuffled. All of this follows from the seed and the epoch. So each
place of the order can be found without reading what comes before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Rows of one shard that are read at once."""

    shard: int
    """The shard."""
    rows: slice | Numbers
    """The rows, counted from the shard's first."""
    count: int
    """How many they are."""


@dataclass(frozen=True)
class Group:
    """Rows that are in memory together."""

    pieces: list[Piece]
    """How they are read."""
    taken: Numbers
    """The shuffled order, as indices of the rows as they are read."""
    numbers: Numbers
    """The rows in the shuffled order, as numbers of all shards."""


class Layout:
    """Which rows are read, and how they are cut into blocks and groups."""

    def __init__(
        self, shard_rows: Sequence[int], *, block_rows: int, group_rows: int, where: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Cut the rows of shards.

        Args:
            shard_rows: The number of rows of each shard.
            block_rows: The most rows of a block.
            group_rows: The approximate rows of a group.
            where: Which rows are read, [rows of all shards]; None means all.
        """
        self.first_rows = np.concatenate([[0], np.cumsum(shard_rows)]).astype(np.int64)
        """The first row of each shard, and the number of all rows."""
        self._chosen = None if where is None else np.flatnonzero(where)
        ends = self.first_rows if self._chosen is None else np.searchsorted(self._chosen, self.first_rows)
        starts, lengths, shards = [], [], []
        for shard, (first, last) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
            begins = np.arange(first, last, block_rows)
            starts.append(begins)
            lengths.append(np.minimum(begins + block_rows, last) - begins)
            shards.append(np.full(len(begins), shard))
        nothing = [np.empty(0, np.int64)]
        self.starts, self.lengths, self.shards = (
            np.concatenate(parts or nothing).astype(np.int64) for parts in (starts, lengths, shards)
        )
        """Of each block: its first row among those that are read, its number of rows, and its shard."""
        self.group_rows = group_rows
        """The approximate rows of a group."""
        self.total = int(ends[-1])
        """The number of rows that are read."""
        self.is_one_group = self.total <= group_rows
        """Whether all rows are one group."""

    def numbers(self, first: int, count: int) -> Numbers:
        """Return the rows of all shards that a part of those that are read stands for."""
        if self._chosen is None:
            return np.arange(first, first + count, dtype=np.int64)
        return self._chosen[first : first + count]

    def rows_in_shard(self, block: int) -> slice | Numbers:
        """Return a block's rows, counted from the first of its shard."""
        first, count, before = int(self.starts[block]), int(self.lengths[block]), self.first_rows[self.shards[block]]
        if self._chosen is None:
            return slice(int(first - before), int(first - before) + count)
        return self.numbers(first, count) - int(before)


class Order:
    """The order of one epoch."""

    def __init__(self, layout: Layout, *, seed: int, epoch: int, shuffle: bool = True) -> None:
        self._layout = layout
        self._seed, self._epoch = seed, epoch
        self._shuffle = shuffle
        count = len(layout.starts)
        self._blocks = np.arange(count)
        if shuffle and not layout.is_one_group:  # a single group is read once, so its blocks keep their order
            self._blocks = np.random.default_rng([seed, epoch, 0]).permutation(count)
        ends = np.cumsum(layout.lengths[self._blocks])
        groups = (ends - 1) // layout.group_rows  # blocks at ends of shards, or with few chosen rows, are small
        self._first_blocks = np.append(np.flatnonzero(np.diff(groups, prepend=-1)), count)
        self.group_starts = np.concatenate([[0], ends])[self._first_blocks].astype(np.int64)
        """The place of the first row of each group in the order, and the number of all rows."""

    def group_at(self, place: int) -> int:
        """Return the group that has a place of the order."""
        return int(np.searchsorted(self.group_starts, place, side="right")) - 1

    def group(self, number: int) -> Group:
        """Return a group."""
        layout = self._layout
        first, last = self._first_blocks[number : number + 2].tolist()
        blocks = self._blocks[first:last].tolist()
        every = np.concatenate(
            [layout.numbers(int(layout.starts[block]), int(layout.lengths[block])) for block in blocks]
        )
        taken = np.arange(len(every))
        if self._shuffle:
            taken = np.random.default_rng([self._seed, self._epoch, 1 + number]).permutation(len(every))
        pieces = [
            Piece(int(layout.shards[block]), layout.rows_in_shard(block), int(layout.lengths[block]))
            for block in blocks
        ]
        return Group(pieces, taken, every[taken])
