"""Which rank of a tensor-parallel group captures a request: the ranks divide the requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inference_svc.taps.plan import RequestPlan


class CapturingRanks:
    """Divides captures among the ranks of a tensor-parallel group, so that none of them holds up the others.

    Every rank has the whole rows of the residual stream, so each of them can capture any request. The ranks get the
    same steps in the same order. So each of them counts the open captures of all ranks, and they agree without a
    message.
    """

    def __init__(self, ranks: Sequence[int], own: int) -> None:
        """Start without captures.

        Args:
            ranks: The ranks of the group that can capture.
            own: This rank. It need not be one of them.
        """
        self._own = own
        self._open = dict.fromkeys(ranks, 0)
        self._begun = dict.fromkeys(ranks, 0)
        self._rank_of: dict[str, int] = {}

    @property
    def open_captures(self) -> int:
        """How many captures have not ended, of all ranks."""
        return len(self._rank_of)

    def begin_step(self, finished: Iterable[str], admitted: Iterable[tuple[str, RequestPlan | None]]) -> None:
        """Give each new capture to the rank with the fewest open ones; see `TapRuntime.begin_step`.

        Of several such ranks, it is the one that has captured least often. So captures that run one after the other,
        such as those of the self-test, go to all ranks in turn.
        """
        for request_id in finished:
            rank = self._rank_of.pop(request_id, None)
            if rank is not None:
                self._open[rank] -= 1
        for request_id, plan in admitted:
            # Some runners report a preempted request as new again. Its rank keeps it.
            if plan is not None and plan.capture and request_id not in self._rank_of and self._open:
                rank = min(self._open, key=lambda rank: (self._open[rank], self._begun[rank]))
                self._rank_of[request_id] = rank
                self._open[rank] += 1
                self._begun[rank] += 1

    def is_own(self, request_id: str) -> bool:
        """Return whether this rank captures a request."""
        return self._rank_of.get(request_id) == self._own
