"""The tap on a CPU: what the op does to one layer's rows, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference_svc.taps.operations import apply_batch

if TYPE_CHECKING:
    from torch import Tensor

    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import BlockPool
    from inference_svc.taps.layout import CaptureGroup, StepLayout
    from inference_svc.taps.operations import OperationBatch


class CpuTap:
    """Steers and captures rows in place. Does nothing between steps, so that profile and warm-up runs pass through."""

    def __init__(self, bank: VectorBank, pool: BlockPool | None, first_layer: int) -> None:
        """Make the tap.

        Args:
            bank: The vectors.
            pool: Where captured rows go; None on a rank that only steers.
            first_layer: The first layer of this pipeline stage, whose rows are layer 0 of a block.
        """
        self._bank = bank
        self._pool = pool
        self._first_layer = first_layer
        self.layout: StepLayout | None = None

    def tap(self, hidden: Tensor, residual: Tensor | None, layer: int) -> None:
        """Steer and capture after a layer; `hidden` and `residual` are [rows, hidden]."""
        layout = self.layout
        if layout is None:
            return
        for group in layout.captures:
            if group.before_steering and layer in group.layers:
                self._store(group, hidden, residual, layer)
        for batch in layout.steering.get(layer, ()):
            self._steer(batch, hidden, residual)
        for group in layout.captures:
            if not group.before_steering and layer in group.layers:
                self._store(group, hidden, residual, layer)

    def _steer(self, batch: OperationBatch, hidden: Tensor, residual: Tensor | None) -> None:
        delayed = residual[batch.rows].float() if residual is not None else 0.0
        x = hidden[batch.rows].float() + delayed
        vectors = self._bank.vectors[batch.vectors]
        steered = apply_batch(x, vectors, self._bank.inverse_norms[batch.vectors], batch)
        hidden[batch.rows] = (steered - delayed).to(hidden.dtype)

    def _store(self, group: CaptureGroup, hidden: Tensor, residual: Tensor | None, layer: int) -> None:
        assert self._pool is not None  # noqa: S101 - a rank without a pool lays out no captures
        rows = hidden[group.rows]
        if residual is not None:
            rows = rows + residual[group.rows]  # rounded to the model's dtype, as the next layer's norm does
        self._pool.memory[:, layer - self._first_layer][group.blocks, group.offsets] = rows
