"""A batch in which every request generates one token a step, laid out as a whole.

That is nearly every step of a busy engine. While the same requests go on, the layout of a step is that of the one
before, with each captured row one place further: a few numpy calls, however many requests there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from inference_svc.taps.steps.layout import NOWHERE, PLACE, STRIDE, StepLayout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.steps.layout import RequestState, StepRows
    from inference_svc.taps.steps.programs import Program

    Numbers = npt.NDArray[np.int64]


class SteadyBatch:
    """The requests of such a batch.

    It goes ahead of the requests' own states, which learn of it when it is settled: before anything else reads or
    changes them.
    """

    def __init__(self, rows: StepRows, states: Mapping[int, RequestState], pool: BlockPool | None) -> None:
        """Take over a batch that `is_steady`.

        Args:
            rows: The rows of the next step.
            states: The requests that the taps work for, by their rows.
            pool: Where captured rows go; None on a rank that only steers.
        """
        self._request_ids = list(rows.request_ids)
        self._next = np.array(rows.firsts, dtype=np.int64)  # of each row the position that is computed next
        self._states = states
        self._pool = pool
        programs: dict[Program, int] = {}
        lines: list[tuple[int, int, int, int]] = []
        captured: list[tuple[int, int]] = []  # (row of the batch, line)
        for row, state in states.items():
            decode = state.steering.decode
            assert decode is not None  # noqa: S101 - a steady batch has no others
            if decode.program is None:
                continue
            if decode.captured and pool is not None:
                captured.append((row, len(lines)))
            lines.append((row, programs.setdefault(decode.program, len(programs)), NOWHERE, 0))
        self._programs = list(programs)
        self._lines: Numbers = np.array(lines, dtype=np.int64).reshape(-1, 4)
        pairs = np.array(captured, dtype=np.int64).reshape(-1, 2)
        self._rows, self._at = pairs[:, 0], pairs[:, 1]
        self._left: Numbers = np.zeros(len(pairs), dtype=np.int64)  # positions that still fit each one's block
        self._settled: Numbers = self._next[self._rows]  # positions from which on its block has not heard of them
        for index, row in enumerate(self._rows):
            block = states[row].block
            if block is not None:
                self._use(index, block)
        self._steps = 0

    @staticmethod
    def is_steady(rows: StepRows, states: Mapping[int, RequestState]) -> bool:
        """Tell whether every row of a step is the next token of a request, and all its tokens are treated alike."""
        return bool(np.all(np.asarray(rows.counts) == 1)) and all(
            state.generates_next(int(rows.firsts[row])) for row, state in states.items()
        )

    def continues(self, rows: StepRows) -> bool:
        """Tell whether a step computes the next token of each of these requests, in the same rows, and nothing else."""
        return (
            len(rows.request_ids) == len(self._request_ids)
            and bool(np.array_equal(rows.firsts, self._next))
            and bool(np.all(np.asarray(rows.counts) == 1))
            and list(rows.request_ids) == self._request_ids
        )

    def advance(self) -> StepLayout:
        """Return the layout of the next step."""
        layout = StepLayout(self._programs, self._lines, repeats=bool(self._steps) and not len(self._at))
        if len(self._at):
            self._lines[self._at, PLACE] += 1
            for index in np.flatnonzero(self._left == 0):
                self._open(index)
            self._left -= 1
            for index in np.flatnonzero(self._left == 0):
                layout.full_blocks.append(self._close(index))
        self._next += 1
        self._steps += 1
        return layout

    def settle(self) -> None:
        """Let the requests' states know what has been computed."""
        for row, state in self._states.items():
            state.next_position = int(self._next[row])
        for index in np.flatnonzero(self._left):
            self._tell(index, self._next[self._rows[index]])

    def _open(self, index: int) -> None:
        state, position = self._state(index), int(self._next[self._rows[index]])
        assert self._pool is not None  # noqa: S101 - a rank without a pool captures nothing
        block = state.open_block(self._pool, position, 1)
        self._settled[index] = position
        self._use(index, block)
        self._lines[self._at[index], PLACE] += 1

    def _use(self, index: int, block: Block) -> None:
        """Go on in a block; the place is the one before that of the next row."""
        self._left[index] = block.free
        self._lines[self._at[index], [PLACE, STRIDE]] = (
            block.first_row + len(block.positions) - 1,
            block.capacity,
        )

    def _close(self, index: int) -> Block:
        """Return a block that this step fills."""
        self._tell(index, self._next[self._rows[index]] + 1)
        state = self._state(index)
        block, state.block = state.block, None
        assert block is not None  # noqa: S101 - it was just filled
        return block

    def _tell(self, index: int, stop: int) -> None:
        block = self._state(index).block
        assert block is not None  # noqa: S101 - there is room left in it
        block.positions.extend(range(int(self._settled[index]), int(stop)))
        self._settled[index] = stop

    def _state(self, index: int) -> RequestState:
        return self._states[int(self._rows[index])]


def states_by_row(request_ids: Sequence[str], requests: Mapping[str, RequestState]) -> dict[int, RequestState]:
    """Return the states of those requests of a batch that the taps work for, by their rows; each has one."""
    found = ((row, requests.get(request_id)) for row, request_id in enumerate(request_ids))
    return {row: state for row, state in found if state is not None}
