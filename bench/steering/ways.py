"""Alternatives to the taps' kernel for steering the rows of a batch, and the reference results for all of them.

The alternatives work on one tensor, the residual stream. A model with separate `hidden` and `residual` would have to
add them first and split them afterwards. That is not measured, because it would only make the alternatives slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.taps.plan import Kind

Steer = Callable[[Tensor, Tensor], Tensor]


SCALES = {Kind.ADD: 0.5, Kind.ABLATE: 1.0, Kind.CAP: 1.0, Kind.SET: 1.0, Kind.MULTIPLY: 1.0}
GATE_SHARPNESS = 0.5
"""Of a gate at the projection 0. It is open in part for every row, so that no row is left as it is."""
CAP_LOW, CAP_HIGH = -0.5, 0.5
"""Bounds that the projection of a random row usually exceeds."""

ROUNDING = 2.0**-8
"""The largest relative error of rounding to bfloat16."""


@dataclass(frozen=True)
class Batch:
    """The requests of one batch, and their steering."""

    kind: Kind
    requests: int
    rows_each: int
    vectors: Tensor
    """The vector of each unique operation, float32 [unique, hidden]."""
    gates: Tensor | None = None
    """The vector of each unique operation's gate, float32 [unique, hidden]; None: without gates."""

    @property
    def unique(self) -> int:
        """The number of unique operations. Request i has operation i modulo this."""
        return len(self.vectors)

    @property
    def operation_of_row(self) -> Tensor:
        """The index of each row's operation, int64 [rows]."""
        requests = torch.arange(self.requests, device=self.vectors.device)
        return (requests % self.unique).repeat_interleave(self.rows_each)

    def rows_of(self, request: int) -> slice:
        """Return the rows of a request."""
        return slice(request * self.rows_each, (request + 1) * self.rows_each)


class Expected(NamedTuple):
    """The expected result of a way in float64, and the allowed errors."""

    value: Tensor
    exact_bound: Tensor
    """The allowed error for arithmetic in float32 that is rounded to bfloat16 once."""
    loose_bound: Tensor
    """The allowed error for arithmetic in bfloat16, which rounds each step, with a vector in bfloat16."""


