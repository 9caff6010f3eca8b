"""Taps that do nothing: the ops are in the graph and everything around them runs, but no row is looked at.

They need norms that are not folded, because a folded one is computed by its tap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from inference_svc.engine import arguments
from inference_svc.taps import op

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

_WORKERS = {kind: f"bench.capture.noop_{kind}_worker.NoopWorker" for kind in ("cpu", "cuda")}


class NoopTap:
    """Does nothing with rows."""

    def tap(self, hidden: Tensor, residual: Tensor | None, point: int) -> None:
        """See `op.Tap`."""

    def tap_norm(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """See `op.Tap`: no norm is folded."""
        raise NotImplementedError("taps that do nothing cannot stand in for norms; they need fold_norms=False")


class NoopTaps:
    """Mixed into a tapped worker: takes its taps out before vLLM first runs, and traces, the model."""

    def load_model(self, **options: Any) -> None:
        """Load and hook the model as ever, then let the ops do nothing."""
        super().load_model(**options)  # type: ignore[misc]
        op.install(NoopTap())


def installed() -> AbstractContextManager[Any]:
    """Let engines that start meanwhile have workers whose taps do nothing."""
    return patch.dict(arguments._WORKERS, _WORKERS)  # noqa: SLF001 - a service never has such workers
