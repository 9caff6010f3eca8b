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

import importlib
import os
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_HAS_HOISTED_TYPES = torch.__version__ >= (2, 11)
_OpaqueBase: Any = importlib.import_module("torch._opaque_base").OpaqueBase if _HAS_HOISTED_TYPES else object


class Point(_OpaqueBase):
    """The number of a tap point as an argument of the ops.

    PyTorch's compiler passes such an argument to the compiled code, as it does with vLLM's `LayerName`. An int would be
    a constant in the code, so that layers with the same code would each be compiled.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """Return an expression that makes this point, and the names in it."""
        return f"Point({self.number})", {"Point": Point}


# VLLM_USE_LAYERNAME=0 is vLLM's own way to do without such types.
_HOISTED = _HAS_HOISTED_TYPES and os.environ.get("VLLM_USE_LAYERNAME", "1") != "0"
_POINT_TYPE = "int"
if _HOISTED:
    from torch._library.opaque_object import get_opaque_type_name, register_opaque_type

    register_opaque_type(Point, typ="value", hoist=True)
    _POINT_TYPE = get_opaque_type_name(Point)

_LIBRARY = torch.library.Library("residuum", "FRAGMENT")
_LIBRARY.define(f"tap(Tensor(a!) hidden, Tensor? residual, {_POINT_TYPE} point) -> ()")
_LIBRARY.define(
    f"tap_norm(Tensor hidden, Tensor residual, Tensor weight, float epsilon, bool plus_one, {_POINT_TYPE} point)"
    " -> (Tensor, Tensor)"
)
_LIBRARY.define(f"tap_copy(Tensor hidden, {_POINT_TYPE} point) -> Tensor")
_LIBRARY.define(f"tap_columns(Tensor(a!) hidden, int first, int width, {_POINT_TYPE} point) -> ()")
_LIBRARY.define(
    f"tap_experts(Tensor(a!) weights, Tensor experts, int num_experts, float scale, {_POINT_TYPE} point) -> ()"
)


class Tap(Protocol):
    """The implementation of the ops on a device."""

    def tap(self, hidden: Tensor, residual: Tensor | None, point: int) -> None:
        """Steer and capture the rows of `hidden` + `residual` ([rows, hidden]) at a point, in place."""

    def tap_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float, point: int, *, plus_one: bool
    ) -> tuple[Tensor, Tensor]:
        """Steer and capture the sum of `hidden` and `residual`; return its RMS norm and the sum."""

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


def _argument(point: int) -> Point | int:
    return Point(point) if _HOISTED else point


def _at(point: Point | int) -> tuple[Tap, int]:
    """Return the tap of a point, and the point's number within its group."""
    number = point.number if isinstance(point, Point) else point
    group = bisect_right(_Current.firsts, number) - 1
    return _Current.taps[group], number - _Current.firsts[group]


def call(hidden: Tensor, residual: Tensor | None, point: int) -> None:
    """Call the op `tap`. The compiler traces this call into the graph."""
    torch.ops.residuum.tap(hidden, residual, _argument(point))


def call_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float, point: int, *, plus_one: bool
) -> tuple[Tensor, Tensor]:
    """Call the op `tap_norm`. The compiler traces this call into the graph."""
    normed, summed = torch.ops.residuum.tap_norm(hidden, residual, weight, epsilon, plus_one, _argument(point))
    return normed, summed


def call_copy(hidden: Tensor, point: int) -> Tensor:
    """Call the op `tap_copy`. The compiler traces this call into the graph, and keeps it if the copy is used."""
    copy: Tensor = torch.ops.residuum.tap_copy(hidden, _argument(point))
    return copy


def call_columns(hidden: Tensor, first: int, width: int, point: int) -> None:
    """Call the op `tap_columns`. The compiler traces this call into the graph.

    Args:
        hidden: [rows, columns].
        first: The first column that is captured.
        width: How many columns are captured.
        point: The tap point. Rows cannot be steered there.
    """
    torch.ops.residuum.tap_columns(hidden, first, width, _argument(point))


def call_experts(weights: Tensor, experts: Tensor, num_experts: int, scale: float, point: int) -> None:
    """Call the op `tap_experts`. On a CPU, the compiler traces this call into the graph.

    Args:
        weights: The weights of the chosen experts, [tokens, chosen].
        experts: Their numbers, [tokens, chosen]. A number that is not one of an expert stands for no expert.
        num_experts: How many experts there are.
        scale: A factor for all weights.
        point: The tap point.
    """
    torch.ops.residuum.tap_experts(weights, experts, num_experts, scale, _argument(point))


def expert_rows(weights: Tensor, experts: Tensor, num_experts: int, scale: float) -> Tensor:
    """Return for each token the weight of every expert, 0 if it was not chosen, float32 [tokens, num_experts]."""
    numbers = experts.long()
    exists = (numbers >= 0) & (numbers < num_experts)
    scaled = torch.where(exists, weights.float() * scale, 0.0)
    rows = scaled.new_zeros(len(scaled), num_experts)
    return rows.scatter_add_(1, torch.where(exists, numbers, 0), scaled)


def _tap(hidden: Tensor, residual: Tensor | None, point: Point | int) -> None:
    tap, own = _at(point)
    tap.tap(hidden, residual, own)


def _fake_tap(hidden: Tensor, residual: Tensor | None, point: Point | int) -> None:
    del hidden, residual, point


def _tap_norm(
    hidden: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    plus_one: bool,  # noqa: FBT001 - ops are called by position
    point: Point | int,
) -> tuple[Tensor, Tensor]:
    tap, own = _at(point)
    return tap.tap_norm(hidden, residual, weight, epsilon, own, plus_one=plus_one)


def _fake_tap_norm(
    hidden: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    plus_one: bool,  # noqa: FBT001 - ops are called by position
    point: Point | int,
) -> tuple[Tensor, Tensor]:
    del residual, weight, epsilon, plus_one, point
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)


def _tap_copy(hidden: Tensor, point: Point | int) -> Tensor:
    tap, own = _at(point)
    return tap.tap_copy(hidden, own)


def _fake_tap_copy(hidden: Tensor, point: Point | int) -> Tensor:
    del point
    return hidden.new_empty(hidden.shape)


def _tap_columns(hidden: Tensor, first: int, width: int, point: Point | int) -> None:
    tap, own = _at(point)
    tap.tap(hidden[:, first : first + width], None, own)


def _fake_tap_columns(hidden: Tensor, first: int, width: int, point: Point | int) -> None:
    del hidden, first, width, point


def _tap_experts(weights: Tensor, experts: Tensor, num_experts: int, scale: float, point: Point | int) -> None:
    tap, own = _at(point)
    tap.tap_experts(weights, experts, num_experts, scale, own)


def _fake_tap_experts(weights: Tensor, experts: Tensor, num_experts: int, scale: float, point: Point | int) -> None:
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
