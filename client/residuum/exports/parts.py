"""Iterates over activations one slice of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from residuum.values.captures.blocks import AnyBlock, Block

if TYPE_CHECKING:
    from residuum.values.captures.activations import Activations

SLICE_BYTES = 4 << 20
"""The approximate size of the rows that are in memory at once."""


@dataclass(frozen=True)
class Selection:
    """The rows of one sequence at one site."""

    name: str
    """`SITE` for the first sequence, `sequence1/SITE` and so on for the others."""
    acts: Activations
    """The activations, with this sequence and site selected."""
    block: AnyBlock
    """Their rows."""

    @property
    def kept_bytes(self) -> float:
        """Bytes that a row takes in memory."""
        return self.block.nbytes / max(self.block.present.size, 1)

    def rows(self, index: int, part: slice) -> npt.NDArray[Any]:
        """Return the decoded rows of a layer at a slice of positions; NaN for missing rows."""
        return self.block.part(part).layer(index)

    def small_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the small arrays that describe the rows: positions, token IDs and, if any is missing, `present`."""
        arrays: dict[str, npt.NDArray[Any]] = {"positions": self.acts.positions, "token_ids": self.acts.token_ids}
        if not self.acts.present.all():
            arrays["present"] = self.acts.present
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


@dataclass(frozen=True)
class Stored:
    """An array of a layer's rows as captured: the rows themselves, or one field of their encoding."""

    name: str
    """`SITE.LAYER`, or `SITE.LAYER.FIELD`."""
    values: npt.NDArray[Any]
    """The array. Its first axis is the positions; for fields that rows encoded together share, it is the groups."""
    present: npt.NDArray[np.bool_] | None
    """Which rows are present; None if all are, or if the first axis is not the positions."""
    kept_bytes: float
    """Bytes that one entry takes in memory."""

    def slices(self) -> Iterator[tuple[npt.NDArray[Any], int]]:
        """Yield contiguous slices of the array, each with the number of bytes that it takes in memory."""
        count = len(self.values)
        for part in slices(count, self.values.nbytes // max(count, 1)):
            values = np.ascontiguousarray(self.values[part])
            if self.present is not None and not self.present[part].all():
                nothing = values.dtype.type(0 if values.dtype.kind in "iu" else np.nan)
                values = np.where(self.present[part].reshape(-1, *[1] * (values.ndim - 1)), values, nothing)
            yield values, int(len(values) * self.kept_bytes)


def selections(acts: Activations) -> Iterator[Selection]:
    """Yield the selection of each sequence and site."""
    for (sequence, site), block in acts.blocks().items():
        yield Selection(prefix(sequence) + site, acts.select(sequence=sequence, site=site), block)


def stored(selection: Selection) -> Iterator[Stored]:
    """Yield the arrays of a selection's rows as captured, layer by layer; see `Activations.encoded`."""
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
    """Return the prefix of the names of a sequence's arrays, which is empty for the first sequence."""
    return f"sequence{sequence}/" if sequence else ""


def slices(count: int, row_bytes: int, *, multiple: int = 1) -> Iterator[slice]:
    """Yield slices that cover `count` rows, each of about SLICE_BYTES and a multiple of `multiple` rows."""
    step = max(SLICE_BYTES // max(row_bytes, 1) // multiple, 1) * multiple
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def portable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype to write for readers without bfloat16: float32 for bfloat16, which is lossless."""
    return dtype if dtype.kind in "fiub" else np.dtype(np.float32)
