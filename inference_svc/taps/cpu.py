"""The tap on a CPU: what the op does to one layer's rows, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inference_svc.taps.operations import apply_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        if layer in layout.steering:
            self._steer(layout.steering[layer], hidden, residual)
        for group in layout.captures:
            if not group.before_steering and layer in group.layers:
                self._store(group, hidden, residual, layer)

    def _steer(self, batches: Sequence[OperationBatch], hidden: Tensor, residual: Tensor | None) -> None:
        # Rounded to the model's dtype once, after the last operation. Only the difference is written back: a row that
        # no operation moves stays as it is to the bit, which hidden + residual - residual would not.
        rows = torch.cat([batch.rows for batch in batches]).unique()  # sorted
        before = hidden[rows].float()
        x = before if residual is None else before + residual[rows].float()
        steered = x.clone()
        for batch in batches:
            at = torch.searchsorted(rows, batch.rows)
            vectors = self._bank.vectors[batch.vectors]
            inverse_norms = self._bank.inverse_norms[batch.vectors]
            steered[at] = apply_batch(steered[at], vectors, inverse_norms, batch)
        hidden[rows] = (before + (steered - x)).to(hidden.dtype)

    def _store(self, group: CaptureGroup, hidden: Tensor, residual: Tensor | None, layer: int) -> None:
        assert self._pool is not None  # noqa: S101 - a rank without a pool lays out no captures
        rows = hidden[group.rows]
        if residual is not None:
            rows = rows + residual[group.rows]  # rounded to the model's dtype, as the next layer's norm does
        self._pool.memory[:, layer - self._first_layer][group.blocks, group.offsets] = rows
