"""The custom op that sits in the compiled graph: one call a layer, whose arguments never change.

It is registered with `mutates_args=["hidden"]`, so the compiler neither drops nor reorders it, and everything that
differs from step to step is data behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

_LIBRARY = torch.library.Library("residuum", "FRAGMENT")
_LIBRARY.define("tap(Tensor(a!) hidden, Tensor? residual, int layer) -> ()")


class Tap(Protocol):
    """What is done with a layer's output."""

    def tap(self, hidden: Tensor, residual: Tensor | None, layer: int) -> None:
        """Steer and capture the rows of `hidden` + `residual` ([rows, hidden]) after a layer, in place."""


class _Current:
    """The tap of this process. There is one model in a worker process, and so one tap."""

    tap: Tap | None = None


def install(tap: Tap) -> None:
    """Make `tap` what the op calls, in this process."""
    _Current.tap = tap


def call(hidden: Tensor, residual: Tensor | None, layer: int) -> None:
    """Call the op; traced into the graph."""
    torch.ops.residuum.tap(hidden, residual, layer)


def _run(hidden: Tensor, residual: Tensor | None, layer: int) -> None:
    if _Current.tap is not None:
        _Current.tap.tap(hidden, residual, layer)


def _fake(hidden: Tensor, residual: Tensor | None, layer: int) -> None:
    del hidden, residual, layer


_LIBRARY.impl("tap", _run, "CPU")
_LIBRARY.impl("tap", _run, "CUDA")
_LIBRARY._register_fake("tap", _fake)  # noqa: SLF001 - the documented way for a Library object
