"""Putting rows where they belong, in whatever order and however split they come. No I/O: both clients use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import ServerFault
from residuum.v1 import capture_pb2, selection_pb2
from residuum.values.blocks import AnyBlock, Block, EncodedBlock
from residuum.wire.encodings import EncodingError, RowFormat
from residuum.wire.frames import ChunkView
from residuum.wire.selection import captured_positions, wanted_positions

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""Makes an array of a shape and a dtype, its elements undefined: in memory, as `np.empty` does, or elsewhere."""

_FIRST_GUESS = 64
"""Generated positions for which room is made while a capture's length is not known."""


@dataclass(frozen=True)
class Wanted:
    """Which rows are wanted of each sequence and site, and what a row is."""

    layers: tuple[int, ...]
    """The layers, ascending."""
    spec: capture_pb2.CaptureSpec
    """What was captured: the positions are those of which it has rows,"""
    positions: selection_pb2.PositionSelection
    """and that this selection wants."""
    prompt_tokens: int
    """Tokens of the prompt, to which the selections refer."""
    form: RowFormat
    """How rows are encoded."""

    def mask(self, first: int, count: int, length: int | None) -> npt.NDArray[np.bool_]:
        """Tell which of the positions first, first + 1, ... are wanted; shape [count].

        Args:
            first: The first position.
            count: How many.
            length: The positions that there are; None while that is not known.
        """
        mask = captured_positions(self.spec, self.prompt_tokens, first, count, length)
        return mask & wanted_positions(self.positions, self.prompt_tokens, first, count)


@dataclass(frozen=True)
class AddedRows:
    """What one chunk brought to a grid."""

    layers: npt.NDArray[np.intp]
    """Which of the grid's layers, as indices."""
    positions: npt.NDArray[np.int64]
    """The positions; shape [positions]."""
    rows: npt.NDArray[Any]
    """The rows: decoded, [layers, positions, width], or as the grid keeps them; they may lie in the chunk's memory."""
    fresh: npt.NDArray[np.bool_]
    """Which of them were not there before; shape [layers, positions]."""


