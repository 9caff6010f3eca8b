"""Putting rows where they belong, in whatever order and however split they come. No I/O: both clients use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import ServerFault
from residuum.v1 import selection_pb2, tensor_pb2
from residuum.wire.dtypes import numpy_dtype
from residuum.wire.frames import ChunkView
from residuum.wire.selection import wanted_positions

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""Makes an array of a shape and a dtype, its elements undefined: in memory, as `np.empty` does, or elsewhere."""

_FIRST_GUESS = 64
"""Generated positions for which room is made while a capture's length is not known."""


@dataclass(frozen=True)
class Wanted:
    """Which rows are wanted of each sequence and site, and what a row is."""

    layers: tuple[int, ...]
    """The layers, ascending."""
    positions: tuple[selection_pb2.PositionSelection, ...]
    """The positions: those that every one of these selections wants."""
    prompt_tokens: int
    """Tokens of the prompt, to which the selections refer."""
    width: int
    """Elements in a row."""
    dtype: tensor_pb2.DataType.ValueType
    """The element type."""

    def mask(self, first: int, count: int) -> npt.NDArray[np.bool_]:
        """Tell which of the positions first, first + 1, ... are wanted; shape [count]."""
        mask = np.ones(count, dtype=np.bool_)
        for selection in self.positions:
            mask &= wanted_positions(selection, self.prompt_tokens, first, count)
        return mask


@dataclass(frozen=True)
class AddedRows:
    """What one chunk brought to a grid."""

    layers: npt.NDArray[np.intp]
    """Which of the grid's layers, as indices."""
    positions: npt.NDArray[np.int64]
    """The positions; shape [positions]."""
    rows: npt.NDArray[Any]
    """The rows, [layers, positions, width]; they lie in the chunk's own memory."""
    fresh: npt.NDArray[np.bool_]
    """Which of them were not there before; shape [layers, positions]."""


class RowGrid:
    """The rows of one sequence at one site: an array [layers, columns, width], a column for each wanted position.

    The array is made once if the length is known in advance, and otherwise doubles when it must grow.
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
        self._dtype = numpy_dtype(wanted.dtype)
        self._layer_index = {layer: index for index, layer in enumerate(wanted.layers)}
        self._column = np.empty(0, dtype=np.int64)  # by position; -1: not wanted
        self.have = np.zeros((len(wanted.layers), 0), dtype=np.bool_)
        self._values = allocate((len(wanted.layers), 0, wanted.width), self._dtype) if keep_values else None
        self._cover(wanted.prompt_tokens + _FIRST_GUESS if length is None else length)

    @property
    def values(self) -> npt.NDArray[Any]:
        """The rows, [layers, columns, width]; those that `have` denies are undefined."""
        assert self._values is not None, "this grid keeps no values"  # noqa: S101
        return self._values

    def pick(self, columns: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """Return the rows of some columns, [layers, columns, width]: a view if they are consecutive, else a copy."""
        span = _span(columns) if len(columns) else slice(0)
        if isinstance(span, slice):
            view: npt.NDArray[Any] = self.values[:, span]
            return view
        picked = self._allocate((len(self.have), len(columns), self._wanted.width), self._dtype)
        for layer, rows in enumerate(self.values):  # one by one: picking copies once more
            picked[layer] = rows[span]
        return picked

    def columns(self, length: int) -> npt.NDArray[np.int64]:
        """Return the wanted positions below `length`, in order: the position of each column."""
        self._cover(length)
        return np.flatnonzero(self._column[:length] >= 0)

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
            ServerFault: The chunk's rows are not of the capture's width and type.
        """
        header = chunk.header
        if (header.width, header.dtype) != (self._wanted.width, self._wanted.dtype):
            raise ServerFault(
                f"A chunk does not hold rows of the capture's width and type ({header.width}, {header.dtype})."
            )
        positions = np.array(header.positions, dtype=np.int64)
        self._cover(int(positions[-1]) + 1)
        from_layers = [i for i, layer in enumerate(header.layers) if layer in self._layer_index]
        layers = np.array([self._layer_index[header.layers[i]] for i in from_layers], dtype=np.intp)
        columns = self._column[positions]
        from_columns = np.flatnonzero(columns >= 0)
        if not len(layers) or not len(from_columns):
            return None
        columns = columns[from_columns]
        rows = chunk.rows()[_span(np.array(from_layers))][:, _span(from_columns)]
        return self._place(
            AddedRows(layers, positions[from_columns], rows, ~self.have[np.ix_(layers, columns)]), columns
        )

    def _place(self, added: AddedRows, columns: npt.NDArray[np.int64]) -> AddedRows:
        layers, width = _span(added.layers), _span(columns)
        if isinstance(layers, slice) and isinstance(width, slice):  # the usual chunk: one plain copy
            where: Any = (layers, width)
        else:
            where = np.ix_(added.layers, columns)
        self.have[where] = True
        if self._values is not None:
            self._values[where] = added.rows
        return added

    def _cover(self, length: int) -> None:
        """Make room for the positions below `length`."""
        known = len(self._column)
        if length <= known:
            return
        length = max(length, 2 * known)
        mask = self._wanted.mask(known, length - known)
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
            values = self._allocate((layers, columns, self._wanted.width), self._dtype)
            values[:, :before] = self._values
            self._values = values


@dataclass(frozen=True)
class Block:
    """The rows of one sequence at one site, as they are handed out."""

    positions: npt.NDArray[np.int64]
    """The positions; shape [positions]."""
    values: npt.NDArray[Any]
    """The rows in the captured dtype, [layers, positions, width]; NaN where `present` is false."""
    present: npt.NDArray[np.bool_]
    """Which rows there are; shape [layers, positions]. All true unless the capture is partial."""


def whole_block(grid: RowGrid, length: int) -> Block | None:
    """Return all wanted rows below `length`, or None if one of them has not come."""
    positions = grid.columns(length)
    present = grid.have[:, : len(positions)]
    return Block(positions, grid.values[:, : len(positions)], present) if present.all() else None


def partial_block(grid: RowGrid, present: npt.NDArray[np.bool_]) -> Block:
    """Return the rows that `present` names, at every position that has at least one; the others become NaN."""
    columns = np.flatnonzero(present.any(axis=0))
    positions = grid.columns(len(grid._column))[columns]  # noqa: SLF001 - both live in this module
    values = grid.pick(columns)
    values[~present[:, columns]] = np.nan
    return Block(positions, values, present[:, columns])


def _span(indices: npt.NDArray[Any]) -> Any:
    """Return indices as a slice if they are consecutive: slicing copies at once, picking copies twice."""
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first + 1 == len(indices) else indices
