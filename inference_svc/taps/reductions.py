"""Reductions: one row replaces many. capture.proto defines them.

The worker does not know which position is a request's last: the engine may compute a few more after an end token or a
stop string. So the worker keeps the rows of the last few positions, and at the end sends one reduced row for each of
them, as if it were the last. The row of the actual last position is among them; readers ignore the others. If the
engine ran even further, that row is missing and the capture is incomplete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from residuum.v1 import capture_pb2
from residuum.wire.selection import wanted_positions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from inference_svc.taps.plan import Capture, RequestPlan

REDUCTIONS = (
    capture_pb2.REDUCTION_NONE,
    capture_pb2.REDUCTION_LAST,
    capture_pb2.REDUCTION_MEAN,
    capture_pb2.REDUCTION_MAX,
    capture_pb2.REDUCTION_SUM,
)
"""The reductions that the taps support."""


class Batch(NamedTuple):
    """Rows of a capture that are ready to be encoded and sent."""

    capture: Capture
    positions: Sequence[int]
    rows: Tensor
    """[units, positions, width], in the model's dtype; computed rows are float32."""


class Reduction:
    """The two reductions of one sequence: one over its prompt, one over its generated tokens."""

    def __init__(self, plan: RequestPlan) -> None:
        """Start without rows."""
        assert plan.capture is not None  # noqa: S101 - made only for captures
        self._capture = plan.capture
        self._prompt_tokens = plan.prompt_tokens
        wanted = wanted_positions(plan.capture.positions, plan.prompt_tokens, 0, plan.prompt_tokens)
        self._last_of_prompt = int(np.flatnonzero(wanted).max(initial=-1))
        self._prompt = _Running(plan.capture.reduction, keep=1)
        self._generated = _Running(plan.capture.reduction, keep=plan.capture.spare_positions + 1)

    def add(self, batch: Batch) -> Batch | None:
        """Add the rows of a block, and return the prompt's row if the prompt is complete now.

        All rows of a block belong to the prompt, or all are generated. On a GPU, the work is only enqueued here: the
        rows may be overwritten once the current stream has done it.
        """
        if batch.positions[0] >= self._prompt_tokens:
            self._generated.add(batch.positions, batch.rows)
            return None
        self._prompt.add(batch.positions, batch.rows)
        if batch.positions[-1] != self._last_of_prompt:
            return None
        return Batch(self._capture, *self._prompt.take())

    def miss(self, positions: Sequence[int]) -> None:
        """Note that the rows of these positions will never arrive, so reductions over them are incomplete."""
        self._prompt.is_whole &= min(positions) >= self._prompt_tokens
        self._generated.is_whole &= max(positions) < self._prompt_tokens

    def is_whole(self, batch: Batch) -> bool:
        """Return whether all rows that a reduced batch includes have arrived."""
        return (self._generated if batch.positions[0] >= self._prompt_tokens else self._prompt).is_whole

    @property
    def pending(self) -> Sequence[int]:
        """The generated positions whose reduced rows `finish` returns."""
        return self._generated.positions

    def finish(self) -> Batch | None:
        """Return the reduced rows of the last generated positions; None if no generated row arrived."""
        return Batch(self._capture, *self._generated.take()) if self._generated.positions else None


class _Running:
    """A running reduction: it folds all rows but the last `keep` into one row."""

    def __init__(self, reduction: capture_pb2.Reduction.ValueType, keep: int) -> None:
        self._reduction = reduction
        self._keep = keep
        self._total: Tensor | None = None  # of the folded rows, float32 [units, 1, width]
        self._folded = 0
        self._rows: Tensor | None = None  # [units, positions, width]
        self.positions: list[int] = []
        """The positions of the last rows, which are not folded."""
        self.is_whole = True
        """Whether every row has arrived."""

    def add(self, positions: Sequence[int], rows: Tensor) -> None:
        old = rows[:, :0] if self._rows is None else self._rows
        excess = max(len(self.positions) + len(positions) - self._keep, 0)
        of_old = min(excess, len(self.positions))
        self._fold(old[:, :of_old])
        self._fold(rows[:, : excess - of_old])
        self._rows = torch.cat([old[:, of_old:], rows[:, excess - of_old :]], dim=1)
        self.positions = [*self.positions, *positions][excess:]

    def take(self) -> tuple[list[int], Tensor]:
        """Return the kept positions, and the reduction up to each of them, [units, positions, width]."""
        assert self._rows is not None  # noqa: S101 - called only after `add`
        rows = self._rows
        if self._reduction == capture_pb2.REDUCTION_LAST:
            return self.positions, rows
        running = rows.float()
        if self._reduction == capture_pb2.REDUCTION_MAX:
            running = running.cummax(dim=1).values
        else:
            running = running.cumsum(dim=1)
        running = self._joined(running)
        if self._reduction == capture_pb2.REDUCTION_MEAN:
            counts = torch.arange(1, len(self.positions) + 1, device=rows.device) + self._folded
            running = running / counts[:, None]
        return self.positions, running

    def _fold(self, rows: Tensor) -> None:
        if not rows.shape[1] or self._reduction == capture_pb2.REDUCTION_LAST:
            return
        self._folded += rows.shape[1]
        if self._reduction == capture_pb2.REDUCTION_MAX:
            self._total = self._joined(rows.amax(dim=1, keepdim=True).float())
        else:
            self._total = self._joined(rows.sum(dim=1, keepdim=True, dtype=torch.float32))

    def _joined(self, rows: Tensor) -> Tensor:
        if self._total is None:
            return rows
        return torch.maximum(self._total, rows) if self._reduction == capture_pb2.REDUCTION_MAX else self._total + rows
