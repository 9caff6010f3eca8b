"""The custom ops in the compiled graph. Each tap point is one call, and its arguments never change.

`tap` changes `hidden` in place. Its schema declares that (`Tensor(a!)`), so the compiler neither drops nor reorders it.
`tap_norm` replaces a model's own add and RMS norm and returns their results. `tap_copy` returns a copy, with which the
model continues. Everything that changes from step to step is data that the ops read, not an argument.

`tap_columns` captures a part of the columns of a tensor. It changes nothing; its schema says that it changes the whole
tensor, so that the compiler keeps it.

`tap_experts` takes what the router of a mixture of experts chose. It changes nothing, either; its
schema says that it changes the weights, which the model uses afterwards.

`tap_copy` is for rows that may be slices of one tensor, as q, k and v often are. If an op changes such slices in place,
PyTorch's compiler copies the whole tensor for each of them, and with three of them, PyTorch 2.13 computes wrong values.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_LIBRARY = torch.library.Library("residuum", "FRAGMENT")
_LIBRARY.define("tap(Tensor(a!) hidden, Tensor? residual, int point) -> ()")
_LIBRARY.define(
    "tap_norm(Tensor hidden, Tensor residual, Tensor weight, float epsilon, bool plus_one, int point)"
    " -> (Tensor, Tensor)"
)
_LIBRARY.define("tap_copy(Tensor hidden, int point) -> Tensor")
_LIBRARY.define("tap_columns(Tensor(a!) hidden, int first, int width, int point) -> ()")
_LIBRARY.define("tap_experts(Tensor(a!) weights, Tensor experts, int num_experts, float scale, int point) -> ()")


class Tap(Protocol):
    """The implementation of the ops on a device."""

    def tap(self, hidden: Tensor, residual: Tensor | None, point: int) -> None:
        """Steer and capture the rows of `hidden` + `residual` ([rows, hidden]) at a point, in place."""

    def tap_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float, point: int, *, plus_one: bool
    ) -> tuple[Tensor, Tensor]:
        """Steer and capture the sum of `hidden` and `residual`; return its RMS norm and the sum. See kernel.py."""

    def tap_copy(self, hidden: Tensor, point: int) -> Tensor:
        """Capture the rows of `hidden` ([rows, width]) at a point that cannot be steered; return a contiguous copy."""

    def tap_experts(self, weights: Tensor, experts: Tensor, num_experts: int, scale: float, point: int) -> None:
        """Capture chosen experts as rows of `num_experts` weights; see `expert_rows`."""


class _Current:
    """The taps of this process. A worker process has one model."""

    taps: Sequence[Tap]
    firsts: Sequence[int]


def install(taps: Sequence[Tap], firsts: Sequence[int] = (0,)) -> None:
    """Set the taps that the ops call in this process. Call it before the model is hooked.

    Args:
        taps: The tap of each group of points; see `AllPoints`.
        firsts: The number of the first point of each group.
    """
    _Current.taps, _Current.firsts = taps, firsts


def _at(point: int) -> tuple[Tap, int]:
    """Return the tap of a point, and the point's number within its group."""
    group = bisect_right(_Current.firsts, point) - 1
    return _Current.taps[group], point - _Current.firsts[group]


def call(hidden: Tensor, residual: Tensor | None, point: int) -> None:
    """Call the op `tap`. The compiler traces this call into the graph."""
    torch.ops.residuum.tap(hidden, residual, point)


def call_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float, point: int, *, plus_one: bool
) -> tuple[Tensor, Tensor]:
    """Call the op `tap_norm`. The compiler traces this call into the graph."""
    normed, summed = torch.ops.residuum.tap_norm(hidden, residual, weight, epsilon, plus_one, point)
    return normed, summed


def call_copy(hidden: Tensor, point: int) -> Tensor:
    """Call the op `tap_copy`. The compiler traces this call into the graph, and keeps it if the copy is used."""
    copy: Tensor = torch.ops.residuum.tap_copy(hidden, point)
    return copy


