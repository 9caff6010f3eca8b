"""vLLM's RMS norms, with the tap of the layer before folded into them.

Most models hand (hidden, residual) from layer to layer and begin each with a norm that first adds the two. There the
tap costs a kernel of its own, and in a decode step a kernel costs more for being there than for what it does. Folded
into the norm, the model runs as many kernels as without taps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm import envs
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from inference_svc.taps import op

if TYPE_CHECKING:
    from torch import Tensor, nn


class _Tapped:
    """Mixed into a norm's class: taps the sum that it normalises."""

    residuum_point: int
    residuum_plus_one: ClassVar[bool]
    """The norm multiplies by weight + 1 rather than by weight."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return the norm of x, or (the norm of x + residual, x + residual)."""
        norm: Any = self
        if residual is None:
            return super().forward(x)  # type: ignore[misc]
        return op.call_norm(
            x, residual, norm.weight, norm.variance_epsilon, self.residuum_point, plus_one=self.residuum_plus_one
        )


class _TappedRMSNorm(_Tapped, RMSNorm):
    residuum_plus_one = False


class _TappedGemmaRMSNorm(_Tapped, GemmaRMSNorm):
    residuum_plus_one = True


_TAPPED: dict[type[nn.Module], type[nn.Module]] = {RMSNorm: _TappedRMSNorm, GemmaRMSNorm: _TappedGemmaRMSNorm}


def can_fold(norm: nn.Module, dtype: torch.dtype) -> bool:
    """Tell whether a tap can be folded into a norm: one of vLLM's own two, in the form that the kernel computes."""
    if type(norm) not in _TAPPED or envs.VLLM_BATCH_INVARIANT:
        return False
    of_a_part = getattr(norm, "variance_size_override", None) is not None
    return bool(getattr(norm, "has_weight", True)) and not of_a_part and norm.weight.dtype == dtype


def fold(norm: nn.Module, point: int) -> None:
    """Have a norm tap what it adds up. The module, its name and its parameters stay what they are."""
    norm.__class__ = _TAPPED[type(norm)]
    norm.residuum_point = point
