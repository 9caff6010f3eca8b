"""Laying out a step: which row of the batch goes into which block, and which vectors are applied to it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from inference_svc.taps.operations import OperationBatch
from residuum.wire.selection import wanted_positions

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.plan import Capture, Operation, RequestPlan


@dataclass(frozen=True)
class StepRows:
    """Which rows of a step's batch belong to which request; what every runner adapter says in the same words.

    Request i has the next `counts[i]` rows of the batch, for the positions from `firsts[i]` on. Rows after the last
    request's are padding.
    """

    request_ids: Sequence[str]
    firsts: Sequence[int]
    counts: Sequence[int]


@dataclass
class RequestState:
    """A request that the taps work for."""

    plan: RequestPlan
    next_position: int = 0
    """The first position that has not been captured. A preempted request is computed again from position 0; the first
    write of a position wins."""
    block: Block | None = None
    """The block that is being filled."""


class CaptureGroup:
    """Rows that are captured for the same layers, and where they go."""

    def __init__(self, layers: tuple[int, ...], *, before_steering: bool) -> None:
        self.layers = frozenset(layers)
        self.before_steering = before_steering
        self._rows: list[npt.NDArray[np.int64]] = []
        self._blocks: list[npt.NDArray[np.int64]] = []
        self._offsets: list[npt.NDArray[np.int64]] = []
        self.rows: Tensor
        self.blocks: Tensor
        self.offsets: Tensor

    def add(self, rows: npt.NDArray[np.int64], block: int, offset: int) -> None:
        """Send `rows` of the batch to a block, from a row of the block on."""
        self._rows.append(rows)
        self._blocks.append(np.full(len(rows), block, dtype=np.int64))
        self._offsets.append(np.arange(offset, offset + len(rows), dtype=np.int64))

    def freeze(self) -> None:
        """Make the index tensors, once all rows are known."""
        self.rows = torch.from_numpy(np.concatenate(self._rows))
        self.blocks = torch.from_numpy(np.concatenate(self._blocks))
        self.offsets = torch.from_numpy(np.concatenate(self._offsets))


@dataclass
class StepLayout:
    """What the taps do in one step."""

    captures: list[CaptureGroup] = field(default_factory=list)
    steering: dict[int, list[OperationBatch]] = field(default_factory=dict)
    """For each layer that is steered: the batches, in the order in which they are applied."""
    full_blocks: list[Block] = field(default_factory=list)
    """Blocks that are ready to leave when the step is done."""
    skipped: list[tuple[Capture, list[int]]] = field(default_factory=list)
    """Positions that were to be captured and that the engine did not compute: something read them from a cache in
    spite of `skip_reading_prefix_cache`. They are reported as lost; a capture is never silently partial."""


class StepPlanner:
    """Builds the layout of one step."""

    def __init__(self, pool: BlockPool | None) -> None:
        """Plan for a rank that captures into `pool`, or one that only steers."""
        self._pool = pool
        self._groups: dict[tuple[tuple[int, ...], bool], CaptureGroup] = {}
        self._slots: dict[tuple[int, int], list[tuple[npt.NDArray[np.int64], Operation]]] = defaultdict(list)
        self._layout = StepLayout()

    def add_request(self, state: RequestState, row: int, first: int, count: int) -> None:
        """Lay out `count` rows of a request, from `row` of the batch and position `first` on."""
        self._steer(state.plan, row, first, count)
        if state.plan.capture and self._pool:
            self._capture(state, self._pool, row, first, count)

    def finish(self) -> StepLayout:
        """Return the layout."""
        for group in self._groups.values():
            group.freeze()
        self._layout.captures = list(self._groups.values())
        for (layer, _), parts in sorted(self._slots.items(), key=lambda item: item[0]):
            self._layout.steering.setdefault(layer, []).append(_to_batch(parts))
        return self._layout

    def _steer(self, plan: RequestPlan, row: int, first: int, count: int) -> None:
        # The i-th operation of each request on a layer goes into that layer's i-th batch: so a request's own
        # operations keep their order, and one batch serves all requests.
        depth: dict[int, int] = defaultdict(int)
        for operation in plan.operations:
            wanted = wanted_positions(operation.positions, plan.prompt_tokens, first, count)
            rows = row + np.flatnonzero(wanted)
            if not len(rows):
                continue
            for layer in operation.layers:
                self._slots[layer, depth[layer]].append((rows, operation))
                depth[layer] += 1

    def _capture(self, state: RequestState, pool: BlockPool, row: int, first: int, count: int) -> None:
        capture = state.plan.capture
        assert capture is not None  # noqa: S101 - the caller asked only for requests that capture
        prompt_tokens = state.plan.prompt_tokens
        if first > state.next_position:
            skipped = state.next_position + np.flatnonzero(
                wanted_positions(capture.positions, prompt_tokens, state.next_position, first - state.next_position)
            )
            self._layout.skipped.append((capture, skipped.tolist()))
        known, stop = state.next_position, first + count
        start = max(first, known)
        state.next_position = max(known, stop)
        wanted = wanted_positions(capture.positions, prompt_tokens, start, max(stop - start, 0))
        positions = start + np.flatnonzero(wanted)
        border = int(np.searchsorted(positions, prompt_tokens))
        self._fill(state, pool, positions[:border], row - first)
        if known < prompt_tokens <= stop:
            self._close(state)  # the prompt's rows need not wait for generated ones
        self._fill(state, pool, positions[border:], row - first)

    def _fill(self, state: RequestState, pool: BlockPool, positions: npt.NDArray[np.int64], shift: int) -> None:
        capture = state.plan.capture
        assert capture is not None  # noqa: S101 - see _capture
        at = 0
        while at < len(positions):
            if state.block is None:
                state.block = pool.take(capture)
            block = state.block
            part = positions[at : at + block.free]
            self._group(capture).add(part + shift, block.index, len(block.positions))
            block.positions.extend(part.tolist())
            at += len(part)
            if not block.free:
                self._close(state)

    def _close(self, state: RequestState) -> None:
        if state.block is not None:
            self._layout.full_blocks.append(state.block)
            state.block = None

    def _group(self, capture: Capture) -> CaptureGroup:
        key = (capture.layers, capture.before_steering)
        if key not in self._groups:
            self._groups[key] = CaptureGroup(capture.layers, before_steering=capture.before_steering)
        return self._groups[key]


def _to_batch(parts: list[tuple[npt.NDArray[np.int64], Operation]]) -> OperationBatch:
    counts = [len(rows) for rows, _ in parts]

    def spread(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(np.repeat(values, counts), dtype=dtype)

    operations = [operation for _, operation in parts]
    return OperationBatch(
        rows=torch.from_numpy(np.concatenate([rows for rows, _ in parts])),
        vectors=spread([operation.row for operation in operations], torch.int64),
        kinds=spread([operation.kind for operation in operations], torch.int64),
        scales=spread([operation.scale for operation in operations], torch.float32),
        lows=spread([operation.low for operation in operations], torch.float32),
        highs=spread([operation.high for operation in operations], torch.float32),
    )
