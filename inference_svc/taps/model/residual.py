"""An experiment: is the second tensor that a decoder layer returns part of the residual stream?

A layer may return two tensors, hidden and residual. In most models the residual stream is their sum. In some, such as
Exaone 4 and Cohere, nothing reads the second tensor. To find out, the experiment replaces the outputs of all layers by
fixed numbers, and tests two claims on what the next layer, or after the last layer the model, returns:

* The stream is the sum: (hidden + residual, 0) gives the same result as (hidden, residual).
* The stream is the first tensor: (hidden, 0) gives the same result as (hidden, residual).

The same claim, and only that one, must hold after every layer, and in a second round with other numbers. Otherwise the
model is refused.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from inference_svc.taps.model.hooked_runs import CannotTapError, is_sequence, name_of, relative_error, run_hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Replace = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Takes a layer's index and the two tensors that it returned, and returns the two tensors that replace them."""
    Values = dict[int, list[Tensor]]
    """For each layer, what the next layer returned, or after the last layer the model. Float32."""

_SEEDS = (1, 2)
"""The seeds of the numbers in the two rounds."""

_SAME = 1e-3
"""Values with a smaller relative difference count as the same. The numbers themselves add up without rounding."""

_CHANGED = 2e-2
"""Values with a larger relative difference count as changed."""

_NOISE = 1e-2
"""Values with a larger relative difference between equal runs are ignored."""

_MARGIN = 4.0
"""With noise, differences up to 4 x the noise count as the same, and those from 4 x that limit on as changed."""

_STEPS = 8
"""The numbers are multiples of 1/8 between -1 and 1, so that their sums are exact in every floating-point type."""


class _Stream(Enum):
    """What the residual stream is."""

    SUM = "sum"
    FIRST = "first"


class _Changes(NamedTuple):
    """The largest relative changes of the values after one layer."""

    sum: float
    """When the sum replaces both tensors."""
    first: float
    """When the second tensor is left out."""
    noise: float
    """Between equal runs."""

    def verdict(self) -> _Stream | None:
        """Return the claim that holds; None if neither or both do."""
        if not math.isfinite(self.noise):
            return None
        same = max(_SAME, _MARGIN * self.noise)
        changed = max(_CHANGED, _MARGIN * same)
        if self.sum <= same and self.first >= changed:
            return _Stream.SUM
        if self.first <= same and self.sum >= changed:
            return _Stream.FIRST
        return None


def adds_residual(model: nn.Module, layers: Mapping[int, nn.Module], run: Callable[[], object]) -> bool:
    """Return whether the residual stream after a layer is the sum of the two tensors that the layer returns.

    Args:
        model: The model.
        layers: Its decoder layers by index, each of which returns two tensors of the same shape.
        run: Runs the model once, uncompiled. Attention must give the same numbers in every run.

    Raises:
        CannotTapError: After some layer neither claim holds, or both do. Or layers differ.
    """
    rounds = [_changes(model, layers, run, seed) for seed in _SEEDS]
    if not any(rounds):
        raise CannotTapError(
            "The model cannot be tapped: its layers return two tensors, and this pipeline stage computes nothing after "
            "its only layer that would show whether the residual stream is their sum. Use fewer pipeline stages."
        )
    verdicts = {changes.verdict() for changes_by_layer in rounds for changes in changes_by_layer.values()}
    if verdicts == {_Stream.SUM}:
        return True
    if verdicts == {_Stream.FIRST}:
        return False
    raise CannotTapError(_undecided(model, layers, rounds))


def _undecided(model: nn.Module, layers: Mapping[int, nn.Module], rounds: Sequence[Mapping[int, _Changes]]) -> str:
    index, changes = next(
        ((index, changes) for by_layer in rounds for index, changes in by_layer.items() if changes.verdict() is None),
        next(iter(rounds[0].items())),
    )
    seen = (
        f"the model's values change, relative to their norm, by {changes.sum:.2g} if the sum takes the place of both, "
        f"by {changes.first:.2g} if the second tensor is left out, and by {changes.noise:.2g} between equal runs"
        if math.isfinite(changes.noise)
        else "the model's values differ between equal runs, or are not finite"
    )
    return (
        f"{type(model).__name__} cannot be tapped: its layers return two tensors, and the residual stream is neither "
        "clearly their sum nor clearly the first of them, after every layer alike. After "
        f"{name_of(model, layers[index])} {seen}. residuum does not support this model; please report it."
    )


def _changes(
    model: nn.Module, layers: Mapping[int, nn.Module], run: Callable[[], object], seed: int
) -> dict[int, _Changes]:
    """Test both claims with the numbers of one round. Leaves out layers after which this stage computes nothing."""

    def both(index: int, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return _numbers(hidden, seed, index), _numbers(residual, -seed, index)

    def total(index: int, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        one, other = both(index, hidden, residual)
        return one + other, torch.zeros_like(other)

    def first(index: int, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        one, other = both(index, hidden, residual)
        return one, torch.zeros_like(other)

    runs = [_values_after(model, layers, run, replace) for replace in (both, total, both, first, both)]
    changes = {}
    for index in layers:
        noise, of_sum, of_first = [], [], []
        for plain, summed, again, alone, once_more in zip(*(values[index] for values in runs), strict=True):
            between_runs = max(_difference(again, plain), _difference(once_more, plain))
            if between_runs <= _NOISE:
                noise.append(between_runs)
                of_sum.append(_difference(summed, plain))
                of_first.append(_difference(alone, plain))
        if noise:
            changes[index] = _Changes(max(of_sum), max(of_first), max(noise))
        elif runs[0][index]:
            changes[index] = _Changes(math.inf, math.inf, math.inf)
    return changes


def _difference(other: Tensor, value: Tensor) -> float:
    """Return the relative difference of two values; infinity if it is not finite."""
    error = relative_error(other, value)
    return error if math.isfinite(error) else math.inf


def _values_after(
    model: nn.Module, layers: Mapping[int, nn.Module], run: Callable[[], object], replace: Replace
) -> Values:
    """Run a model with replaced layer outputs, and return the values that it computed from them."""
    indices = {layer: index for index, layer in layers.items()}
    values: Values = {index: [] for index in layers}
    last: int | None = None

    def note(output: Any) -> None:
        tensors = output if is_sequence(output) else (output,)
        if last is not None:  # `+ 0.0` copies: the model may later write into these tensors
            values[last] += [value.float() + 0.0 for value in tensors if isinstance(value, Tensor)]

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        nonlocal last
        del args
        note(output)
        if module is model:
            return None
        last = indices[module]
        return replace(last, *output)

    run_hooked(run, [module.register_forward_hook(leave) for module in (*layers.values(), model)])
    return values


def _numbers(like: Tensor, seed: int, index: int) -> Tensor:
    """Return fixed numbers that look random. Seed and layer change them by more than a factor, which norms cancel."""
    angles = torch.arange(like.numel(), device=like.device, dtype=torch.float32) * (1.0 + 0.37 * seed) + index
    return ((angles.cos() * _STEPS).round() / _STEPS).to(like.dtype).view_as(like)
