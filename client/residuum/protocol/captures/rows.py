"""Collects rows that arrive in any order and in any chunks. No I/O: both clients use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import ServerFault
from residuum.v1 import capture_pb2, selection_pb2
from residuum.values.captures.blocks import AnyBlock, Block, EncodedBlock
from residuum.wire.rows.encodings import EncodingError, RowFormat
from residuum.wire.rows.frames import ChunkView
from residuum.wire.selection import captured_positions, wanted_positions

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""Makes an array of a shape and a dtype with undefined elements: in memory as `np.empty` does, or in a file."""

_FIRST_GUESS = 64
"""The generated positions to make room for while a capture's length is unknown."""

_MOST_FORESEEN = 4096
"""The most generated positions for which there is room at first. Growing later copies all rows."""


@dataclass(frozen=True)
class Wanted:
    """The wanted rows of each sequence and site. A position is wanted if it was captured and is selected."""

    layers: tuple[int, ...]
    """The layers, ascending."""
    spec: capture_pb2.CaptureSpec
    """The capture's spec, which says which positions have rows."""
    positions: selection_pb2.PositionSelection
    """The reader's selection of positions."""
    prompt_tokens: int
    """Tokens of the prompt. Both selections refer to it."""
    form: RowFormat
    """How rows are encoded."""
    max_generated: int = 0
    """The most tokens that the sequence may have after the prompt; 0 if unknown."""

    def mask(self, first: int, count: int, length: int | None) -> npt.NDArray[np.bool_]:
        """Return which of the positions first, first + 1, ... are wanted; bool [count].

        Args:
            first: The first position.
            count: The number of positions.
            length: The length of the sequence in positions; None while it is unknown.
        """
        mask = captured_positions(self.spec, self.prompt_tokens, first, count, length)
        return mask & wanted_positions(self.positions, self.prompt_tokens, first, count)


@dataclass(frozen=True)
class AddedRows:
    """The rows that one chunk added to a grid."""

    layers: npt.NDArray[np.intp]
    """The layers, as indices of the grid's layers."""
    positions: npt.NDArray[np.int64]
    """The positions; shape [positions]."""
    rows: npt.NDArray[Any]
    """The rows: decoded, [layers, positions, width], or as the grid keeps them. They may be views of the chunk."""
    fresh: npt.NDArray[np.bool_]
    """Which rows are new; shape [layers, positions]."""