class RowGrid:
    """The rows of one sequence at one site, a column for each wanted position.

    Plain rows are numbers, [layers, columns, width]; others are kept encoded, [layers, columns] of their format's
    structure, and with them the prefix of each chunk that they came in, if there are any. The array is made once if the
    length is known in advance, and otherwise doubles when it must grow.
    """

    def __init__(
        self, wanted: Wanted, length: int | None, *, keep_values: bool = True, allocate: Allocate = np.empty
    ) -> None:
        """Make an empty grid.

        Args:
            wanted: Which rows are wanted.
            length: The positions that there will be, wanted or not; None if that is not known yet.
            keep_values: Keep the rows themselves, not only which of them came.
            allocate: Makes the array that they are kept in.
        """
        self._wanted = wanted
        self._allocate = allocate
        self._form = wanted.form
        self._plain = wanted.form.is_plain
        self._dtype = wanted.form.decoded_dtype if self._plain else wanted.form.row_dtype
        self._shape = (wanted.form.width,) if self._plain else ()
        self._length = length
        self._layer_index = {layer: index for index, layer in enumerate(wanted.layers)}
        self._column = np.empty(0, dtype=np.int64)  # by position; -1: not wanted
        self.have = np.zeros((len(wanted.layers), 0), dtype=np.bool_)
        self._values = allocate((len(wanted.layers), 0, *self._shape), self._dtype) if keep_values else None
        self._prefixes: npt.NDArray[Any] | None = None  # of all chunks and layers, and room for more
        self._prefix_count = 0
        self._group = np.zeros((len(wanted.layers), 0), dtype=np.int32)  # which of all of them goes with a row
        self._cover(wanted.prompt_tokens + _FIRST_GUESS if length is None else length)

    @property
    def values(self) -> npt.NDArray[Any]:
        """The rows, [layers, columns, ...]; those that `have` denies are undefined."""
        assert self._values is not None, "this grid keeps no values"  # noqa: S101
        return self._values

    def pick(self, columns: Any) -> npt.NDArray[Any]:
        """Return the rows of some columns, [layers, columns, ...]: a view of a slice, a copy of indices."""
        if isinstance(columns, slice):
            view: npt.NDArray[Any] = self.values[:, columns]
            return view
        picked = self._allocate((len(self.have), len(columns), *self._shape), self._dtype)
        for layer, rows in enumerate(self.values):  # one by one: picking copies once more
            picked[layer] = rows[columns]
        return picked

    def columns(self, length: int) -> tuple[npt.NDArray[np.int64], Any]:
        """Return the wanted positions of a sequence of this length, in order, and the column of each."""
        self._cover(length)
        positions = np.flatnonzero(self._wanted.mask(0, length, length))
        columns = self._column[positions]
        return positions, _span(columns) if len(columns) else slice(0)

    def block(self, positions: npt.NDArray[np.int64], columns: Any, present: npt.NDArray[np.bool_]) -> AnyBlock:
        """Return the rows of some columns as they are handed out.

        Args:
            positions: The positions of the columns.
            columns: The columns, as indices or as a slice.
            present: Which rows there are; shape [layers, columns]. Of plain rows the others become NaN here.
        """
        values = self.pick(columns)
        if not self._plain:
            prefixes = None if self._prefixes is None else self._prefixes[: self._prefix_count]
            group = None if prefixes is None else self._group[:, columns]
            return EncodedBlock(positions, values, present, self._form, prefixes, group)
        if not present.all():
            values[~present] = np.nan
        return Block(positions, values, present)

    def mark(self, sets: Sequence[tuple[Iterable[int], Sequence[tuple[int, int]]]]) -> npt.NDArray[np.bool_]:
        """Return a mask like `have`, true for each (layers, runs of positions) in `sets`; runs include both ends."""
        self._cover(max((last + 1 for _, runs in sets for _, last in runs), default=0))
        mask = np.zeros_like(self.have)
        for layers, runs in sets:
            indices = np.array([self._layer_index[n] for n in layers if n in self._layer_index], dtype=np.intp)
            for first, last in runs:
                columns = self._column[first : last + 1]
                mask[np.ix_(indices, columns[columns >= 0])] = True
        return mask

    def add(self, chunk: ChunkView) -> AddedRows | None:
        """Take the wanted rows of a chunk; None if it holds none.

        Raises:
            ServerFault: The chunk's rows are not encoded as the capture's, or of another width or type.
        """
        header = chunk.header
        if chunk.format != self._form:
            raise ServerFault(f"A chunk does not hold rows as the capture has them: {chunk.format}, not {self._form}.")
        positions = np.array(header.positions, dtype=np.int64)
        self._cover(int(positions[-1]) + 1)
        from_layers = [i for i, layer in enumerate(header.layers) if layer in self._layer_index]
        layers = np.array([self._layer_index[header.layers[i]] for i in from_layers], dtype=np.intp)
        columns = self._column[positions]
        from_columns = np.flatnonzero(columns >= 0)
        if not len(layers) or not len(from_columns):
            return None
        columns = columns[from_columns]
        prefixes, rows = self._rows_of(chunk)
        rows = rows[_span(np.array(from_layers))][:, _span(from_columns)]
        where = _where(layers, columns)
        added = AddedRows(layers, positions[from_columns], rows, ~self.have[where])
        if prefixes is not None:
            self._group[where] = self._keep_prefixes(prefixes[from_layers])[:, None]
        self.have[where] = True
        if self._values is not None:
            self._values[where] = rows
        return added

    def _rows_of(self, chunk: ChunkView) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any]]:
        """Return a chunk's rows as they are kept, and the prefixes that go with them; decoded if none are kept."""
        try:
            if self._values is None or self._plain:
                return None, chunk.rows()
            prefixes, rows = chunk.split()
            self._form.check(rows)
        except EncodingError as error:
            raise ServerFault(f"A chunk cannot be decoded: {error}.") from None
        return prefixes, rows

    def _keep_prefixes(self, prefixes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Keep the prefixes of some layers; return the number of each among all."""
        before, count = self._prefix_count, self._prefix_count + len(prefixes)
        if self._prefixes is None or count > len(self._prefixes):
            grown = self._allocate((2 * count,), prefixes.dtype)
            if self._prefixes is not None:
                grown[:before] = self._prefixes[:before]
            self._prefixes = grown
        self._prefixes[before:count] = prefixes
        self._prefix_count = count
        return np.arange(before, count)

    def _cover(self, length: int) -> None:
        """Make room for the positions below `length`."""
        known = len(self._column)
        if length <= known:
            return
        length = max(length, 2 * known)
        mask = self._wanted.mask(known, length - known, self._length)
        before = int(np.count_nonzero(self._column >= 0))
        numbers = np.where(mask, before + np.cumsum(mask) - 1, -1)
        self._column = np.concatenate([self._column, numbers])
        self._widen(before + int(np.count_nonzero(mask)))

    def _widen(self, columns: int) -> None:
        layers, before = self.have.shape
        have = np.zeros((layers, columns), dtype=np.bool_)
        have[:, :before] = self.have
        self.have = have
        if self._values is not None:
            values = self._allocate((layers, columns, *self._shape), self._dtype)
            values[:, :before] = self._values
            self._values = values
            group = np.zeros((layers, columns), dtype=np.int32)
            group[:, :before] = self._group
            self._group = group


def whole_block(grid: RowGrid, length: int) -> AnyBlock | None:
    """Return all wanted rows of a sequence of this length, or None if one of them has not come."""
    positions, columns = grid.columns(length)
    present = grid.have[:, columns]
    return grid.block(positions, columns, present) if present.all() else None


def partial_block(grid: RowGrid, present: npt.NDArray[np.bool_]) -> AnyBlock:
    """Return the rows that `present` names, at every position that has at least one; the others become NaN."""
    columns = np.flatnonzero(present.any(axis=0))
    positions = np.flatnonzero(grid._column >= 0)[columns]  # noqa: SLF001 - both live in this module
    return grid.block(positions, _span(columns) if len(columns) else slice(0), present[:, columns])


def _where(layers: npt.NDArray[np.intp], columns: npt.NDArray[np.int64]) -> Any:
    """Return the index of some layers and columns of a grid: of the usual chunk two slices, for one plain copy."""
    rows, width = _span(layers), _span(columns)
    return (rows, width) if isinstance(rows, slice) and isinstance(width, slice) else np.ix_(layers, columns)


def _span(indices: npt.NDArray[Any]) -> Any:
    """Return indices as a slice if they are consecutive: slicing copies at once, picking copies twice."""
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first + 1 == len(indices) else indices
