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
from inference_svc.taps.steps.steady import MOST_BATCHES, SteadyRows, continued

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from inference_svc.taps.plan import RequestPlan, ScoreRegion
    from inference_svc.taps.points import TapPoints
    from inference_svc.taps.steps.layout import StepRows

    Numbers = npt.NDArray[np.int64]

LINE, STRIDE = 4, 5
RUN_FIELDS = 6
"""Numbers of a run of lines: the first row of the buffer, rows, the first column, columns, the first element of the
run's first line on the board (LINE), and the elements of a line there (STRIDE)."""

_NEVER = 1 << 62
"""More positions than any request has."""


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


class _SteadyRuns:
    """The runs of a steady batch: from step to step, each only moves to the next line of the board."""

    def __init__(self, rows: StepRows, runs: Numbers, steps: int) -> None:
        """Take over a step's runs. The next `steps` steps have the same, each on the next line."""
        self.following = SteadyRows(rows)
        self.following.advance()
        self._runs = runs
        self._lines, self._moves = runs[:, LINE], runs[:, STRIDE]  # views
        self._steps = steps

    def advance(self) -> Numbers | None:
        """Return the runs of the next step; None if a request begins or ends to be scored in it."""
        self._steps -= 1
        if self._steps < 0:
            return None
        self._lines += self._moves
        self.following.advance()
        return self._runs


class Scores:
    """Copies the scores of each step to the board.

    Most steps only continue a batch (see `steps.steady`). Their runs are not made anew.
    """

    def __init__(self, copies: ScoreCopies, points: TapPoints) -> None:
        """Make the scores of one pipeline stage.

        Args:
            copies: Copies lines of the buffer.
            points: The stage's points of the residual stream.
        """
        self._copies = copies
        self._points = points
        self._requests: dict[str, _Scored] = {}
        self._runs: Numbers | None = None
        self._steady: list[_SteadyRuns] = []  # least recently used first

    @property
    def has_requests(self) -> bool:
        """Whether rows of a request that has not ended are scored."""
        return bool(self._requests)

    def begin_step(self, finished: Iterable[str], admitted: Iterable[tuple[str, RequestPlan | None]]) -> None:
        """See `TapRuntime.begin_step`."""
        for request_id in finished:
            if self._requests.pop(request_id, None):
                self._steady.clear()
        for request_id, plan in admitted:
            if plan is not None and plan.scores is not None:
                self._admit(request_id, plan, plan.scores)
                self._steady.clear()

    def place(self, get_rows: Callable[[], StepRows]) -> None:
        """Note which lines of the buffer the step's rows fill; see `TapRuntime.place`."""
        self._runs = None
        if not self._requests:
            return
        rows = get_rows()
        steady = continued(self._steady, rows)
        if steady is not None:
            self._runs = steady.advance()
        if self._runs is None:
            self._runs = self._new_runs(rows)

    def _new_runs(self, rows: StepRows) -> Numbers:
        """Return the runs of a step that continues no batch, and keep them if the next one may."""
        firsts, counts = np.asarray(rows.firsts).tolist(), np.asarray(rows.counts).tolist()
        runs: list[tuple[int, ...]] = []
        steps = _NEVER  # how many more have the same runs if each request goes on by one row
        row = 0
        for request_id, first, count in zip(rows.request_ids, firsts, counts, strict=True):
            scored = self._requests.get(request_id)
            if scored is not None:
                region = scored.region
                start, end = region.first_position, region.first_position + region.positions
                begins, stops = max(first, start), min(first + count, end)  # the engine may compute beyond the end
                if begins < stops:
                    line = region.offset + (begins - start) * region.columns
                    at = row + begins - first
                    runs.append((at, stops - begins, scored.first_column, scored.columns, line, region.columns))
                border = start if first < start else end if first < end else _NEVER
                steps = min(steps, border - first - 1)
            row += count
        made = np.array(runs, dtype=np.int64).reshape(-1, RUN_FIELDS)
        if steps > 0 and all(count == 1 for count in counts):
            self._steady = [*self._steady[1 - MOST_BATCHES :], _SteadyRuns(rows, made, steps)]
        return made

    def send(self) -> None:
        """Copy the step's scores to the board. Call it once, after the model has run."""
        if self._runs is not None and len(self._runs):
            self._copies.copy(self._runs)
        self._runs = None

    def _admit(self, request_id: str, plan: RequestPlan, region: ScoreRegion) -> None:
        own: Sequence[int] = [
            operation.column
            for operation in plan.operations
            if operation.kind == Kind.SCORE and self._points.own(operation.layers)
        ]
        if own:  # columns are in the order of layers, so those of a stage are neighbours
            self._requests[request_id] = _Scored(region, min(own), max(own) + 1 - min(own))
