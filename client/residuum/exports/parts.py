"""Going through activations a slice of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from residuum.values.blocks import AnyBlock, Block

if TYPE_CHECKING:
    from residuum.values.activations import Activations

SLICE_BYTES = 4 << 20
"""Rows of about this size are in memory at once."""


@dataclass(frozen=True)
class Selection:
    """The rows of one sequence at one site."""

    name: str
    """`SITE`, or `sequence1/SITE` and so on after the first sequence."""
    acts: Activations
    """The activations, with this sequence and site selected."""
    block: AnyBlock
    """Their rows."""

    @property
    def kept_bytes(self) -> float:
        """Bytes that a row takes where it is kept."""
        return self.block.nbytes / max(self.block.present.size, 1)

    def rows(self, index: int, part: slice) -> npt.NDArray[Any]:
        """Return the decoded rows of a layer at some positions; NaN where there is none."""
        return self.block.part(part).layer(index)

    def small_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return what belongs to the rows besides them, and is small."""
        arrays: dict[str, npt.NDArray[Any]] = {"positions": self.acts.positions, "token_ids": self.acts.token_ids}
        if not self.acts.present.all():
            arrays["present"] = self.acts.present
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


@dataclass(frozen=True)
class Stored:
    """An array of a layer's rows as they were captured: the rows themselves, or a part of their encoding."""

    name: str
    """`SITE.LAYER`, or `SITE.LAYER.FIELD`."""
    values: npt.NDArray[Any]
    """The array; its first axis is the positions, but for what rows share that were encoded together."""
    present: npt.NDArray[np.bool_] | None
    """Which of the rows there are; None if all are, or if it has no row for each position."""
    kept_bytes: float
    """Bytes that one entry takes where it is kept."""

    def slices(self) -> Iterator[tuple[npt.NDArray[Any], int]]:
        """Yield the array in contiguous slices, and how many bytes of what is kept each is."""
        count = len(self.values)
        for part in slices(count, self.values.nbytes // max(count, 1)):
            values = np.ascontiguousarray(self.values[part])
            if self.present is not None and not self.present[part].all():
                nothing = values.dtype.type(0 if values.dtype.kind in "iu" else np.nan)
                values = np.where(self.present[part].reshape(-1, *[1] * (values.ndim - 1)), values, nothing)
            yield values, int(len(values) * self.kept_bytes)


def selections(acts: Activations) -> Iterator[Selection]:
    """Yield each sequence and site."""
    for (sequence, site), block in acts.blocks().items():
        yield Selection(prefix(sequence) + site, acts.select(sequence=sequence, site=site), block)


def stored(selection: Selection) -> Iterator[Stored]:
    """Yield the arrays of a selection's rows as they were captured, by layer; see `Activations.encoded`."""
    acts, block = selection.acts, selection.block
    for index, layer in enumerate(acts.layers):
        name, present = f"{selection.name}.{layer}", block.present[index]
        missing = None if present.all() else present
        if isinstance(block, Block):
            yield Stored(name, block.layer(index), missing, selection.kept_bytes)
            continue
        for field, values in block.fields(index).items():
            of_rows = field == "group" or field in (block.rows.dtype.names or ())
            kept = values.nbytes / max(len(values), 1) if of_rows else 0.0
            yield Stored(f"{name}.{field}", values, missing if of_rows else None, kept)


def prefix(sequence: int) -> str:
    """Return what stands before the names of a sequence's arrays: nothing for the first."""
    return f"sequence{sequence}/" if sequence else ""


def slices(count: int, row_bytes: int, *, multiple: int = 1) -> Iterator[slice]:
    """Yield the slices of so many rows, each of about SLICE_BYTES and a multiple of so many rows."""
    step = max(SLICE_BYTES // max(row_bytes, 1) // multiple, 1) * multiple
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def portable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which numbers are written for readers that know no bfloat16: float32 then, without loss."""
    return dtype if dtype.kind in "fiub" else np.dtype(np.float32)