def call_columns(hidden: Tensor, first: int, width: int, point: int) -> None:
    """Call the op `tap_columns`. The compiler traces this call into the graph.

    Args:
        hidden: [rows, columns].
        first: The first column that is captured.
        width: How many columns are captured.
        point: The tap point. Rows cannot be steered there.
    """
    torch.ops.residuum.tap_columns(hidden, first, width, point)


def call_experts(weights: Tensor, experts: Tensor, num_experts: int, scale: float, point: int) -> None:
    """Call the op `tap_experts`. On a CPU, the compiler traces this call into the graph.

    Args:
        weights: The weights of the chosen experts, [tokens, chosen].
        experts: Their numbers, [tokens, chosen]. A number that is not one of an expert stands for no expert.
        num_experts: How many experts there are.
        scale: A factor for all weights.
        point: The tap point.
    """
    torch.ops.residuum.tap_experts(weights, experts, num_experts, scale, point)


def expert_rows(weights: Tensor, experts: Tensor, num_experts: int, scale: float) -> Tensor:
    """Return for each token the weight of every expert, 0 if it was not chosen, float32 [tokens, num_experts]."""
    numbers = experts.long()
    exists = (numbers >= 0) & (numbers < num_experts)
    scaled = torch.where(exists, weights.float() * scale, 0.0)
    rows = scaled.new_zeros(len(scaled), num_experts)
    return rows.scatter_add_(1, torch.where(exists, numbers, 0), scaled)


def _tap(hidden: Tensor, residual: Tensor | None, point: int) -> None:
    tap, own = _at(point)
    tap.tap(hidden, residual, own)


def _fake_tap(hidden: Tensor, residual: Tensor | None, point: int) -> None:
    del hidden, residual, point


def _tap_norm(
    hidden: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    plus_one: bool,  # noqa: FBT001 - ops are called by position
    point: int,
) -> tuple[Tensor, Tensor]:
    tap, own = _at(point)
    return tap.tap_norm(hidden, residual, weight, epsilon, own, plus_one=plus_one)


def _fake_tap_norm(
    hidden: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    plus_one: bool,  # noqa: FBT001 - ops are called by position
    point: int,
) -> tuple[Tensor, Tensor]:
    del residual, weight, epsilon, plus_one, point
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)


def _tap_copy(hidden: Tensor, point: int) -> Tensor:
    tap, own = _at(point)
    return tap.tap_copy(hidden, own)


def _fake_tap_copy(hidden: Tensor, point: int) -> Tensor:
    del point
    return hidden.new_empty(hidden.shape)


def _tap_columns(hidden: Tensor, first: int, width: int, point: int) -> None:
    tap, own = _at(point)
    tap.tap(hidden[:, first : first + width], None, own)


def _fake_tap_columns(hidden: Tensor, first: int, width: int, point: int) -> None:
    del hidden, first, width, point


def _tap_experts(weights: Tensor, experts: Tensor, num_experts: int, scale: float, point: int) -> None:
    tap, own = _at(point)
    tap.tap_experts(weights, experts, num_experts, scale, own)


def _fake_tap_experts(weights: Tensor, experts: Tensor, num_experts: int, scale: float, point: int) -> None:
    del weights, experts, num_experts, scale, point


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("tap", _tap, _device)
    _LIBRARY.impl("tap_norm", _tap_norm, _device)
    _LIBRARY.impl("tap_copy", _tap_copy, _device)
    _LIBRARY.impl("tap_columns", _tap_columns, _device)
    _LIBRARY.impl("tap_experts", _tap_experts, _device)
_LIBRARY._register_fake("tap", _fake_tap)  # noqa: SLF001 - the documented way for a Library object
_LIBRARY._register_fake("tap_norm", _fake_tap_norm)  # noqa: SLF001 - see above
_LIBRARY._register_fake("tap_copy", _fake_tap_copy)  # noqa: SLF001 - see above
_LIBRARY._register_fake("tap_columns", _fake_tap_columns)  # noqa: SLF001 - see above
_LIBRARY._register_fake("tap_experts", _fake_tap_experts)  # noqa: SLF001 - see above
