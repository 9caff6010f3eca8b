"""The layout of a step: for each row of the batch, its program and its place in a block.

A layout is made of numpy arrays on every device. The tap's `arm` converts it for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from inference_svc.taps.plan import Kind
from inference_svc.taps.steps.programs import Program
from inference_svc.taps.steps.treatments import Steering
from residuum.wire.limits import BLOCK_TOKENS
from residuum.wire.selection import selects_any, wanted_positions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.plan import Capture, Operation, RequestPlan
    from inference_svc.taps.steps.treatments import Treatment

NOWHERE = -1
"""The place of a row that is not captured."""


class StepRows(NamedTuple):
    """Which rows of a step's batch belong to which request. Every runner adapter returns this.

    Request i has the next `counts[i]` rows of the batch, for the positions from `firsts[i]` on. Rows after those of the
    last request are padding.
    """

    request_ids: Sequence[str]
    firsts: Sequence[int] | npt.NDArray[np.integer]
    """The first position of each request in this step."""
    counts: Sequence[int] | npt.NDArray[np.integer]
    """How many rows each request has in this step."""


class RequestState:
    """The state of a request that the taps capture or steer."""

    def __init__(self, plan: RequestPlan, first_generated: int = BLOCK_TOKENS) -> None:
        """Start before the first position; see the attributes."""
        self.plan = plan
        """The plan of the request. Its operations are those at the start; `steering` has the current ones."""
        self.next_position = 0
        """The first position that has not been computed yet. A preempted request is computed again from position 0, but
        each position is captured only the first time."""
        self.block: Block | None = None
        """The block that is being filled."""
        self.first_generated = first_generated
        """Capacity of the first block for generated tokens. Requests that start together would fill their blocks in the
        same steps. First blocks of different capacities spread the leaving blocks over several steps."""
        self.steering = Steering.of(plan)
        """The operations from position `steered_from` on."""
        self.steered_from = 0
        self._earlier: list[tuple[int, Steering]] = []  # (first position, operations), ascending

    def change_steering(self, operations: tuple[Operation, ...]) -> int:
        """Replace the operations for all positions that have not been computed, and return the first of these.

        Those that score rows stay.

        A position that is computed again after a preemption keeps its old operations: later rows were computed from its
        old values.
        """
        if self.next_position > self.steered_from:
            self._earlier.append((self.steered_from, self.steering))
            self.steered_from = self.next_position
        scoring = tuple(operation for operation in self.plan.operations if operation.kind == Kind.SCORE)
        self.steering = Steering(replace(self.plan, operations=operations + scoring))
        return self.steered_from

    def generates_next(self, position: int) -> bool:
        """Return whether `position` is the next one and generated, and has one treatment with all that follow."""
        return (
            position == self.next_position
            and position >= self.steering.decode_from
            and position >= self.steered_from
            and self.steering.decode is not None
        )

    def open_block(self, pool: BlockPool, position: int, positions: int) -> Block:
        """Return the block for a position, and allocate it if there is none.

        Args:
            pool: The pool of blocks.
            position: The position.
            positions: How many positions from this one on the step captures.
        """
        if self.block is None:
            assert self.plan.capture is not None  # noqa: S101 - called only for requests that capture
            min_capacity, limit = BLOCK_TOKENS, None
            if position >= self.plan.prompt_tokens:
                min_capacity, self.first_generated = self.first_generated, BLOCK_TOKENS
                limit = self.plan.capture.flush_interval
            self.block = pool.take(self.plan.capture, positions, min_capacity, limit)
            self.block.may_gather = limit == BLOCK_TOKENS
        return self.block

    def divide(self, first: int, count: int) -> Iterator[tuple[Steering, int, int]]:
        """Divide positions into runs with the same operations. Yields (operations, first position, length) in order."""
        borders = [*self._earlier, (self.steered_from, self.steering)]
        stop = first + count
        for index, (start, steering) in enumerate(borders):
            end = borders[index + 1][0] if index + 1 < len(borders) else stop
            run_start, run_stop = max(start, first), min(end, stop)
            if run_stop > run_start:
                yield steering, run_start, run_stop - run_start


ROW, PROGRAM, PLACE, STRIDE = range(4)
"""The columns of `StepLayout.lines`."""


@dataclass
class StepLayout:
    """The work of the taps in one step."""

    programs: list[Program] = field(default_factory=list)
    """The programs of the step's rows, each once."""
    lines: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 4), dtype=np.int64))
    """A line for each row that has a program, in any order, int64 [lines, 4]. ROW is the row of the batch, PROGRAM the
    index of its program. PLACE is the pool row for its first unit, or NOWHERE if the row is not captured. STRIDE is the
    distance from one unit to the next in pool rows: the capacity of the block."""
    moves: bool = True
    """Whether the places in `lines` are new. A steady batch that captures nothing has the same lines in each step."""
    full_blocks: list[Block] = field(default_factory=list)
    """Blocks to send when the step is done."""
    skipped: list[tuple[Capture, list[int]]] = field(default_factory=list)
    """Positions that should be captured but that the engine did not compute, because it read them from a cache in spite
    of `skip_reading_prefix_cache`. They are reported as lost, so that no capture is silently incomplete."""

    def repeats(self, other: StepLayout) -> bool:
        """Return whether another layout has the same programs and lines: a steady batch keeps its two objects."""
        return not self.moves and self.lines is other.lines


