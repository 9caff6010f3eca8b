"""The tap on a CPU: it steers and captures the rows at one point, in torch."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from inference_svc.taps.op import expert_rows
from inference_svc.taps.operations import GateBatch, OperationBatch, apply_batch, bounded, openness, reach, written
from inference_svc.taps.plan import Kind
from inference_svc.taps.steps.layout import PLACE, PROGRAM, ROW, STRIDE

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import BlockPool
    from inference_svc.taps.plan import Gate
    from inference_svc.taps.points import TapPoints
    from inference_svc.taps.steps.layout import StepLayout
    from inference_svc.taps.steps.programs import Program, Step


class CaptureGroup(NamedTuple):
    """Rows that are captured at the same sites of the same layers, and their places in the pool."""

    before_steering: bool
    units: tuple[tuple[int, ...], ...]
    """For each point, the units of a captured position that the point fills."""
    rows: Tensor
    """Rows of the batch, int64 [r]."""
    places: Tensor
    """The pool row for the first unit of each row, int64 [r]."""
    strides: Tensor
    """The distance from one unit to the next, in pool rows, int64 [r]."""


class CpuTap:
    """Steers and captures rows in place. Until it is armed, it does nothing: profile and warm-up runs are unchanged."""

    nbytes = 0
    """Bytes of tables on the device: a CPU needs none."""

    def __init__(
        self, bank: VectorBank, pool: BlockPool | None, points: TapPoints, scores: Tensor | None = None
    ) -> None:
        """Make the tap of one pipeline stage.

        Args:
            bank: The active vectors.
            pool: The pool for captured rows; None on a rank that only steers.
            points: The stage's tap points.
            scores: Receives the scores of rows, float32 [rows, MAX_PROBE_OUTPUTS]; None if no row is scored.
        """
        self._scores = scores
        self._bank = bank
        self._pool = pool
        self._points = points
        self._captures: list[CaptureGroup] = []
        self._steering: dict[int, list[OperationBatch]] = {}

    def arm(self, layout: StepLayout) -> None:
        """See `DeviceTap.arm`."""
        parts = _parts(layout)
        self._captures = _capture_groups(parts, self._points)
        self._steering = _operation_batches(parts, self._points)

    def disarm(self) -> None:
        """See `DeviceTap.disarm`."""
        self._captures = []
        self._steering = {}

    def tap(self, hidden: Tensor, residual: Tensor | None, point: int) -> None:
        """See `op.Tap.tap`."""
        self._capture(hidden, residual, point, before_steering=True)
        if point in self._steering:
            self._steer(self._steering[point], hidden, residual)
        self._capture(hidden, residual, point, before_steering=False)

    def tap_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float, point: int, *, plus_one: bool
    ) -> tuple[Tensor, Tensor]:
        """See `op.Tap.tap_norm`."""
        steered = hidden.clone()
        self.tap(steered, residual, point)
        x = steered.float() + residual.float()
        y = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon)
        scaled = y * (weight.float() + (1.0 if plus_one else 0.0))
        return scaled.to(hidden.dtype), x.to(hidden.dtype)

    def tap_copy(self, hidden: Tensor, point: int) -> Tensor:
        """See `op.Tap.tap_copy`."""
        self.tap(hidden, None, point)
        return hidden.clone(memory_format=torch.contiguous_format)

    def tap_experts(self, weights: Tensor, experts: Tensor, num_experts: int, scale: float, point: int) -> None:
        """See `op.Tap.tap_experts`."""
        if any(group.units[point] for group in self._captures):
            self.tap(expert_rows(weights, experts, num_experts, scale), None, point)

    def _capture(self, hidden: Tensor, residual: Tensor | None, point: int, *, before_steering: bool) -> None:
        for group in self._captures:
            if group.before_steering == before_steering:
                for unit in group.units[point]:
                    self._store(group, hidden, residual, unit)

    def _steer(self, batches: Sequence[OperationBatch], hidden: Tensor, residual: Tensor | None) -> None:
        # Values are rounded to the model's dtype once, after the last operation. With a residual, only the difference
        # is written back. Elements that no operation moves are not written, so they keep their bits: neither hidden +
        # residual - residual nor -0.0 + 0.0 would.
        rows = torch.cat([batch.rows for batch in batches]).unique()  # sorted
        before = hidden[rows].float()
        x = before if residual is None else before + residual[rows].float()
        steered = x.clone()
        for batch in batches:
            indices = torch.searchsorted(rows, batch.rows)
            vectors = self._bank.vectors[batch.vectors]
            inverse_norms = self._bank.inverse_norms[batch.vectors]
            x_now = steered[indices]
            self._score(x_now, vectors, batch)
            opened = self._openness(x_now, batch.gates) if batch.gates else None
            steered[indices] = apply_batch(x_now, vectors, inverse_norms, batch, opened)
        steered = bounded(steered, x, reach(hidden.dtype))
        moved = steered if residual is None else written(before + (steered - x), hidden.dtype)
        hidden[rows] = torch.where(steered == x, before, moved).to(hidden.dtype)

    def _score(self, x: Tensor, vectors: Tensor, batch: OperationBatch) -> None:
        if self._scores is not None and batch.columns is not None:
            chosen = batch.kinds == Kind.SCORE
            self._scores[batch.rows[chosen], batch.columns[chosen]] = (x[chosen] * vectors[chosen]).sum(dim=-1)

    def _openness(self, x: Tensor, gates: GateBatch) -> Tensor:
        return openness(x[gates.at], self._bank.vectors[gates.vectors], self._bank.inverse_norms[gates.vectors], gates)

    def _store(self, group: CaptureGroup, hidden: Tensor, residual: Tensor | None, unit: int) -> None:
        assert self._pool is not None  # noqa: S101 - a rank without a pool lays out no captures
        rows = hidden[group.rows]
        if residual is not None:
            rows = rows + residual[group.rows]  # rounded to the model's dtype, as the next layer's norm does
        # A router may compute in float32.
        self._pool.memory[group.places + unit * group.strides] = rows.to(self._pool.memory.dtype)


class _Part(NamedTuple):
    """A program and the layout lines of its rows."""

    program: Program
    lines: npt.NDArray[np.int64]


def _parts(layout: StepLayout) -> list[_Part]:
    return [
        _Part(program, layout.lines[layout.lines[:, PROGRAM] == index]) for index, program in enumerate(layout.programs)
    ]


@lru_cache(maxsize=256)
def _units(points: TapPoints, program: Program) -> tuple[tuple[int, ...], ...]:
    units = [[program.unit(site, layer) for site, layer in points.sites(point)] for point in range(points.count)]
    return tuple(tuple(unit for unit in at_point if unit is not None) for at_point in units)


def _capture_groups(parts: list[_Part], points: TapPoints) -> list[CaptureGroup]:
    by_capture: dict[tuple[object, ...], list[_Part]] = defaultdict(list)
    for part in parts:
        program = part.program
        if program.places:
            by_capture[program.places, program.before_steering].append(part)
    groups = []
    for captured in by_capture.values():
        lines = torch.from_numpy(np.concatenate([part.lines for part in captured]))
        program = captured[0].program  # all programs of the group capture the same
        places = (lines[:, ROW], lines[:, PLACE], lines[:, STRIDE])
        groups.append(CaptureGroup(program.before_steering, _units(points, program), *places))
    return groups


def _operation_batches(parts: list[_Part], points: TapPoints) -> dict[int, list[OperationBatch]]:
    """Return the batches of each point, in the order in which they are applied.

    The i-th operation of every program at a point goes into that point's i-th batch. So a program's operations keep
    their order, and a batch serves all requests.
    """
    batches: dict[int, list[list[tuple[npt.NDArray[np.int64], Step]]]] = defaultdict(list)
    for part in parts:
        depth: dict[int, int] = defaultdict(int)
        for step in part.program.steps:
            for layer in points.own(step.layers):
                point = points.of(step.site, layer)
                if depth[point] == len(batches[point]):
                    batches[point].append([])
                batches[point][depth[point]].append((part.lines[:, ROW], step))
                depth[point] += 1
    return {point: [_to_batch(steps) for steps in found] for point, found in batches.items()}


def _to_batch(parts: list[tuple[npt.NDArray[np.int64], Step]]) -> OperationBatch:
    steps, counts = [step for _, step in parts], [len(rows) for rows, _ in parts]
    return OperationBatch(
        rows=torch.from_numpy(np.concatenate([rows for rows, _ in parts])),
        vectors=_spread([step.row for step in steps], counts, torch.int64),
        kinds=_spread([step.kind for step in steps], counts, torch.int64),
        scales=_spread([step.scale for step in steps], counts, torch.float32),
        lows=_spread([step.low for step in steps], counts, torch.float32),
        highs=_spread([step.high for step in steps], counts, torch.float32),
        keeps_norm=_spread([step.keep_norm for step in steps], counts, torch.bool),
        gates=_to_gates([step.gate for step in steps], counts),
        columns=_to_columns(steps, counts),
    )


def _to_gates(of_parts: list[Gate | None], counts: list[int]) -> GateBatch | None:
    """Return the gates of a batch, given the gate of each part and its number of rows."""
    parts = zip(of_parts, np.cumsum(counts), counts, strict=True)
    gated = [(gate, np.arange(end - count, end)) for gate, end, count in parts if gate]
    if not gated:
        return None
    gates, lengths = [gate for gate, _ in gated], [len(at) for _, at in gated]
    return GateBatch(
        at=torch.from_numpy(np.concatenate([at for _, at in gated])),
        vectors=_spread([gate.row for gate in gates], lengths, torch.int64),
        measures=_spread([gate.measure for gate in gates], lengths, torch.int64),
        thresholds=_spread([gate.threshold for gate in gates], lengths, torch.float32),
        sharpness=_spread([gate.sharpness for gate in gates], lengths, torch.float32),
    )


def _to_columns(steps: list[Step], counts: list[int]) -> Tensor | None:
    """Return the columns of a batch's scores, given the step of each part and its number of rows."""
    if not any(step.kind == Kind.SCORE for step in steps):
        return None
    return _spread([step.column for step in steps], counts, torch.int64)


def _spread(values: list[float], counts: list[int], dtype: torch.dtype) -> Tensor:
    """Return a value for each row, given the value of each part and its number of rows."""
    return torch.tensor(np.repeat(values, counts), dtype=dtype)
