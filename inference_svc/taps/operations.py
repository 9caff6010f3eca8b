"""The arithmetic of steering, for rows of several requests at once.

steering.proto defines the operations. All arithmetic is float32. v^ means v / |v|.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from inference_svc.taps.plan import Kind, Measure

if TYPE_CHECKING:
    from torch import Tensor


class GateBatch(NamedTuple):
    """The gates of some rows of an `OperationBatch`."""

    at: Tensor
    """Which rows of the batch have these gates, int64 [g]."""
    vectors: Tensor
    """The rows of the vector bank that hold the gates' vectors, int64 [g]."""
    measures: Tensor
    """The `Measure` of each gate, int64 [g]."""
    thresholds: Tensor
    """Above which measure each gate is open, float32 [g]."""
    sharpness: Tensor
    """How fast each gate opens around its threshold, float32 [g]. Infinite: at once. Negative: it opens below it. The
    bias of a FEATURE."""


class OperationBatch(NamedTuple):
    """One operation for each of r different rows."""

    rows: Tensor
    """Rows of the batch, int64 [r]."""
    vectors: Tensor
    """Rows of the vector bank, int64 [r]. Several rows may use the same vector."""
    kinds: Tensor
    """The `Kind` of each operation, int64 [r]."""
    scales: Tensor
    """Factor of ADD and ABLATE, float32 [r]."""
    lows: Tensor
    """Lower bound of CAP and CLAMP, float32 [r]."""
    highs: Tensor
    """Upper bound of CAP and CLAMP, float32 [r]."""
    keeps_norm: Tensor
    """Whether the row is rescaled to the norm that it had before, bool [r]."""
    gates: GateBatch | None = None
    """The gates of the rows that have one; None if none has."""
    columns: Tensor | None = None
    """The column of each row's scores that a SCORE writes, int64 [r]; None if there is no SCORE."""


def reach(dtype: torch.dtype) -> float:
    """Return the largest magnitude to which steering may push an element of a row of this dtype.

    It is half of the dtype's maximum, to leave room for what later layers add. It is also at most 1e16, because norms
    sum a row's squares in float32. The activations of a model do not come near 1e16 without steering.
    """
    return min(1e16, float(torch.finfo(dtype).max) / 2)


def bounded(steered: Tensor, x: Tensor, limit: float) -> Tensor:
    """Limit the magnitude of steered elements to `limit`, or to their magnitude before steering if that is larger.

    An infinity in a row becomes NaN in the next norm, and then in the row's keys and values. These stay in the engine's
    KV cache after the request has ended. Attention multiplies masked values by zero, which keeps a NaN: it would reach
    later requests.

    The GPU kernel checks only rows that an operation moves by more than a thousandth of `limit`. Smaller moves do not
    add up to an infinity over the layers of any model.

    Args:
        steered: The rows after all operations, float32 [r, width].
        x: The rows before steering, float32 [r, width].
        limit: See `reach`.

    Returns:
        The rows, float32 [r, width]. An element that steering made NaN gets back its old value.
    """
    bounds = x.abs().clamp(min=limit)
    return torch.where(steered.isnan(), x, torch.maximum(torch.minimum(steered, bounds), -bounds))


def written(moved: Tensor, dtype: torch.dtype) -> Tensor:
    """Limit the numbers that are written into a hidden row which is a part of the sum to what its dtype holds.

    With a large residual, that part may be larger than the sum, and than any float16.
    """
    return moved.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)


def openness(x: Tensor, v: Tensor, inverse_norms: Tensor, gates: GateBatch) -> Tensor:
    """Return how far gates are open for rows, from 0 to 1, float32 [g]. For a FEATURE, return its value.

    Args:
        x: The rows, float32 [g, width].
        v: The vector of each gate, float32 [g, width].
        inverse_norms: 1 / |v| for each vector, float32 [g].
        gates: The gates.
    """
    measures = (x * v).sum(dim=-1)
    is_product = (gates.measures == Measure.INNER_PRODUCT) | (gates.measures == Measure.FEATURE)
    features = measures + gates.sharpness
    features = torch.where(features > gates.thresholds, features, 0.0)  # also if it is NaN
    measures = torch.where(is_product, measures, measures * inverse_norms)
    measures = torch.where(gates.measures == Measure.COSINE, measures / x.norm(dim=-1), measures)
    # At the threshold itself, infinite sharpness gives NaN.
    opened = torch.sigmoid(gates.sharpness * (measures - gates.thresholds)).nan_to_num(0.0)
    return torch.where(gates.measures == Measure.FEATURE, features, opened)


def apply_batch(
    x: Tensor, v: Tensor, inverse_norms: Tensor, batch: OperationBatch, opened: Tensor | None = None
) -> Tensor:
    """Apply one operation to each row and return the new rows.

    Args:
        x: The rows, float32 [r, width].
        v: The vector of each row, float32 [r, width].
        inverse_norms: 1 / |v| for each vector, float32 [r]; 0 for a zero vector.
        batch: The operations. A SCORE changes nothing.
        opened: How far the gates of `batch.gates` are open, float32 [g], or the value of their feature; None if there
            are none.

    Returns:
        The new rows, float32 [r, width].
    """
    projections = (x * v).sum(dim=-1) * inverse_norms  # x . v^
    clamped = torch.maximum(torch.minimum(projections, batch.highs), batch.lows)
    along_unit = torch.where(batch.kinds == Kind.ABLATE, -batch.scales * projections, clamped - projections)
    factors = torch.where(batch.kinds == Kind.ADD, batch.scales, along_unit * inverse_norms)
    factors = torch.where(batch.kinds == Kind.SCORE, 0.0, factors)  # also if the projection is not finite
    if batch.gates is not None and opened is not None:
        at = batch.gates.at
        clamped = torch.maximum(torch.minimum(opened, batch.highs[at]), batch.lows[at]) - opened
        clamps = batch.kinds[at] == Kind.CLAMP
        factors[at] = torch.where(clamps, clamped, factors[at])
        opened = torch.where(clamps, 1.0, opened)
    moved = torch.where((batch.kinds == Kind.SET).unsqueeze(-1), v, x + factors.unsqueeze(-1) * v)
    moved = torch.where((batch.kinds == Kind.MULTIPLY).unsqueeze(-1), x * v, moved)
    if batch.gates is not None and opened is not None:
        moved[batch.gates.at] = _gated(x[batch.gates.at], moved[batch.gates.at], opened.unsqueeze(-1))
    if not batch.keeps_norm.any():
        return moved
    before, after = (rows.double().norm(dim=-1) for rows in (x, moved))  # the squares may be beyond float32
    rescaled = torch.where(batch.keeps_norm & (after > 0), before / after, 1.0)  # a row that became zero stays zero
    return (moved * rescaled.unsqueeze(-1)).float()


def _gated(x: Tensor, moved: Tensor, opened: Tensor) -> Tensor:
    """Return rows that an operation changes in part. A row whose gate is open or closed is exact."""
    partly = x + opened * (moved - x)
    return torch.where(opened == 1, moved, torch.where(opened == 0, x, partly))