class StepPlanner:
    """Builds the layout of one step, for any mix of requests."""

    def __init__(self, pool: BlockPool | None) -> None:
        """Plan for a rank that captures into `pool`; None: for a rank that only steers."""
        self._pool = pool
        self._layout = StepLayout()
        self._programs: dict[Program, int] = {}
        self._singles: list[int] = []  # flat lines; `finish` makes one array of all of them
        self._many: list[npt.NDArray[np.int64]] = []

    def add_request(self, state: RequestState, row: int, first: int, count: int) -> None:
        """Add `count` rows of a request, from row `row` of the batch and position `first` on."""
        if first >= state.steered_from:
            self._add(state, state.steering, row, first, count)
            return
        for steering, position, length in state.divide(first, count):
            self._add(state, steering, row + position - first, position, length)

    def _add(self, state: RequestState, steering: Steering, row: int, first: int, count: int) -> None:
        # Most requests of most steps generate one token: _add_single makes no numpy call. Most others compute a part of
        # a prompt with a few stretches of one treatment: _add_run.
        if first > state.next_position:
            self._skip(state, first)
        stretches = None
        if first == state.next_position:
            if count == 1 and first >= steering.decode_from and steering.decode:
                self._add_single(state, steering.decode, row, first)
                return
            if first + count <= state.plan.prompt_tokens:
                stretches = steering.stretches(first, count)
        if stretches is None:
            self._add_many(state, steering.plan, row, first, count)
            return
        left = sum(length for treatment, _, length in stretches if treatment.captured)
        for treatment, start, length in stretches:
            self._add_run(state, treatment, row + start - first, start, length, left)
            left -= length if treatment.captured else 0

    def finish(self) -> StepLayout:
        """Return the layout."""
        self._layout.programs = list(self._programs)
        singles = np.array(self._singles, dtype=np.int64).reshape(-1, 4)
        self._layout.lines = np.concatenate([singles, *self._many]) if self._many else singles
        return self._layout

    def _skip(self, state: RequestState, first: int) -> None:
        """Note that the engine computes a request from a later position on: it has read those before from a cache."""
        known, state.next_position = state.next_position, first
        capture, prompt_tokens = state.plan.capture, state.plan.prompt_tokens
        if capture is None or self._pool is None:
            return
        if selects_any(capture.positions, prompt_tokens, known, first - known):
            missed = wanted_positions(capture.positions, prompt_tokens, known, first - known)
            self._layout.skipped.append((capture, (known + np.flatnonzero(missed)).tolist()))
        if known < prompt_tokens <= first:
            self._close(state)  # rows of the prompt must not wait for generated rows

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

    def _add_run(self, state: RequestState, treatment: Treatment, row: int, first: int, count: int, left: int) -> None:
        """Add rows of one treatment. `left` is how many positions the step captures of the request from here on."""
        state.next_position = first + count
        if treatment.captured and self._pool is not None:
            at = 0
            while at < count:
                block = state.open_block(self._pool, first + at, left - at)
                size = min(block.free, count - at)
                place = block.first_row + len(block.positions)
                self._add_lines(treatment.program, np.arange(row + at, row + at + size), place, block.capacity)
                block.positions.extend(range(first + at, first + at + size))
                at += size
                if not block.free:
                    self._close(state)
        elif treatment.program is not None:
            self._add_lines(treatment.program, np.arange(row, row + count), NOWHERE, 0)
        if state.next_position == state.plan.prompt_tokens:
            self._close(state)  # rows of the prompt must not wait for generated rows

    def _add_lines(self, program: Program | None, rows: npt.NDArray[np.int64], place: int, stride: int) -> None:
        """Add lines for rows with one program, captured at successive places from `place` on."""
        assert program is not None  # noqa: S101 - a captured row has a program
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
        combinations, inverse = np.unique(masks, axis=1, return_inverse=True)
        for index, combination in enumerate(combinations.T):
            program = Program.for_rows(plan, np.flatnonzero(combination[:-1]).tolist(), captured=bool(combination[-1]))
            if program is not None:
                chosen = np.flatnonzero(inverse.reshape(-1) == index)
                numbers = np.full(len(chosen), self._index(program))
                self._many.append(np.stack([row + chosen, numbers, places[chosen], strides[chosen]], axis=1))

    def _index(self, program: Program) -> int:
        return self._programs.setdefault(program, len(self._programs))

    def _capture(self, state: RequestState, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return place and stride of each row, int64 [2, count]. Opens and closes blocks as needed."""
        places = np.full((2, count), NOWHERE, dtype=np.int64)
        known, stop = state.next_position, first + count
        state.next_position = max(known, stop)
        capture, pool, prompt_tokens = state.plan.capture, self._pool, state.plan.prompt_tokens
        if capture is None or pool is None:
            return places
        start = max(first, known)
        wanted = wanted_positions(capture.positions, prompt_tokens, start, max(stop - start, 0))
        positions = start + np.flatnonzero(wanted)
        border = int(np.searchsorted(positions, prompt_tokens))
        self._fill(state, pool, positions[:border], places, first)
        if known < prompt_tokens <= stop:
            self._close(state)  # rows of the prompt must not wait for generated rows
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


def as_slice(index: npt.NDArray[np.int64]) -> slice | npt.NDArray[np.int64]:
    """Return an index as a slice if each number is one more than the last: numpy is much faster with it."""
    if not len(index):
        return slice(0, 0)
    return slice(index[0], index[-1] + 1) if bool((index[1:] == index[:-1] + 1).all()) else index
