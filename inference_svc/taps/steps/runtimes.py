"""The runtimes of all points of a worker: one for each width of rows, driven as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from inference_svc.taps.plan import Operation, RequestPlan
    from inference_svc.taps.scores import Scores
    from inference_svc.taps.steps.capturing_ranks import CapturingRanks
    from inference_svc.taps.steps.layout import StepRows
    from inference_svc.taps.steps.runtime import TapRuntime


class TapRuntimes:
    """Drives several runtimes. The first one has the points of the residual stream."""

    def __init__(
        self, runtimes: Sequence[TapRuntime], scores: Scores | None = None, ranks: CapturingRanks | None = None
    ) -> None:
        """Drive these runtimes.

        Args:
            runtimes: The runtime of each width of rows.
            scores: The scores of probes; None: this rank has none.
            ranks: Which rank captures a request, for all runtimes; None: there is only this one.
        """
        self._scores = scores
        self._ranks = ranks
        self._all = list(runtimes)
        self._steering = [runtime for runtime in runtimes if runtime.can_steer]

    @property
    def open_requests(self) -> int:
        """How many requests have not ended, as far as the scheduler has reported."""
        captures = self._ranks.open_captures if self._ranks else 0  # the runtimes know only those of this rank
        return max(captures, *(runtime.open_requests for runtime in self._all))

    def begin_step(
        self,
        finished: Sequence[str],
        admitted: Sequence[tuple[str, RequestPlan | None]],
        preempted: Iterable[str] = (),
    ) -> None:
        """See `TapRuntime.begin_step`."""
        if self._ranks:
            self._ranks.begin_step(finished, admitted)
        for runtime in self._all:
            runtime.begin_step(finished, admitted, preempted)
        if self._scores:
            self._scores.begin_step(finished, admitted)

    def change_steering(self, name: str, operations: tuple[Operation, ...]) -> int | None:
        """See `TapRuntime.change_steering`."""
        positions = [runtime.change_steering(name, operations) for runtime in self._steering]
        return positions[0]  # the same in all of them: each lays out all rows of the request

    def forget(self, names: Iterable[str]) -> None:
        """See `TapRuntime.forget`."""
        names = list(names)
        for runtime in self._steering:
            runtime.forget(names)

    def place(self, get_rows: Callable[[], StepRows]) -> None:
        """See `TapRuntime.place`."""
        if len(self._all) > 1 or (self._scores and self._scores.has_requests):
            get_rows = _once(get_rows)
        for runtime in self._all:
            runtime.place(get_rows)
        if self._scores:
            self._scores.place(get_rows)

    def send_scores(self) -> None:
        """Copy the step's scores to the board, before the step's tokens are copied; see `Scores.send`."""
        if self._scores:
            self._scores.send()

    def finish_step(self) -> None:
        """See `TapRuntime.finish_step`."""
        for runtime in self._all:
            runtime.finish_step()

    def pass_through(self) -> None:
        """See `TapRuntime.pass_through`."""
        for runtime in self._all:
            runtime.pass_through()


def _once(get_rows: Callable[[], StepRows]) -> Callable[[], StepRows]:
    """Return a function that calls `get_rows` at its first call, and returns the same from then on.

    `functools.cache` takes more time to make such a function than this one saves.
    """
    found: list[StepRows] = []

    def get() -> StepRows:
        if not found:
            found.append(get_rows())
        return found[0]

    return get
