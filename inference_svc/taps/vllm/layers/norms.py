"""Folding: vLLM's RMS norms that include the tap of the layer before.

Most models pass (hidden, residual) from layer to layer, and each layer starts with a norm that adds the two. A tap of
its own would add a kernel there. In a decode step, launching a kernel costs more than its work. Folded into the norm,
the tap adds no kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm import envs
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from inference_svc.taps import op
from inference_svc.taps.gpu.tables import MAX_RESIDENT

if TYPE_CHECKING:
    from torch import Tensor, nn


class _Tapped:
    """A mixin for norm classes that taps the sum before it is normalised."""

    residuum_point: int
    """The tap point."""
    residuum_plus_one: ClassVar[bool]
    """Whether the norm multiplies by weight + 1 instead of weight."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return the norm of x. With a residual, return the norm of the tapped sum x + residual, and the sum."""
        norm: Any = self
        if residual is None:
            return super().forward(x)  # type: ignore[misc]
        # As vLLM's own norms do. The parameter itself requires a gradient, for which compiled code may prepare.
        weight = norm.weight.data
        return op.call_norm(
            x, residual, weight, norm.variance_epsilon, self.residuum_point, plus_one=self.residuum_plus_one
        )


class _TappedRMSNorm(_Tapped, RMSNorm):
    residuum_plus_one = False


class _TappedGemmaRMSNorm(_Tapped, GemmaRMSNorm):
    residuum_plus_one = True


_TAPPED: dict[type[nn.Module], type[nn.Module]] = {RMSNorm: _TappedRMSNorm, GemmaRMSNorm: _TappedGemmaRMSNorm}


def can_fold(norm: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether a tap can be folded into a norm: one of vLLM's two RMS norms, in a form that the kernel computes.

    vLLM's batch-invariant mode uses other kernels, so nothing is folded there.
    """
    if type(norm) not in _TAPPED or envs.VLLM_BATCH_INVARIANT:
        return False
    is_partial = getattr(norm, "variance_size_override", None) is not None  # the variance of a part of the row
    if is_partial or not getattr(norm, "has_weight", True):
        return False
    return bool(norm.weight.dtype == dtype and len(norm.weight) <= MAX_RESIDENT)


def fold(norm: nn.Module, point: int) -> None:
    """Make a norm tap its sum at a point. Only the module's class changes: its name and parameters stay."""
    norm.__class__ = _TAPPED[type(norm)]
    norm.residuum_point = point
