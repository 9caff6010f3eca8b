"""The tap on a CPU: what the op does to one layer's rows, in torch."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from inference_svc.taps.layout import NOWHERE
from inference_svc.taps.operations import OperationBatch, apply_batch
from residuum.wire.limits import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import BlockPool
    from inference_svc.taps.layout import ProgramRows, StepLayout
    from inference_svc.taps.programs import Step


class CaptureGroup(NamedTuple):
    """Rows that are captured on the same layers, and where they go."""

    layers: frozenset[int]
    before_steering: bool
    rows: Tensor
    """Rows of the batch, int64 [r]."""
    blocks: Tensor
    """The block of each, int64 [r]."""
    offsets: Tensor
    """The row of the block that takes each, int64 [r]."""


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
        self._captures: list[CaptureGroup] = []
        self._steering: dict[int, list[OperationBatch]] = {}

    def arm(self, layout: StepLayout) -> None:
        """Take over what the next run of the model does."""
        self._captures = _capture_groups(layout.parts)
        self._steering = _operation_batches(layout.parts)

    def disarm(self) -> None:
        """Let the next runs of the model pass through."""
        self._captures = []
        self._steering = {}

    def tap(self, hidden: Tensor, residual: Tensor | None, layer: int) -> None:
        """Steer and capture after a layer; `hidden` and `residual` are [rows, hidden]."""
        for group in self._captures:
            if group.before_steering and layer in group.layers:
                self._store(group, hidden, residual, layer)
        if layer in self._steering:
            self._steer(self._steering[layer], hidden, residual)
        for group in self._captures:
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


def _capture_groups(parts: list[ProgramRows]) -> list[CaptureGroup]:
    same: dict[tuple[tuple[int, ...], bool], list[ProgramRows]] = defaultdict(list)
    for part in parts:
        if part.program.capture_layers and part.places[0] != NOWHERE:
            same[part.program.capture_layers, part.program.before_steering].append(part)
    groups = []
    for (layers, before_steering), captured in same.items():
        places = torch.from_numpy(np.concatenate([part.places for part in captured]))
        groups.append(
            CaptureGroup(
                layers=frozenset(layers),
                before_steering=before_steering,
                rows=torch.from_numpy(np.concatenate([part.rows for part in captured])),
                blocks=places // BLOCK_TOKENS,
                offsets=places % BLOCK_TOKENS,
            )
        )
    return groups


def _operation_batches(parts: list[ProgramRows]) -> dict[int, list[OperationBatch]]:
    """Return for each layer its batches, in the order in which they are applied.

    The i-th operation of each program on a layer goes into that layer's i-th batch: so a program's own operations keep
    their order, and one batch serves all requests.
    """
    batches: dict[int, list[list[tuple[npt.NDArray[np.int64], Step]]]] = defaultdict(list)
    for part in parts:
        depth: dict[int, int] = defaultdict(int)
        for step in part.program.steps:
            for layer in step.layers:
                if depth[layer] == len(batches[layer]):
                    batches[layer].append([])
                batches[layer][depth[layer]].append((part.rows, step))
                depth[layer] += 1
    return {layer: [_to_batch(steps) for steps in found] for layer, found in batches.items()}


def _to_batch(parts: list[tuple[npt.NDArray[np.int64], Step]]) -> OperationBatch:
    counts = [len(rows) for rows, _ in parts]

    def spread(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(np.repeat(values, counts), dtype=dtype)

    steps = [step for _, step in parts]
    return OperationBatch(
        rows=torch.from_numpy(np.concatenate([rows for rows, _ in parts])),
        vectors=spread([step.row for step in steps], torch.int64),
        kinds=spread([step.kind for step in steps], torch.int64),
        scales=spread([step.scale for step in steps], torch.float32),
        lows=spread([step.low for step in steps], torch.float32),
        highs=spread([step.high for step in steps], torch.float32),
    )
