"""Steady batches: every request generates one token per step, and the whole batch is laid out at once.

Nearly every step of a busy engine is like that. While the same requests go on, the next layout equals the last one,
except that each captured row moves one place further. That takes a few numpy calls for any number of requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from inference_svc.taps.steps.layout import NOWHERE, PLACE, STRIDE, StepLayout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    import numpy.typing as npt

    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.steps.layout import RequestState, StepRows
    from inference_svc.taps.steps.programs import Program

    Numbers = npt.NDArray[np.int64]


MOST_BATCHES = 8
"""How many steady batches are kept. With pipeline parallelism, they take turns: as many as vLLM has in flight, which is
one more than there are stages. If there are more than this, each is laid out anew in each step."""


class SteadyRows:
    """The rows of a batch in which every request generates one token per step."""

    def __init__(self, rows: StepRows) -> None:
        """Take the rows of a step, in which each request has one."""
        self._request_ids = list(rows.request_ids)
        self.next = np.array(rows.firsts)
        """The position of each row in the next step."""
        self._ones = np.ones_like(self.next)  # numpy adds an array in less time than a number of Python
        self._counts = np.array(rows.counts).tobytes()

    def are(self, rows: StepRows) -> bool:
        """Return whether a step computes exactly the next token of each of these requests, in the same rows."""
        # The bytes of short arrays are compared ten times faster than their numbers.
        return (
            np.asarray(rows.firsts).tobytes() == self.next.tobytes()
            and np.asarray(rows.counts).tobytes() == self._counts
            and list(rows.request_ids) == self._request_ids
        )

    def advance(self) -> None:
        """Go on to the next step."""
        self.next += self._ones

    def has_any(self, request_ids: AbstractSet[str]) -> bool:
        """Return whether one of these requests is in the batch."""
        return not request_ids.isdisjoint(self._request_ids)


class _Steady(Protocol):
    @property
    def following(self) -> SteadyRows:
        """The rows of the next step, if it continues the batch."""


_SteadyT = TypeVar("_SteadyT", bound=_Steady)


def continued(batches: list[_SteadyT], rows: StepRows) -> _SteadyT | None:
    """Return the batch that a step continues, and make it the last of `batches`; None if there is none."""
    for index, batch in enumerate(batches):
        if batch.following.are(rows):
            batches.append(batches.pop(index))
            return batch
    return None


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
        self.following = SteadyRows(rows)
        """The rows of the next step, if it continues the batch."""
        self._next = self.following.next
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
        self._lines: Numbers = np.array(lines, dtype=np.int64).reshape(-1, 4)
        self._rows = [row for row, _ in captured]
        self._layout = StepLayout(list(programs), self._lines, moves=bool(captured))
        self._line_of = [line for _, line in captured]
        self._places = self._lines[:, PLACE]  # a view
        self._moves: Numbers = np.zeros(len(lines), dtype=np.int64)  # how far each step moves each place
        self._moves[self._line_of] = 1
        self._settled = [int(self._next[row]) for row in self._rows]  # the first position that the block does not list
        self._steps = 0
        self._opening: dict[int, list[int]] = {}  # which captured rows need a new block, by step
        self._closing: dict[int, list[int]] = {}  # which captured rows fill their block, by step
        for index, row in enumerate(self._rows):
            block = states[row].block
            if block is None:
                self._opening.setdefault(0, []).append(index)
            else:
                self._use(index, block)

    @staticmethod
    def is_steady(rows: StepRows, states: Mapping[int, RequestState]) -> bool:
        """Return whether every row is the next token of a request whose generated tokens have one treatment."""
        return bool(np.all(np.asarray(rows.counts) == 1)) and all(
            state.generates_next(int(rows.firsts[row])) for row, state in states.items()
        )

    def advance(self) -> StepLayout:
        """Return the layout of the next step. It is the same object in each step."""
        layout, steps = self._layout, self._steps
        if steps in self._opening:
            for index in sorted(self._opening.pop(steps)):  # in the order of rows, as without a steady batch
                self._open(index)
        if self._rows:
            self._places += self._moves
        layout.full_blocks = [self._close(index) for index in sorted(self._closing.pop(steps, ()))]
        self.following.advance()
        self._steps = steps + 1
        return layout

    def settle(self) -> None:
        """Bring the request states and their blocks up to date."""
        for row, state in self._states.items():
            state.next_position = int(self._next[row])
        for index, row in enumerate(self._rows):
            if self._states[row].block is not None:
                self._list_positions(index, int(self._next[row]))

    def _open(self, index: int) -> None:
        row = self._rows[index]
        assert self._pool is not None  # noqa: S101 - a rank without a pool captures nothing
        position = int(self._next[row])
        self._settled[index] = position
        self._use(index, self._states[row].open_block(self._pool, position, 1))

    def _use(self, index: int, block: Block) -> None:
        """Continue in a block. Sets the place before that of the next row, because `advance` adds 1."""
        line = self._line_of[index]
        self._lines[line, PLACE] = block.first_row + len(block.positions) - 1
        self._lines[line, STRIDE] = block.capacity
        self._closing.setdefault(self._steps + block.free - 1, []).append(index)

    def _close(self, index: int) -> Block:
        """Detach and return a block that this step fills."""
        row = self._rows[index]
        self._list_positions(index, int(self._next[row]) + 1)
        self._opening.setdefault(self._steps + 1, []).append(index)
        state = self._states[row]
        block, state.block = state.block, None
        assert block is not None  # noqa: S101 - it was just filled
        return block

    def _list_positions(self, index: int, stop: int) -> None:
        """Add the computed positions below `stop` to the block."""
        block = self._states[self._rows[index]].block
        assert block is not None  # noqa: S101 - a captured row has a block until `_close`
        block.positions.extend(range(self._settled[index], stop))
        self._settled[index] = stop


def states_by_row(request_ids: Sequence[str], requests: Mapping[str, RequestState]) -> dict[int, RequestState]:
    """Return the states of a batch's requests by row, for a batch with one row per request. Others are left out."""
    found = ((row, requests.get(request_id)) for row, request_id in enumerate(request_ids))
    return {row: state for row, state in found if state is not None}
