"""Steady batches: every request generates one token per step, and the whole batch is laid out at once.

Nearly every step of a busy engine is like that. While the same requests go on, the next layout equals the last one,
except that each captured row moves one place further. That takes a few numpy calls for any number of requests.
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
    """Lays out the steps of a steady batch.

    It does not update the request states in each step. `settle` brings them up to date, and must be called before
    anything else reads or changes them.
    """

    def __init__(self, rows: StepRows, states: Mapping[int, RequestState], pool: BlockPool | None) -> None:
        """Take over a batch for which `is_steady` is true.

        Args:
            rows: The rows of the next step.
            states: The requests that the taps capture or steer, by row.
            pool: The pool for captured rows; None on a rank that only steers.
        """
        self._request_ids = list(rows.request_ids)
        self._next = np.array(rows.firsts, dtype=np.int64)  # the next position of each row
        self._states = states
        self._pool = pool
        programs: dict[Program, int] = {}
        lines: list[tuple[int, int, int, int]] = []
        captured: list[tuple[int, int]] = []  # (row of the batch, line)
        for row, state in states.items():
            decode = state.steering.decode
            assert decode is not None  # noqa: S101 - `is_steady` checked it
            if decode.program is None:
                continue
            if decode.captured and pool is not None:
                captured.append((row, len(lines)))
            lines.append((row, programs.setdefault(decode.program, len(programs)), NOWHERE, 0))
        self._programs = list(programs)
        self._lines: Numbers = np.array(lines, dtype=np.int64).reshape(-1, 4)
        pairs = np.array(captured, dtype=np.int64).reshape(-1, 2)
        self._rows, self._line_of = pairs[:, 0], pairs[:, 1]
        self._left: Numbers = np.zeros(len(pairs), dtype=np.int64)  # how many positions still fit the block of each row
        self._settled: Numbers = self._next[self._rows]  # the first position that the block does not list yet
        for index, row in enumerate(self._rows):
            block = states[row].block
            if block is not None:
                self._use(index, block)
        self._steps = 0

    @staticmethod
    def is_steady(rows: StepRows, states: Mapping[int, RequestState]) -> bool:
        """Return whether every row is the next token of a request whose generated tokens have one treatment."""
        return bool(np.all(np.asarray(rows.counts) == 1)) and all(
            state.generates_next(int(rows.firsts[row])) for row, state in states.items()
        )

    def continues(self, rows: StepRows) -> bool:
        """Return whether a step computes exactly the next token of each of these requests, in the same rows."""
        return (
            len(rows.request_ids) == len(self._request_ids)
            and bool(np.array_equal(rows.firsts, self._next))
            and bool(np.all(np.asarray(rows.counts) == 1))
            and list(rows.request_ids) == self._request_ids
        )

    def advance(self) -> StepLayout:
        """Return the layout of the next step."""
        layout = StepLayout(self._programs, self._lines, repeats=bool(self._steps) and not len(self._line_of))
        if len(self._line_of):
            self._lines[self._line_of, PLACE] += 1
            for index in np.flatnonzero(self._left == 0):
                self._open(index)
            self._left -= 1
            for index in np.flatnonzero(self._left == 0):
                layout.full_blocks.append(self._close(index))
        self._next += 1
        self._steps += 1
        return layout

    def settle(self) -> None:
        """Bring the request states and their blocks up to date."""
        for row, state in self._states.items():
            state.next_position = int(self._next[row])
        for index in np.flatnonzero(self._left):
            self._list_positions(index, self._next[self._rows[index]])

    def _open(self, index: int) -> None:
        state, position = self._state(index), int(self._next[self._rows[index]])
        assert self._pool is not None  # noqa: S101 - a rank without a pool captures nothing
        block = state.open_block(self._pool, position, 1)
        self._settled[index] = position
        self._use(index, block)
        self._lines[self._line_of[index], PLACE] += 1

    def _use(self, index: int, block: Block) -> None:
        """Continue in a block. Sets the place before that of the next row, because `advance` adds 1 first."""
        self._left[index] = block.free
        self._lines[self._line_of[index], [PLACE, STRIDE]] = (
            block.first_row + len(block.positions) - 1,
            block.capacity,
        )

    def _close(self, index: int) -> Block:
        """Detach and return a block that this step fills."""
        self._list_positions(index, self._next[self._rows[index]] + 1)
        state = self._state(index)
        block, state.block = state.block, None
        assert block is not None  # noqa: S101 - it was just filled
        return block

    def _list_positions(self, index: int, stop: int) -> None:
        """Add the computed positions below `stop` to the block."""
        block = self._state(index).block
        assert block is not None  # noqa: S101 - a captured row has a block until `_close`
        block.positions.extend(range(int(self._settled[index]), int(stop)))
        self._settled[index] = stop

    def _state(self, index: int) -> RequestState:
        return self._states[int(self._rows[index])]


def states_by_row(request_ids: Sequence[str], requests: Mapping[str, RequestState]) -> dict[int, RequestState]:
    """Return the states of a batch's requests by row, for a batch with one row per request. Others are left out."""
    found = ((row, requests.get(request_id)) for row, request_id in enumerate(request_ids))
    return {row: state for row, state in found if state is not None}
