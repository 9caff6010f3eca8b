"""The rows of one sequence at one site in memory: plain, or still encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from residuum.wire.rows.encodings import RowFormat

Places = Union[slice, "npt.NDArray[np.intp]"]
"""Some of a block's positions, by their indices."""


@dataclass(frozen=True)
class Block:
    """Rows in memory as plain numbers."""

    positions: npt.NDArray[np.int64]
    """The positions; shape [positions]."""
    values: npt.NDArray[Any]
    """The rows in the captured dtype, [layers, positions, width]; NaN where `present` is false."""
    present: npt.NDArray[np.bool_]
    """Which rows are present; shape [layers, positions]. All true unless the capture is partial."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type of `layer`."""
        return self.values.dtype

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return int(self.values.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.values.nbytes

    def part(self, places: Places) -> Block:
        """Return the same rows at some of the positions only, given by their places; a slice copies nothing."""
        return Block(self.positions[places], self.values[:, places], self.present[:, places])

    def layer(self, index: int) -> npt.NDArray[Any]:
        """Return the rows of a layer, [positions, width], as a view."""
        rows: npt.NDArray[Any] = self.values[index]
        return rows

    def stack(self, indices: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the rows of some layers, float32 [layers, positions, width]; a copy."""
        return self.values[list(indices)].astype(np.float32)


@dataclass(frozen=True)
class EncodedBlock:
    """Rows in memory as received, decoded on each access. This takes far less memory than decoded rows."""

    positions: npt.NDArray[np.int64]
    """The positions; shape [positions]."""
    rows: npt.NDArray[Any]
    """The encoded rows, [layers, positions] of `form.row_dtype`; undefined where `present` is false."""
    present: npt.NDArray[np.bool_]
    """Which rows are present; shape [layers, positions]. All true unless the capture is partial."""
    form: RowFormat
    """The rows' format."""
    prefixes: npt.NDArray[Any] | None = None
    """The prefixes that rows encoded together share, [groups] of `form.prefix_dtype`."""
    group: npt.NDArray[np.int32] | None = None
    """The index of each row's prefix; shape [layers, positions]."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type of `layer`."""
        return self.form.decoded_dtype

    @property
    def width(self) -> int:
        """Numbers in a decoded row."""
        return self.form.decoded_width

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.rows.nbytes + (self.prefixes.nbytes if self.prefixes is not None else 0)

    def part(self, places: Places) -> EncodedBlock:
        """Return the same rows at some of the positions only, given by their places; a slice copies nothing."""
        group = self.group[:, places] if self.group is not None else None
        return EncodedBlock(
            self.positions[places], self.rows[:, places], self.present[:, places], self.form, self.prefixes, group
        )

    @property
    def values(self) -> npt.NDArray[Any]:
        """All rows decoded, [layers, positions, width]; NaN where `present` is false."""
        values = np.empty((*self.rows.shape, self.width), self.dtype)
        for index in range(len(values)):
            values[index] = self.layer(index)
        return values

    def layer(self, index: int) -> npt.NDArray[Any]:
        """Return the decoded rows of a layer, [positions, width]; NaN for missing rows."""
        present = self.present[index]
        if present.all():
            return self._decoded(index, slice(None))
        values = np.full((len(present), self.width), np.nan, self.dtype)
        values[present] = self._decoded(index, present)  # decode only these: bytes of missing rows may be invalid
        return values

    def _decoded(self, index: int, columns: Any) -> npt.NDArray[Any]:
        prefixes = None
        if self.prefixes is not None and self.group is not None:
            prefixes = self.prefixes[self.group[index, columns]]
        return self.form.decode(self.rows[index, columns], prefixes)

    def stack(self, indices: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the decoded rows of some layers, float32 [layers, positions, width]."""
        stacked = np.empty((len(indices), len(self.positions), self.width), np.float32)
        for at, index in enumerate(indices):
            stacked[at] = self.layer(index)
        return stacked

    def fields(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """Return the encoded rows of a layer by the names of capture.proto; see `Activations.encoded`."""
        rows = self.rows[index]
        fields: dict[str, npt.NDArray[Any]] = {name: rows[name] for name in rows.dtype.names or ()}
        if self.prefixes is not None and self.group is not None:
            used, group = np.unique(self.group[index], return_inverse=True)
            fields |= {name: self.prefixes[name][used] for name in self.prefixes.dtype.names or ()}
            fields["group"] = group.reshape(-1)
        return fields


AnyBlock = Union[Block, EncodedBlock]  # noqa: UP007 - evaluated at run time on Python 3.10
"""The rows of one sequence at one site."""
