"""Going through activations a slice of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from residuum.activations import Activations

SLICE_BYTES = 4 << 20
"""Rows of about this size are in memory at once."""


def selections(acts: Activations) -> Iterator[tuple[str, Activations]]:
    """Yield each sequence and site with its name: `SITE`, or `sequence1/SITE` and so on after the first sequence."""
    for sequence in acts.sequences:
        for site in acts.sites:
            yield prefix(sequence) + site, acts.select(sequence=sequence, site=site)


def prefix(sequence: int) -> str:
    """Return what stands before the names of a sequence's arrays: nothing for the first."""
    return f"sequence{sequence}/" if sequence else ""


def slices(count: int, row_bytes: int, *, multiple: int = 1) -> Iterator[slice]:
    """Yield the slices of so many rows, each of about SLICE_BYTES and a multiple of so many rows."""
    step = max(SLICE_BYTES // max(row_bytes, 1) // multiple, 1) * multiple
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def portable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which rows are written for readers that know no bfloat16: float32 then, without loss."""
    return dtype if dtype.kind == "f" else np.dtype(np.float32)


def small_arrays(acts: Activations) -> dict[str, npt.NDArray[Any]]:
    """Return what belongs to the rows of a selection besides them, and is small."""
    arrays: dict[str, npt.NDArray[Any]] = {"positions": acts.positions, "token_ids": acts.token_ids}
    if not acts.present.all():
        arrays["present"] = acts.present
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}
