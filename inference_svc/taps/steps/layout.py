"""Laying out a step: what is done to which row of the batch, and which place of which block takes it.

A layout says so in numpy, whatever the device; a tap's `arm` turns it into what its device reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from inference_svc.taps.steps.programs import Program
from residuum.v1 import selection_pb2
from residuum.wire.limits import BLOCK_TOKENS
from residuum.wire.selection import wanted_positions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.plan import Capture, Operation, RequestPlan

NOWHERE = -1
"""The place of a row that is not captured."""


@dataclass(frozen=True)
class StepRows:
    """Which rows of a step's batch belong to which request; what every runner adapter says in the same words.

    Request i has the next `counts[i]` rows of the batch, for the positions from `firsts[i]` on. Rows after the last
    request's are padding.
    """

    request_ids: Sequence[str]
    firsts: Sequence[int] | npt.NDArray[np.integer]
    counts: Sequence[int] | npt.NDArray[np.integer]


class Steering:
    """A request's operations, and what follows from them for its positions."""

    def __init__(self, plan: RequestPlan) -> None:
        """Take the operations of `plan`, and what it captures."""
        self.plan = plan

    @cached_property
    def prefill(self) -> Treatment | None:
        """What is done to every position of the prompt; None if it is not the same for all of them."""
        return _treatment(self.plan, selection_pb2.PHASE_PROMPT)

    @cached_property
    def decode(self) -> Treatment | None:
        """What is done to every generated position; None if it is not the same for all of them."""
        return _treatment(self.plan, selection_pb2.PHASE_GENERATED)


class RequestState:
    """A request that the taps work for."""

    def __init__(self, plan: RequestPlan, first_generated: int = BLOCK_TOKENS) -> None:
        """Begin with a plan; see the attributes."""
        self.plan = plan
        """What was asked for; of the operations, those of the start."""
        self.next_position = 0
        """The first position that has not been computed yet. A preempted request is computed again from position 0;
        the first write of a position wins."""
        self.block: Block | None = None
        """The block that is being filled."""
        self.first_generated = first_generated
        """Positions that the first block of generated tokens holds. Requests that begin together would fill all their
        blocks in the same steps; with first blocks of different sizes, the blocks that leave are spread over the
        steps."""
        self.steering = Steering(plan)
        """The operations from `steered_from` on."""
        self.steered_from = 0
        self._before: list[tuple[int, Steering]] = []  # (first position, operations), ascending

    def change_steering(self, operations: tuple[Operation, ...]) -> int:
        """Take other operations for every position that has not been computed, and return the first of these.

        A position that is computed again, after a preemption, is steered as it was the first time: other rows have
        been computed from it.
        """
        if self.next_position > self.steered_from:
            self._before.append((self.steered_from, self.steering))
            self.steered_from = self.next_position
        self.steering = Steering(replace(self.plan, operations=operations))
        return self.steered_from

    def generates_next(self, position: int) -> bool:
        """Tell whether a position is the next one, is generated, and all that are generated now are treated alike."""
        return (
            position == self.next_position
            and position >= self.plan.prompt_tokens
            and position >= self.steered_from
            and self.steering.decode is not None
        )

    def open_block(self, pool: BlockPool, position: int, positions: int) -> Block:
        """Return the block that takes a position, the first of some that are at hand."""
        if self.block is None:
            assert self.plan.capture is not None  # noqa: S101 - asked only for requests that capture
            least = BLOCK_TOKENS
            if position >= self.plan.prompt_tokens:
                least, self.first_generated = self.first_generated, BLOCK_TOKENS
            self.block = pool.take(self.plan.capture, positions, least)
        return self.block

    def divide(self, first: int, count: int) -> Iterator[tuple[Steering, int, int]]:
        """Yield runs of positions that have the same operations, in order: (operations, first position, how many)."""
        borders = [*self._before, (self.steered_from, self.steering)]
        stop = first + count
        for index, (start, steering) in enumerate(borders):
            end = borders[index + 1][0] if index + 1 < len(borders) else stop
            here, there = max(start, first), min(end, stop)
            if there > here:
                yield steering, here, there - here


