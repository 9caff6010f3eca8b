"""Treatments: what the taps do at each position of a request, found once for each stretch of equal ones."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from inference_svc.taps.plan import RequestPlan
from inference_svc.taps.steps.programs import Program
from residuum.wire.selection import borders, selects_any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inference_svc.taps.plan import SharedPlan
    from residuum.v1 import selection_pb2

_KEPT = 256
"""For how many plans and lengths of prompts a worker keeps the treatments."""
_MAX_STRETCHES = 16
"""Most stretches of a part of a prompt that are laid out one by one."""


class Treatment(NamedTuple):
    """What the taps do at a position of a request, and at its neighbours in the same stretch."""

    program: Program | None
    """None: the taps do nothing to these positions."""
    captured: bool
    """Whether the positions are captured."""


class Steering:
    """The operations of a request from some position on, and the treatment of each stretch under them."""

    def __init__(self, plan: RequestPlan) -> None:
        """Take the operations and the capture of `plan`."""
        self.plan = plan
        self._borders = _borders(plan)
        self._treatments: dict[int, Treatment] = {}

    @classmethod
    def of(cls, plan: RequestPlan) -> Steering:
        """Return the operations with which a request starts: one object for all requests that do the same."""
        return cls(plan) if plan.shared is None else _kept(plan.shared, plan.prompt_tokens)

    def stretches(self, first: int, count: int) -> list[tuple[Treatment, int, int]] | None:
        """Divide positions into stretches of one treatment; return (treatment, first position, length) of each.

        None if each position may have a treatment of its own, or if there are many stretches.
        """
        if self._borders is None:
            return None
        stop = first + count
        inside = [border for border in self._borders if first < border < stop]
        if len(inside) >= _MAX_STRETCHES:
            return None
        starts = [first, *inside]
        return [
            (self._treatment_at(self._borders, start), start, end - start)
            for start, end in zip(starts, [*inside, stop], strict=True)
        ]

    @cached_property
    def decode(self) -> Treatment | None:
        """The treatment of every generated position from `decode_from` on; None if positions differ without end."""
        return None if self._borders is None else self._treatment_at(self._borders, self.decode_from)

    def _treatment_at(self, borders: Sequence[int], position: int) -> Treatment:
        stretch = bisect_right(borders, position)
        found = self._treatments.get(stretch)
        if found is None:
            found = self._treatments[stretch] = _treatment(self.plan, position)
        return found

    @cached_property
    def decode_from(self) -> int:
        """The first generated position from which on all have one treatment, if they ever do."""
        first: int = max([self.plan.prompt_tokens, *(self._borders or ())])
        return first


@lru_cache(maxsize=_KEPT)
def _kept(shared: SharedPlan, prompt_tokens: int) -> Steering:
    return Steering(RequestPlan.of(shared, prompt_tokens, "", 0))


def _borders(plan: RequestPlan) -> list[int] | None:
    """Return the positions at which the treatment of a request's positions may change; None if it may at each.

    They ascend.
    """
    found: set[int] = set()
    for selection in _selections(plan):
        some = borders(selection, plan.prompt_tokens)
        if some is None:
            return None
        found.update(some)
    return sorted(found)


def _selections(plan: RequestPlan) -> Iterable[selection_pb2.PositionSelection]:
    """Return the selections of a plan, each object once. Operations that a worker read share equal selections."""
    found = {id(operation.positions): operation.positions for operation in plan.operations}
    if plan.capture:
        found[id(plan.capture.positions)] = plan.capture.positions
    return found.values()


def _treatment(plan: RequestPlan, position: int) -> Treatment:
    """Return the treatment of a position."""
    is_in = {id(selection): selects_any(selection, plan.prompt_tokens, position, 1) for selection in _selections(plan)}
    applied = [index for index, operation in enumerate(plan.operations) if is_in[id(operation.positions)]]
    captured = plan.capture is not None and is_in[id(plan.capture.positions)]
    return Treatment(Program.for_rows(plan, applied, captured=captured), captured)