def steered(batch: Batch, stream: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows after their operations, and the magnitude that rounding errors scale with, both in float64.

    Args:
        batch: The batch with the operations.
        stream: The rows, float64 [rows, hidden].
    """
    after, moved = _ungated(batch, stream)
    if batch.gates is not None:
        g = batch.gates.double()[batch.operation_of_row]
        projection = (stream * g).sum(dim=-1, keepdim=True) / g.norm(dim=-1, keepdim=True)
        after = stream + torch.sigmoid(GATE_SHARPNESS * projection) * (after - stream)
    return after, moved


def _ungated(batch: Batch, stream: Tensor) -> tuple[Tensor, Tensor]:
    v = batch.vectors.double()[batch.operation_of_row]
    if batch.kind is Kind.ADD:
        moved = SCALES[Kind.ADD] * v
        return stream + moved, moved.abs()
    if batch.kind is Kind.SET:
        return v, v.abs()
    if batch.kind is Kind.MULTIPLY:
        return stream * v, stream.abs() * v.abs()
    unit = v / v.norm(dim=-1, keepdim=True)
    products = stream * unit
    projection = products.sum(dim=-1, keepdim=True)
    if batch.kind is Kind.ABLATE:
        change = -SCALES[Kind.ABLATE] * projection
    else:
        change = projection.clamp(CAP_LOW, CAP_HIGH) - projection
    return stream + change * unit, (projection.abs() + products.norm(dim=-1, keepdim=True)) * unit.abs()


def expect(batch: Batch, hidden: Tensor, residual: Tensor | None = None) -> Expected:
    """Return the expected `hidden` after steering the residual stream, which is `hidden` + `residual`."""
    before = hidden.double()
    stream = before if residual is None else before + residual.double()
    after, moved = steered(batch, stream)
    value = before + (after - stream)
    size = before.abs() + stream.abs() + moved
    return Expected(
        value,
        exact_bound=1.01 * ROUNDING * value.abs() + 1e-5 * (1 + size),
        loose_bound=ROUNDING * (2 * value.abs() + before.abs() + 4 * moved) + 1e-5,
    )


def expect_sum(batch: Batch | None, hidden: Tensor, residual: Tensor) -> Expected:
    """Return the expected steered sum that the folded norm reads. It is unsteered if `batch` is None."""
    stream = hidden.double() + residual.double()
    after, moved = steered(batch, stream) if batch else (stream, torch.zeros_like(stream))
    bound = 1.01 * ROUNDING * after.abs() + 1e-5 * (1 + stream.abs() + moved)
    return Expected(after, bound, 2 * bound)


def expect_norm(stream: Tensor, weight: Tensor, epsilon: float) -> Expected:
    """Return the expected RMS norm of float64 rows. The bounds allow norms that round before and after multiplying."""
    value = stream * torch.rsqrt(stream.square().mean(dim=-1, keepdim=True) + epsilon) * weight.double()
    bound = 1.01 * ROUNDING * value.abs() + 1e-4
    return Expected(value, bound, 4 * ROUNDING * value.abs() + 1e-3)


def worst(got: Tensor, expected: Expected, *, exact: bool) -> float:
    """Return the largest error of a result as a multiple of the allowed error."""
    bound = expected.exact_bound if exact else expected.loose_bound
    return float(((got.double() - expected.value).abs() / bound).max().nan_to_num(nan=float("inf")))


def operation(kind: Kind) -> Steer:
    """Return an operation on rows and a vector from `vector_for`. It computes in their dtype."""
    scale = SCALES[kind]

    def add(rows: Tensor, v: Tensor) -> Tensor:
        return rows + v

    def ablate(rows: Tensor, v: Tensor) -> Tensor:
        return rows - (scale * (rows @ v)).unsqueeze(-1) * v

    def cap(rows: Tensor, v: Tensor) -> Tensor:
        projection = rows @ v
        return rows + (projection.clamp(CAP_LOW, CAP_HIGH) - projection).unsqueeze(-1) * v

    def replace(rows: Tensor, v: Tensor) -> Tensor:
        return v.expand_as(rows)

    def multiply(rows: Tensor, v: Tensor) -> Tensor:
        return rows * v

    ways = {Kind.ADD: add, Kind.ABLATE: ablate, Kind.CAP: cap, Kind.SET: replace, Kind.MULTIPLY: multiply}
    return ways[kind]


def vector_for(kind: Kind, vector: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a vector for `operation`: scaled, normalized or as it is, in advance, so that this is not measured."""
    prepared = SCALES[kind] * vector if kind in {Kind.ADD, Kind.SET, Kind.MULTIPLY} else vector / vector.norm()
    return prepared.to(dtype).clone()  # a separate copy, like the vector in a request


def loop(kind: Kind, rows_each: int) -> Callable[[Tensor, Sequence[Tensor]], None]:
    """Return a loop over requests that slices, applies and writes back. It gets a vector for each request."""
    apply = operation(kind)

    def run(stream: Tensor, vectors: Sequence[Tensor]) -> None:
        for index, vector in enumerate(vectors):
            rows = slice(index * rows_each, (index + 1) * rows_each)
            stream[rows] = apply(stream[rows], vector)

    return run


def gather_scatter(kind: Kind) -> Callable[[Tensor, Sequence[tuple[Tensor, Tensor]]], None]:
    """Return a loop over unique operations that gathers rows, applies and scatters. It gets (rows, vector) for each."""
    apply = operation(kind)

    def run(stream: Tensor, groups: Sequence[tuple[Tensor, Tensor]]) -> None:
        for rows, vector in groups:
            stream.index_copy_(0, rows, apply(stream.index_select(0, rows), vector))

    return run


def groups_of(batch: Batch, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return the rows and the vector of each unique operation. This is done in advance, so it is not measured."""
    which = batch.operation_of_row
    return [
        (torch.nonzero(which == number).squeeze(-1), vector_for(batch.kind, vector, dtype))
        for number, vector in enumerate(batch.vectors)
    ]