class Treatment(NamedTuple):
    """What is done to every position of one phase of a request."""

    program: Program | None
    """None: nothing."""
    captured: bool


ROW, PROGRAM, PLACE, STRIDE = range(4)
"""The columns of `StepLayout.lines`."""


@dataclass
class StepLayout:
    """What the taps do in one step."""

    programs: list[Program] = field(default_factory=list)
    """The programs of the step's rows, each once."""
    lines: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 4), dtype=np.int64))
    """A line for each row that has a program, in any order: the row of the batch; the index of its program; the pool's
    row that takes its first unit, or NOWHERE if it is not captured; and how far it is from there to the next unit's:
    the capacity of the block."""
    repeats: bool = False
    """Whether all of this is as in the step before: then the device has it already."""
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
        self._layout = StepLayout()
        self._programs: dict[Program, int] = {}
        self._singles: list[int] = []  # lines, one after the other: one array is made of them in the end
        self._many: list[npt.NDArray[np.int64]] = []

    def add_request(self, state: RequestState, row: int, first: int, count: int) -> None:
        """Lay out `count` rows of a request, from `row` of the batch and position `first` on."""
        if first >= state.steered_from:
            self._add(state, state.steering, row, first, count)
            return
        for steering, position, length in state.divide(first, count):
            self._add(state, steering, row + position - first, position, length)

    def _add(self, state: RequestState, steering: Steering, row: int, first: int, count: int) -> None:
        # Nearly every request of nearly every step generates one token: it must not cost numpy calls. Of the others,
        # most compute a part of a prompt that is treated as one.
        prompt_tokens = state.plan.prompt_tokens
        if first != state.next_position:
            self._add_many(state, steering.plan, row, first, count)
        elif count == 1 and first >= prompt_tokens and steering.decode:
            self._add_single(state, steering.decode, row, first)
        elif first + count <= prompt_tokens and steering.prefill:
            self._add_run(state, steering.prefill, row, first, count)
        else:
            self._add_many(state, steering.plan, row, first, count)

    def finish(self) -> StepLayout:
        """Return the layout."""
        self._layout.programs = list(self._programs)
        singles = np.array(self._singles, dtype=np.int64).reshape(-1, 4)
        self._layout.lines = np.concatenate([singles, *self._many]) if self._many else singles
        return self._layout

    def _add_single(self, state: RequestState, decode: Treatment, row: int, position: int) -> None:
        state.next_position = position + 1
        if decode.program is None:
            return
        place, stride = NOWHERE, 0
        if decode.captured and self._pool is not None:
            block = state.open_block(self._pool, position, 1)
            place, stride = block.first_row + len(block.positions), block.capacity
            block.positions.append(position)
            if not block.free:
                self._close(state)
        self._singles += (row, self._index(decode.program), place, stride)

    def _add_run(self, state: RequestState, prefill: Treatment, row: int, first: int, count: int) -> None:
        state.next_position = first + count
        if prefill.captured and self._pool is not None:
            at = 0
            while at < count:
                block = state.open_block(self._pool, first + at, count - at)
                size = min(block.free, count - at)
                place = block.first_row + len(block.positions)
                self._add_lines(prefill.program, np.arange(row + at, row + at + size), place, block.capacity)
                block.positions.extend(range(first + at, first + at + size))
                at += size
                if not block.free:
                    self._close(state)
            if state.next_position == state.plan.prompt_tokens:
                self._close(state)  # the prompt's rows need not wait for generated ones
        elif prefill.program is not None:
            self._add_lines(prefill.program, np.arange(row, row + count), NOWHERE, 0)

    def _add_lines(self, program: Program | None, rows: npt.NDArray[np.int64], place: int, stride: int) -> None:
        """Add lines of rows that have one program; they are captured one after the other from `place` on."""
        assert program is not None  # noqa: S101 - what is captured has a program
        lines = np.empty((len(rows), 4), dtype=np.int64)
        lines[:, ROW] = rows
        lines[:, PROGRAM] = self._index(program)
        lines[:, PLACE] = NOWHERE if place == NOWHERE else np.arange(place, place + len(rows))
        lines[:, STRIDE] = stride
        self._many.append(lines)

    def _add_many(self, state: RequestState, plan: RequestPlan, row: int, first: int, count: int) -> None:
        applied = [wanted_positions(item.positions, plan.prompt_tokens, first, count) for item in plan.operations]
        places, strides = self._capture(state, first, count)
        masks = np.array([*applied, places != NOWHERE])  # [operations + 1, rows]
        combinations, which = np.unique(masks, axis=1, return_inverse=True)
        for index, combination in enumerate(combinations.T):
            program = Program.for_rows(plan, np.flatnonzero(combination[:-1]).tolist(), captured=bool(combination[-1]))
            if program is not None:
                chosen = np.flatnonzero(which.reshape(-1) == index)
                numbers = np.full(len(chosen), self._index(program))
                self._many.append(np.stack([row + chosen, numbers, places[chosen], strides[chosen]], axis=1))

    def _index(self, program: Program) -> int:
        return self._programs.setdefault(program, len(self._programs))

    def _capture(self, state: RequestState, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the place and the stride of each row, [2, count]; opens and closes blocks on the way."""
        places = np.full((2, count), NOWHERE, dtype=np.int64)
        known, stop = state.next_position, first + count
        state.next_position = max(known, stop)
        capture, pool, prompt_tokens = state.plan.capture, self._pool, state.plan.prompt_tokens
        if capture is None or pool is None:
            return places
        if first > known:
            missed = wanted_positions(capture.positions, prompt_tokens, known, first - known)
            self._layout.skipped.append((capture, (known + np.flatnonzero(missed)).tolist()))
        start = max(first, known)
        wanted = wanted_positions(capture.positions, prompt_tokens, start, max(stop - start, 0))
        positions = start + np.flatnonzero(wanted)
        border = int(np.searchsorted(positions, prompt_tokens))
        self._fill(state, pool, positions[:border], places, first)
        if known < prompt_tokens <= stop:
            self._close(state)  # the prompt's rows need not wait for generated ones
        self._fill(state, pool, positions[border:], places, first)
        return places

    def _fill(
        self,
        state: RequestState,
        pool: BlockPool,
        positions: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        first: int,
    ) -> None:
        at = 0
        while at < len(positions):
            block = state.open_block(pool, int(positions[at]), len(positions) - at)
            part = positions[at : at + block.free]
            start = block.first_row + len(block.positions)
            places[0, part - first] = np.arange(start, start + len(part))
            places[1, part - first] = block.capacity
            block.positions.extend(part.tolist())
            at += len(part)
            if not block.free:
                self._close(state)

    def _close(self, state: RequestState) -> None:
        if state.block is not None:
            self._layout.full_blocks.append(state.block)
            state.block = None


def _treatment(plan: RequestPlan, phase: selection_pb2.Phase.ValueType) -> Treatment | None:
    selections = [item.positions for item in plan.operations]
    if plan.capture:
        selections.append(plan.capture.positions)
    if any(selection.ranges or selection.every > 1 for selection in selections):
        return None
    applied = [index for index, item in enumerate(plan.operations) if _in_phase(item.positions, phase)]
    captured = plan.capture is not None and _in_phase(plan.capture.positions, phase)
    return Treatment(Program.for_rows(plan, applied, captured=captured), captured)


def _in_phase(selection: selection_pb2.PositionSelection, phase: selection_pb2.Phase.ValueType) -> bool:
    return not selection.phases or phase in selection.phases