class RowGrid:
    """The rows of one sequence at one site, with one column for each wanted position.

    Rows of plain encodings are kept as numbers, [layers, columns, width]. Others are kept encoded, [layers, columns] of
    the format's `row_dtype`, together with the prefixes of their chunks, if the format has any. The array is allocated
    once if the length is known in advance. Otherwise it grows by doubling.
    """

    def __init__(
        self, wanted: Wanted, length: int | None, *, keep_values: bool = True, allocate: Allocate = np.empty
    ) -> None:
        """Make an empty grid.

        Args:
            wanted: Which rows are wanted.
            length: The length of the sequence in positions, wanted or not; None if it is unknown.
            keep_values: Keep the rows. Otherwise the grid only records which rows arrived.
            allocate: Makes the array for the rows.
        """
        self._wanted = wanted
        self._allocate = allocate
        self._form = wanted.form
        self._plain = wanted.form.is_plain
        self._dtype = wanted.form.decoded_dtype if self._plain else wanted.form.row_dtype
        self._shape = (wanted.form.width,) if self._plain else ()
        self._length = length
        self._layer_index = {layer: index for index, layer in enumerate(wanted.layers)}
        self._last_layers: tuple[int, ...] = ()
        self._found: tuple[Any, npt.NDArray[np.intp]] = slice(0), np.empty(0, dtype=np.intp)
        self._column = np.empty(0, dtype=np.int64)  # the column of each position; -1 if it is not wanted
        self.have = np.zeros((len(wanted.layers), 0), dtype=np.bool_)
        self._values = allocate((len(wanted.layers), 0, *self._shape), self._dtype) if keep_values else None
        prefix = wanted.form.prefix_dtype
        # Those of all chunks and layers, with room for more; None if the format has none.
        self._prefixes = np.empty(0, prefix) if prefix is not None else None
        self._prefix_count = 0
        self._group = np.zeros((len(wanted.layers), 0), dtype=np.int32)  # the index of each row's prefix
        self._cover(wanted.prompt_tokens + _room(wanted.max_generated) if length is None else length)

    @property
    def values(self) -> npt.NDArray[Any]:
        """The rows, [layers, columns, ...]; undefined where `have` is false."""
        assert self._values is not None, "this grid keeps no values"  # noqa: S101
        return self._values

    def pick(self, columns: Any) -> npt.NDArray[Any]:
        """Return the rows of some columns, [layers, columns, ...]: a view for a slice, a copy for indices."""
        if isinstance(columns, slice):
            view: npt.NDArray[Any] = self.values[:, columns]
            return view
        picked = self._allocate((len(self.have), len(columns), *self._shape), self._dtype)
        for layer, rows in enumerate(self.values):  # layer by layer, because indexing makes a temporary copy
            picked[layer] = rows[columns]
        return picked

    def columns(self, length: int) -> tuple[npt.NDArray[np.int64], Any]:
        """Return the wanted positions of a sequence of this length, ascending, and their columns."""
        self._cover(length)
        positions = np.flatnonzero(self._wanted.mask(0, length, length))
        columns = self._column[positions]
        return positions, _span(columns) if len(columns) else slice(0)

    def block(self, positions: npt.NDArray[np.int64], columns: Any, present: npt.NDArray[np.bool_]) -> AnyBlock:
        """Return the rows of some columns as a block.

        Args:
            positions: The positions of the columns.
            columns: The columns, as indices or as a slice.
            present: Which rows are present; shape [layers, columns]. Missing rows of plain encodings become NaN.
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
        """Add the wanted rows of a chunk and return them; None if there are none.

        Raises:
            ServerFault: The chunk's format differs from the capture's, or its rows cannot be decoded.
        """
        header = chunk.header
        if chunk.format != self._form:
            raise ServerFault(f"A chunk has another row format than its capture: {chunk.format}, not {self._form}.")
        positions = np.array(header.positions, dtype=np.int64)
        self._cover(int(positions[-1]) + 1)
        from_layers, layers = self._layers_in(tuple(header.layers))
        columns = self._column[positions]
        from_columns: Any = slice(None)
        if columns.min() < 0:  # some are not wanted
            from_columns = np.flatnonzero(columns >= 0)
            columns, positions = columns[from_columns], positions[from_columns]
        if not len(layers) or not len(columns):
            return None
        prefixes, rows = self._rows_of(chunk)
        rows = rows[from_layers][:, from_columns]
        where = _where(layers, columns)
        added = AddedRows(layers, positions, rows, ~self.have[where])
        if prefixes is not None:
            self._group[where] = self._keep_prefixes(prefixes[from_layers])[:, None]
        self.have[where] = True
        if self._values is not None:
            self._values[where] = rows
        return added

    def _layers_in(self, layers: tuple[int, ...]) -> tuple[Any, npt.NDArray[np.intp]]:
        """Return the wanted ones of a chunk's layers, as an index of its layers and as indices of the grid's."""
        if layers != self._last_layers:
            wanted = [at for at, layer in enumerate(layers) if layer in self._layer_index]
            where = np.array([self._layer_index[layers[at]] for at in wanted], dtype=np.intp)
            self._last_layers, self._found = layers, (_span(np.array(wanted)) if wanted else slice(0), where)
        return self._found

    def _rows_of(self, chunk: ChunkView) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any]]:
        """Return a chunk's prefixes and rows in the form in which the grid keeps them.

        If the grid keeps no rows, or their encoding is plain, the rows are decoded and there are no prefixes.
        """
        try:
            if self._values is None or self._plain:
                return None, chunk.rows()
            prefixes, rows = chunk.split()
            self._form.check(rows)
        except EncodingError as error:
            raise ServerFault(f"A chunk cannot be decoded: {error}.") from None
        return prefixes, rows

    def _keep_prefixes(self, prefixes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Keep the prefixes of some layers, and return the index of each."""
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


def _room(max_generated: int) -> int:
    """Return for how many generated positions to make room at first. Memory that no row needs is never touched."""
    return min(max_generated, _MOST_FORESEEN) or _FIRST_GUESS


def whole_block(grid: RowGrid, length: int) -> AnyBlock | None:
    """Return all wanted rows of a sequence of this length; None if a row is missing."""
    positions, columns = grid.columns(length)
    present = grid.have[:, columns]
    return grid.block(positions, columns, present) if present.all() else None


def partial_block(grid: RowGrid, present: npt.NDArray[np.bool_]) -> AnyBlock:
    """Return the rows at all positions that have at least one row in `present`. Missing plain rows become NaN."""
    columns = np.flatnonzero(present.any(axis=0))
    positions = np.flatnonzero(grid._column >= 0)[columns]  # noqa: SLF001 - the same module
    return grid.block(positions, _span(columns) if len(columns) else slice(0), present[:, columns])


def _where(layers: npt.NDArray[np.intp], columns: npt.NDArray[np.int64]) -> Any:
    """Return the index for some layers and columns of a grid: two slices if possible, because they copy faster."""
    rows, width = _span(layers), _span(columns)
    return (rows, width) if isinstance(rows, slice) and isinstance(width, slice) else np.ix_(layers, columns)


def _span(indices: npt.NDArray[Any]) -> Any:
    """Return indices as a slice if they are consecutive, because indexing makes a temporary copy."""
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first + 1 == len(indices) else indices
