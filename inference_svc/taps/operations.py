"""The arithmetic of steering, on rows of any requests at once.

Source of the definitions: steering.proto. All of it is float32; v^ is v / |v|.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from inference_svc.taps.plan import Kind

if TYPE_CHECKING:
    from torch import Tensor


class OperationBatch(NamedTuple):
    """One operation for each of some rows; the rows are distinct, the vectors need not be."""

    rows: Tensor
    """Rows of the batch, int64 [r]."""
    vectors: Tensor
    """Rows of the vector bank, int64 [r]."""
    kinds: Tensor
    """`Kind` of each, int64 [r]."""
    scales: Tensor
    """Factor of ADD and ABLATE, float32 [r]."""
    lows: Tensor
    """Lower bound of CAP, float32 [r]."""
    highs: Tensor
    """Upper bound of CAP, float32 [r]."""
    keeps_norm: Tensor
    """Whether the row gets back the norm that it had, bool [r]."""


def reach(dtype: torch.dtype) -> float:
    """Return how large steering may make an element of a row of this dtype.

    Half of what the dtype holds, for what layers add to it later; and no larger than that the sum of a row's squares
    is a float32, because norms are computed so. No model comes near 1e16 by itself.
    """
    return min(1e16, float(torch.finfo(dtype).max) / 2)


def bounded(steered: Tensor, x: Tensor, most: float) -> Tensor:
    """Return steered rows that hold no element larger than `most`, unless it was before.

    A row with an infinity makes NaN of itself in the next norm, and so of its keys and values. These stay in the
    engine's cache when the request has ended, and attention multiplies what it masks by zero: so the NaN would get
    into requests that come after. (A GPU's kernel asks this only of rows that an operation moves by more than a
    thousandth of `most`; less than that does not add up to an infinity in any model's layers.)

    Args:
        steered: The rows after all operations, float32 [r, hidden].
        x: The rows before, likewise.
        most: See `reach`.

    Returns:
        The rows, [r, hidden]. An element for which no number came out is as it was before.
    """
    bounds = x.abs().clamp(min=most)
    return torch.where(steered.isnan(), x, torch.maximum(torch.minimum(steered, bounds), -bounds))


def apply_batch(x: Tensor, v: Tensor, inverse_norms: Tensor, batch: OperationBatch) -> Tensor:
    """Return rows after one operation each.

    Args:
        x: The residual rows, float32 [r, hidden].
        v: Each row's vector, float32 [r, hidden].
        inverse_norms: 1 / |v| of each, float32 [r]; 0 for the zero vector.
        batch: What is done to each row.

    Returns:
        The rows after it, float32 [r, hidden].
    """
    projections = (x * v).sum(dim=-1) * inverse_norms  # x . v^
    clamped = torch.maximum(torch.minimum(projections, batch.highs), batch.lows)
    along_unit = torch.where(batch.kinds == Kind.ABLATE, -batch.scales * projections, clamped - projections)
    factors = torch.where(batch.kinds == Kind.ADD, batch.scales, along_unit * inverse_norms)
    moved = x + factors.unsqueeze(-1) * v
    if not batch.keeps_norm.any():
        return moved
    before, after = x.norm(dim=-1), moved.norm(dim=-1)
    rescaled = torch.where(batch.keeps_norm & (after > 0), before / after, 1.0)  # a row that became zero stays zero
    return moved * rescaled.unsqueeze(-1)
