"""Sets of token positions, as sparse bitmaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

_BITS = 1024
"""Positions in a block. Most chunks touch one block; a long request has about a hundred."""


class Positions:
    """An immutable set of positions.

    Its memory is proportional to the number of blocks that hold a position, not to the largest position. So a writer
    cannot make the store allocate memory by naming a large position.
    """

    __slots__ = ("_blocks", "_hash")

    def __init__(self, blocks: dict[int, int] | None = None) -> None:
        """Create the set from a map of block number to bits, without empty blocks. Prefer the methods below."""
        self._blocks = blocks or {}
        self._hash: int | None = None

    @classmethod
    def of(cls, positions: Sequence[int]) -> Positions:
        """Return the set of these positions, which must be ascending."""
        if not positions:
            return cls()
        first, last = positions[0], positions[-1]
        if last - first + 1 == len(positions):
            return cls.of_runs([(first, last)])
        blocks: dict[int, int] = {}
        for position in positions:
            block, bit = divmod(position, _BITS)
            blocks[block] = blocks.get(block, 0) | 1 << bit
        return cls(blocks)

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[int, int]]) -> Positions:
        """Return the set of the positions in these runs (first, last), both inclusive."""
        blocks: dict[int, int] = {}
        for first, last in runs:
            for block in range(first // _BITS, last // _BITS + 1):
                low = max(first - block * _BITS, 0)
                high = min(last - block * _BITS, _BITS - 1)
                blocks[block] = blocks.get(block, 0) | ((1 << (high - low + 1)) - 1) << low
        return cls(blocks)

    @classmethod
    def where(cls, wanted: npt.NDArray[np.bool_]) -> Positions:
        """Return the set of the positions p with wanted[p]; `wanted` is bool [count]."""
        starts = range(0, len(wanted), _BITS)
        blocks = {at // _BITS: _bits(wanted[at : at + _BITS]) for at in starts}
        return cls({block: bits for block, bits in blocks.items() if bits})

    def filter(self, wanted: Callable[[int, int], npt.NDArray[np.bool_]]) -> Positions:
        """Return the positions that a predicate selects.

        Args:
            wanted: Called as wanted(first, count); returns bool [count] for the positions first, first + 1, ...
        """
        blocks = {block: bits & _bits(wanted(block * _BITS, _BITS)) for block, bits in self._blocks.items()}
        return Positions({block: bits for block, bits in blocks.items() if bits})

    def __or__(self, other: Positions) -> Positions:
        blocks = dict(self._blocks)
        for block, bits in other._blocks.items():
            blocks[block] = blocks.get(block, 0) | bits
        return Positions(blocks)

    def __and__(self, other: Positions) -> Positions:
        few, many = sorted((self._blocks, other._blocks), key=len)
        return Positions({block: both for block, bits in few.items() if (both := bits & many.get(block, 0))})

    def __sub__(self, other: Positions) -> Positions:
        theirs = other._blocks
        if not any(bits & theirs.get(block, 0) for block, bits in self._blocks.items()):
            return self
        left = {block: bits & ~theirs.get(block, 0) for block, bits in self._blocks.items()}
        return Positions({block: bits for block, bits in left.items() if bits})

    def __len__(self) -> int:
        return sum(bits.bit_count() for bits in self._blocks.values())

    @property
    def num_blocks(self) -> int:
        """Number of blocks that hold a position; the set's memory is proportional to it."""
        return len(self._blocks)

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Positions) and self._blocks == other._blocks

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._blocks.items()))
        return self._hash

    def __contains__(self, position: int) -> bool:
        block, bit = divmod(position, _BITS)
        return bool(self._blocks.get(block, 0) >> bit & 1)

    def __repr__(self) -> str:
        return f"Positions({self.runs()})"

    def runs(self) -> list[tuple[int, int]]:
        """Return the positions as ascending runs (first, last), both inclusive, that neither overlap nor touch."""
        runs: list[tuple[int, int]] = []
        for first, last in self._runs_by_block():
            if runs and runs[-1][1] + 1 == first:
                runs[-1] = (runs[-1][0], last)
            else:
                runs.append((first, last))
        return runs

    def _runs_by_block(self) -> Iterator[tuple[int, int]]:
        for block in sorted(self._blocks):
            bits, at = self._blocks[block], block * _BITS
            while bits:
                zeros = (bits & -bits).bit_length() - 1
                bits >>= zeros
                ones = (~bits & bits + 1).bit_length() - 1
                bits >>= ones
                yield at + zeros, at + zeros + ones - 1
                at += zeros + ones


def _bits(mask: npt.NDArray[np.bool_]) -> int:
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")
