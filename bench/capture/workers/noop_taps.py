"""Taps that do nothing: the ops are in the graph and everything around them runs, but they read no row.

They work only with fold_norms=False, because a tap must compute the norm that is folded into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from inference_svc.engine import arguments
from inference_svc.taps import op

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

_WORKERS = {kind: f"bench.capture.workers.noop_{kind}.NoopWorker" for kind in ("cpu", "cuda")}


class NoopTap:
    """Does nothing with rows."""

    def tap(self, hidden: Tensor, residual: Tensor | None, point: int) -> None:
        """See `op.Tap`."""

    def tap_copy(self, hidden: Tensor, point: int) -> Tensor:
        """See `op.Tap`."""
        del point
        return hidden.clone(memory_format=torch.contiguous_format)

    def tap_experts(self, *arguments: Any) -> None:
        """See `op.Tap`."""

    def tap_norm(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """See `op.Tap`. Never called, because no norm is folded."""
        raise NotImplementedError("taps that do nothing cannot compute norms; set fold_norms=False")


class NoopTaps:
    """Mixin for a tapped worker: replaces its taps before vLLM first runs and traces the model."""

    def load_model(self, **options: Any) -> None:
        """Load the model with taps as usual, then replace the taps with ones that do nothing."""
        super().load_model(**options)  # type: ignore[misc]
        op.install([NoopTap()])


def installed() -> AbstractContextManager[Any]:
    """Return a context: engines that start within it have workers with taps that do nothing."""
    return patch.dict(arguments._WORKERS, _WORKERS)  # noqa: SLF001 - a service never has such workers
