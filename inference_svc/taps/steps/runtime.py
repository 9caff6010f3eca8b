"""The taps of one worker process: requests in, layouts out, blocks on their way."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

import numpy as np

from inference_svc.taps.plan import RequestPlan
from inference_svc.taps.steps.layout import RequestState, StepLayout, StepPlanner, StepRows
from inference_svc.taps.steps.steady import SteadyBatch, states_by_row
from residuum.v1 import capture_pb2
from residuum.wire.limits import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from inference_svc.taps.blocks import BlockPool
    from inference_svc.taps.plan import Operation
    from inference_svc.taps.points import TapPoints
    from inference_svc.taps.sink import BlockSink
    from inference_svc.taps.steps.layout import StepLayout

_REMEMBERED_NAMES = 10_000
"""Ended requests that are told from those that have not come yet."""

_SIZE_STEP = 13
"""Odd, so that it takes 32 requests until a size comes again."""


class DeviceTap(Protocol):
    """What the op calls, as the runtime sees it."""

    def arm(self, layout: StepLayout) -> None:
        """Take over what the next run of the model does."""

    def disarm(self) -> None:
        """Let the next runs of the model pass through. Told once, when a step has nothing to do."""


class TapRuntime:
    """Keeps the requests that the taps work for, and takes the taps through each step of the engine."""

    def __init__(self, points: TapPoints, tap: DeviceTap, pool: BlockPool | None, sink: BlockSink | None) -> None:
        """Make the runtime of a rank that captures, or, without a pool and a sink, of one that only steers."""
        self._points = points
        self._tap = tap
        self._pool = pool
        self._sink = sink
        self._requests: dict[str, RequestState] = {}
        self._names: dict[str, str] = {}  # the engine's ids of requests whose operations may change, by their names
        self._changes_ahead: dict[str, tuple[Operation, ...]] = {}  # of requests that are not here yet
        self._ended: OrderedDict[str, None] = OrderedDict()  # names
        self._layout: StepLayout | None = None
        self._steady: SteadyBatch | None = None
        self._is_armed = False
        self._admitted = 0

    @property
    def open_requests(self) -> int:
        """Requests whose end the scheduler has not told yet."""
        return len(self._requests)

    def begin_step(self, finished: Iterable[str], admitted: Iterable[tuple[str, Mapping[str, Any] | None]]) -> None:
        """Take over the scheduler's news before the step runs.

        Args:
            finished: Requests that ended, or were stopped, since the last step.
            admitted: Requests that are scheduled for the first time, with their `extra_args`.
        """
        for request_id in finished:
            self._retire(request_id)
        for request_id, extra_args in admitted:
            plan = RequestPlan.from_extra_args(extra_args)
            if plan is not None:
                # Some runners announce a preempted request again, as if it were new; what is captured stays captured.
                plan = plan.for_rank(self._points, captures=self._pool is not None)
                if request_id not in self._requests:
                    self._requests[request_id] = self._admit(request_id, plan)

    def change_steering(self, name: str, operations: tuple[Operation, ...]) -> int | None:
        """Change the operations of a request from its next position on.

        Args:
            name: Its `RequestPlan.name`.
            operations: What takes the place of its operations.

        Returns:
            The first position that is steered so; None if the request has ended.
        """
        if name in self._ended:
            return None
        if name not in self._names:
            self._changes_ahead[name] = operations
            return 0
        self._settle()
        return self._requests[self._names[name]].change_steering(operations)

    def forget(self, names: Iterable[str]) -> None:
        """Forget changes of requests that will not come any more."""
        for name in names:
            self._changes_ahead.pop(name, None)

    def place(self, tell_rows: Callable[[], StepRows]) -> None:
        """Lay out the step's rows, once the runner has fixed their order.

        Args:
            tell_rows: Tells which rows are whose; not asked if there is nothing to do, so that it costs nothing.
        """
        if not self._requests:
            self.pass_through()
            return
        self._layout = self._lay_out(tell_rows())
        if not self._layout.programs:
            self.pass_through()
        elif not (self._layout.repeats and self._is_armed):
            self._tap.arm(self._layout)
            self._is_armed = True

    def finish_step(self) -> None:
        """Send the blocks that the step filled.

        The taps stay armed: each step that computes something is placed anew, and nothing runs in between.
        """
        layout, self._layout = self._layout, None
        if layout is None or self._sink is None:
            return
        for capture, positions in layout.skipped:
            self._sink.lose(
                capture,
                positions,
                capture_pb2.INCOMPLETE_REASON_WRITE_FAILED,
                "The engine did not compute these positions: it took them from a cache.",
            )
        self._sink.send(layout.full_blocks)

    def pass_through(self) -> None:
        """Let runs of the model pass the taps untouched, until a step has something to do again."""
        if self._is_armed:
            self._tap.disarm()
            self._is_armed = False

    def _lay_out(self, rows: StepRows) -> StepLayout:
        if self._steady is not None and self._steady.continues(rows):
            return self._steady.advance()
        self._settle()
        if len(rows.request_ids) == sum(rows.counts):
            states = states_by_row(rows.request_ids, self._requests)
            if SteadyBatch.is_steady(rows, states):
                self._steady = SteadyBatch(rows, states, self._pool)
                return self._steady.advance()
        return self._plan(rows)

    def _plan(self, rows: StepRows) -> StepLayout:
        planner = StepPlanner(self._pool)
        row = 0
        firsts, counts = np.asarray(rows.firsts).tolist(), np.asarray(rows.counts).tolist()
        for request_id, first, count in zip(rows.request_ids, firsts, counts, strict=True):
            state = self._requests.get(request_id)
            if state is not None:
                planner.add_request(state, row, first, count)
            row += count
        return planner.finish()

    def _settle(self) -> None:
        """Let the states know what a steady batch has computed; before anything else reads or changes them."""
        if self._steady is not None:
            self._steady.settle()
            self._steady = None

    def _admit(self, request_id: str, plan: RequestPlan) -> RequestState:
        state = RequestState(plan, first_generated=self._next_size())
        if plan.capture and plan.capture.is_followed and self._sink:
            self._sink.begin(plan)
        if plan.name:
            self._names[plan.name] = request_id
            if plan.name in self._changes_ahead:
                state.change_steering(self._changes_ahead.pop(plan.name))
        return state

    def _next_size(self) -> int:
        """Return the size of a new request's first block: all sizes come by turns, neighbours far apart."""
        self._admitted += 1
        return BLOCK_TOKENS - self._admitted * _SIZE_STEP % BLOCK_TOKENS

    def _retire(self, request_id: str) -> None:
        self._settle()
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        if state.block and self._sink:
            self._sink.send([state.block])
        if state.plan.capture and state.plan.capture.is_followed and self._sink:
            self._sink.end(state.plan.capture)
        if self._names.pop(state.plan.name, None):
            self._ended[state.plan.name] = None
            if len(self._ended) > _REMEMBERED_NAMES:
                self._ended.popitem(last=False)
