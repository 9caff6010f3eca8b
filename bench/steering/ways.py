"""Ways to steer the rows of a batch that the taps' kernel is compared with, and the arithmetic that all agree with.

The other ways work on one tensor, the residual stream itself, which a model that keeps `hidden` and `residual` apart
would first have to make and afterwards take apart again. That is left out: it could only make them slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.taps.plan import Kind

Steer = Callable[[Tensor, Tensor], Tensor]


SCALES = {Kind.ADD: 0.5, Kind.ABLATE: 1.0, Kind.CAP: 1.0}
CAP_LOW, CAP_HIGH = -0.5, 0.5
"""The projection of a random row lies beyond these more often than not."""

ROUNDING = 2.0**-8
"""What rounding to bfloat16 changes at most, relative."""


@dataclass(frozen=True)
class Batch:
    """Requests side by side in one batch, and what steers them."""

    kind: Kind
    requests: int
    rows_each: int
    vectors: Tensor
    """One for each unique operation, float32 [unique, hidden]."""

    @property
    def unique(self) -> int:
        """Unique operations; request i has number i modulo this."""
        return len(self.vectors)

    @property
    def operation_of_row(self) -> Tensor:
        """Which operation each row has, int64 [rows]."""
        requests = torch.arange(self.requests, device=self.vectors.device)
        return (requests % self.unique).repeat_interleave(self.rows_each)

    def rows_of(self, request: int) -> slice:
        """Return the rows of a request."""
        return slice(request * self.rows_each, (request + 1) * self.rows_each)


class Expected(NamedTuple):
    """What a way must return, in float64, and how far off it may be."""

    value: Tensor
    exact_bound: Tensor
    """For arithmetic in float32 that is rounded to bfloat16 once."""
    loose_bound: Tensor
    """For arithmetic in bfloat16, whose every step is rounded, with a vector in bfloat16."""


def steered(batch: Batch, stream: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows after their operations, and the size of what rounding could change on the way; all in float64.

    Args:
        batch: What is done.
        stream: The rows, float64 [rows, hidden].
    """
    v = batch.vectors.double()[batch.operation_of_row]
    if batch.kind is Kind.ADD:
        moved = SCALES[Kind.ADD] * v
        return stream + moved, moved.abs()
    unit = v / v.norm(dim=-1, keepdim=True)
    products = stream * unit
    projection = products.sum(dim=-1, keepdim=True)
    if batch.kind is Kind.ABLATE:
        change = -SCALES[Kind.ABLATE] * projection
    else:
        change = projection.clamp(CAP_LOW, CAP_HIGH) - projection
    return stream + change * unit, (projection.abs() + products.norm(dim=-1, keepdim=True)) * unit.abs()


def expect(batch: Batch, hidden: Tensor, residual: Tensor | None = None) -> Expected:
    """Return what `hidden` must be after the residual stream, `hidden` + `residual`, was steered."""
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
    """Return what the steered sum must be that the folded norm goes on with; `batch` None: unsteered."""
    stream = hidden.double() + residual.double()
    after, moved = steered(batch, stream) if batch else (stream, torch.zeros_like(stream))
    bound = 1.01 * ROUNDING * after.abs() + 1e-5 * (1 + stream.abs() + moved)
    return Expected(after, bound, 2 * bound)


def expect_norm(stream: Tensor, weight: Tensor, epsilon: float) -> Expected:
    """Return what the RMS norm of float64 rows must be. Some norms round before they multiply, and once more after."""
    value = stream * torch.rsqrt(stream.square().mean(dim=-1, keepdim=True) + epsilon) * weight.double()
    bound = 1.01 * ROUNDING * value.abs() + 1e-4
    return Expected(value, bound, 4 * ROUNDING * value.abs() + 1e-3)


def worst(got: Tensor, expected: Expected, *, exact: bool) -> float:
    """Return how far a result is off, in bounds: 1 is the most that is allowed."""
    bound = expected.exact_bound if exact else expected.loose_bound
    return float(((got.double() - expected.value).abs() / bound).max().nan_to_num(nan=float("inf")))


def operation(kind: Kind) -> Steer:
    """Return an operation on rows and a vector, prepared by `vector_for`, in their own dtype."""
    scale = SCALES[kind]

    def add(rows: Tensor, v: Tensor) -> Tensor:
        return rows + v

    def ablate(rows: Tensor, v: Tensor) -> Tensor:
        return rows - (scale * (rows @ v)).unsqueeze(-1) * v

    def cap(rows: Tensor, v: Tensor) -> Tensor:
        projection = rows @ v
        return rows + (projection.clamp(CAP_LOW, CAP_HIGH) - projection).unsqueeze(-1) * v

    return {Kind.ADD: add, Kind.ABLATE: ablate, Kind.CAP: cap}[kind]


def vector_for(kind: Kind, vector: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a vector as `operation` takes it: scaled or of length one beforehand, so that it costs nothing later."""
    prepared = SCALES[kind] * vector if kind is Kind.ADD else vector / vector.norm()
    return prepared.to(dtype).clone()  # of its own: a request's vector came with the request


def loop(kind: Kind, rows_each: int) -> Callable[[Tensor, Sequence[Tensor]], None]:
    """Return the loop over requests: slice, apply, write back. Takes a vector for each request."""
    apply = operation(kind)

    def run(stream: Tensor, vectors: Sequence[Tensor]) -> None:
        for index, vector in enumerate(vectors):
            rows = slice(index * rows_each, (index + 1) * rows_each)
            stream[rows] = apply(stream[rows], vector)

    return run


def gather_scatter(kind: Kind) -> Callable[[Tensor, Sequence[tuple[Tensor, Tensor]]], None]:
    """Return the loop over unique operations: gather their rows, apply, scatter. Takes (rows, vector) for each."""
    apply = operation(kind)

    def run(stream: Tensor, groups: Sequence[tuple[Tensor, Tensor]]) -> None:
        for rows, vector in groups:
            stream.index_copy_(0, rows, apply(stream.index_select(0, rows), vector))

    return run


def groups_of(batch: Batch, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return the rows and the vector of each unique operation: what is grouped beforehand costs nothing later."""
    which = batch.operation_of_row
    return [
        (torch.nonzero(which == number).squeeze(-1), vector_for(batch.kind, vector, dtype))
        for number, vector in enumerate(batch.vectors)
    ]
