"""The scores of probes, from the taps to the score board.

A probe's output is an operation that changes nothing (`Kind.SCORE`). The tap writes the inner product of the row and
the output's vector into a column of a buffer, which has a line for each row of the batch. After the model has run, the
lines are copied to the *score board*: memory that the service's process shares with the workers. There, each sequence
has a region with a line for each position (`ScoreRegion`), which the service reads when the token arrives.

On a GPU the copy is part of the step's stream and comes before the sampled tokens are copied. So the scores are on the
board when the service learns of the token.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from inference_svc.taps.plan import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from inference_svc.taps.plan import RequestPlan, ScoreRegion
    from inference_svc.taps.points import TapPoints
    from inference_svc.taps.steps.layout import StepRows

RUN_FIELDS = 6
"""Numbers of a run of lines: the first row of the buffer, rows, the first column, columns, the first element of the
run's first line on the board, and the elements of a line there."""


class ScoreCopies(Protocol):
    """Copies scores from the taps' buffer to the board."""

    def copy(self, runs: npt.NDArray[np.int64]) -> None:
        """Copy runs of lines, int64 [runs, RUN_FIELDS]."""


def open_board(path: str) -> npt.NDArray[np.float32]:
    """Return the score board of the service, float32 [elements].

    Args:
        path: The file that the service has open (see `ScoreBoard.path`).
    """
    with Path(path).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.float32)


class _Scored(NamedTuple):
    """A request whose rows are scored on this pipeline stage."""

    region: ScoreRegion
    first_column: int
    columns: int


class Scores:
    """Copies the scores of each step to the board."""

    def __init__(self, copies: ScoreCopies, points: TapPoints) -> None:
        """Make the scores of one pipeline stage.

        Args:
            copies: Copies lines of the buffer.
            points: The stage's points of the residual stream.
        """
        self._copies = copies
        self._points = points
        self._requests: dict[str, _Scored] = {}
        self._runs: list[tuple[int, ...]] = []

    def begin_step(self, finished: Iterable[str], admitted: Iterable[tuple[str, RequestPlan | None]]) -> None:
        """See `TapRuntime.begin_step`."""
        for request_id in finished:
            self._requests.pop(request_id, None)
        for request_id, plan in admitted:
            if plan is not None and plan.scores is not None:
                self._admit(request_id, plan, plan.scores)

    def place(self, get_rows: Callable[[], StepRows]) -> None:
        """Note which lines of the buffer the step's rows fill; see `TapRuntime.place`."""
        self._runs = []
        if not self._requests:
            return
        rows, first_row = get_rows(), 0
        firsts, counts = np.asarray(rows.firsts).tolist(), np.asarray(rows.counts).tolist()
        for request_id, first, count in zip(rows.request_ids, firsts, counts, strict=True):
            scored = self._requests.get(request_id)
            if scored is not None:
                self._add(scored, first_row, first, count)
            first_row += count

    def send(self) -> None:
        """Copy the step's scores to the board. Call it once, after the model has run."""
        if self._runs:
            self._copies.copy(np.array(self._runs, dtype=np.int64))
            self._runs = []

    def _admit(self, request_id: str, plan: RequestPlan, region: ScoreRegion) -> None:
        own: Sequence[int] = [
            operation.column
            for operation in plan.operations
            if operation.kind == Kind.SCORE and self._points.own(operation.layers)
        ]
        if own:  # columns are in the order of layers, so those of a stage are neighbours
            self._requests[request_id] = _Scored(region, min(own), max(own) + 1 - min(own))

    def _add(self, scored: _Scored, row: int, first: int, count: int) -> None:
        region = scored.region
        start = max(first, region.first_position)
        stop = min(first + count, region.first_position + region.positions)  # the engine may compute beyond the end
        if start < stop:
            line = region.offset + (start - region.first_position) * region.columns
            run = (row + start - first, stop - start, scored.first_column, scored.columns, line, region.columns)
            self._runs.append(run)
