"""The runtime of the taps in one worker process. It keeps the requests, lays out each step, and sends full blocks."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

import numpy as np

from inference_svc.taps.steps.layout import RequestState, StepLayout, StepPlanner, StepRows
from inference_svc.taps.steps.steady import MOST_BATCHES, SteadyBatch, continued, states_by_row
from residuum.v1 import capture_pb2
from residuum.wire.limits import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.plan import Capture, Operation, RequestPlan
    from inference_svc.taps.points import TapPoints
    from inference_svc.taps.steps.capturing_ranks import CapturingRanks
    from inference_svc.taps.steps.layout import StepLayout

_REMEMBERED_NAMES = 10_000
"""How many ended requests the runtime remembers, to distinguish them from requests that have not started."""

_SIZE_STEP = 13
"""Odd, so that 32 successive requests get 32 different sizes."""


class DeviceTap(Protocol):
    """The part of a tap that the runtime calls."""

    def arm(self, layout: StepLayout) -> None:
        """Set what the taps do in the next run of the model."""

    def disarm(self) -> None:
        """Make the taps do nothing from the next run of the model on. Called once, when a step has no work for them."""


class RowSink(Protocol):
    """The part of a sink that the runtime calls; see `BlockSink`."""

    def begin(self, plan: RequestPlan) -> None:
        """Prepare for the blocks of a request whose capture is followed (`Capture.is_followed`), until `end`."""

    def send(self, blocks: Sequence[Block]) -> None:
        """Take over blocks, and give them back to their pool when their rows have left."""

    def publish(self, *, may_be_last: bool) -> None:
        """Publish rows that have left the device by now; see `BlockSink`."""

    def hurry(self) -> None:
        """Send the rows of sent blocks soon, and do not let them wait for others; see `BlockSink`."""

    def end(self, capture: Capture) -> None:
        """Send the last rows of a followed capture, after its last block was sent, and forget it."""

    def lose(
        self,
        capture: Capture,
        positions: Sequence[int],
        reason: capture_pb2.IncompleteReason.ValueType,
        detail: str,
    ) -> None:
        """Report rows of a capture that will never arrive."""


class TapRuntime:
    """Keeps the requests that the taps capture or steer, and drives the taps through each step of the engine."""

    def __init__(
        self,
        points: TapPoints,
        tap: DeviceTap,
        pool: BlockPool | None,
        sink: RowSink | None,
        ranks: CapturingRanks | None = None,
        *,
        scores: bool = True,
    ) -> None:
        """Make the runtime of one rank.

        Args:
            points: The points of the rank's stage.
            tap: The tap at these points.
            pool: Where the tap copies rows; None: the rank captures nothing here.
            sink: Where full blocks go; None: as for the pool.
            ranks: Which rank captures a request; None: this one captures all of them.
            scores: Whether the tap computes scores.
        """
        self._points = points
        self._ranks = ranks
        self._scores = scores
        self._tap = tap
        self._pool = pool
        self._sink = sink
        self._requests: dict[str, RequestState] = {}
        self._names: dict[str, str] = {}  # vLLM's request IDs by plan name, for requests whose operations may change
        self._early_changes: dict[str, tuple[Operation, ...]] = {}  # changes for requests that have not started yet
        self._ended: OrderedDict[str, None] = OrderedDict()  # names
        self._layout: StepLayout | None = None
        self._steady: list[SteadyBatch] = []  # least recently used first
        self._armed: StepLayout | None = None  # None: the taps do nothing
        self._admitted = 0

    @property
    def can_steer(self) -> bool:
        """Whether rows can be steered at some of the points."""
        return self._points.can_steer

    @property
    def open_requests(self) -> int:
        """How many requests have not ended, as far as the scheduler has reported."""
        return len(self._requests)

    def begin_step(
        self,
        finished: Iterable[str],
        admitted: Iterable[tuple[str, RequestPlan | None]],
        preempted: Iterable[str] = (),
    ) -> None:
        """Retire and admit requests before a step runs.

        Args:
            finished: IDs of requests that ended or were stopped since the last step.
            admitted: IDs and plans of requests that are scheduled for the first time. None: the request has no plan.
            preempted: IDs of requests that wait to be computed again.
        """
        for request_id in sorted(finished):  # the same order on every rank: see `JoiningSink`
            self._retire(request_id)
        for request_id in sorted(preempted):
            self._empty(request_id)
        for request_id, whole in admitted:
            own = self._pool is not None and (self._ranks is None or self._ranks.is_own(request_id))
            plan = whole and whole.for_points(self._points, captures=own, scores=self._scores)
            # Some runners report a preempted request as new again. Its state is kept, so no row is captured twice.
            if plan is not None and request_id not in self._requests:
                self._requests[request_id] = self._admit(request_id, plan)

    def change_steering(self, name: str, operations: tuple[Operation, ...]) -> int | None:
        """Replace the operations of a request from its next position on.

        Args:
            name: The request's `RequestPlan.name`.
            operations: The new operations; those at other points are ignored.

        Returns:
            The first position with the new operations; None if the request has ended.
        """
        operations = tuple(operation for operation in operations if self._points.sees(operation.site))
        if name in self._ended:
            return None
        if name not in self._names:
            self._early_changes[name] = operations
            return 0
        request_id = self._names[name]
        self._settle({request_id})
        return self._requests[request_id].change_steering(operations)

    def forget(self, names: Iterable[str]) -> None:
        """Drop early changes of requests that will never start."""
        for name in names:
            self._early_changes.pop(name, None)

    def place(self, get_rows: Callable[[], StepRows]) -> None:
        """Lay out the step's rows, once the runner has fixed their order.

        Args:
            get_rows: Returns which rows belong to which request. Not called if the taps have no request, to save time.
        """
        if not self._requests:
            self.pass_through()
            return
        self._layout = self._lay_out(get_rows())
        if not self._layout.programs:
            self.pass_through()
        elif self._armed is None or not self._layout.repeats(self._armed):
            self._tap.arm(self._layout)
            self._armed = self._layout

    def finish_step(self) -> None:
        """Send the blocks that the step filled, and report positions that the engine skipped.

        The taps stay armed. That is safe: each step with rows calls `place` first. If the model runs between steps,
        the worker calls `pass_through` before (`TappedWorker.execute_dummy_batch`).
        """
        layout, self._layout = self._layout, None
        if self._sink is None:
            return
        self._sink.publish(may_be_last=not self._requests)
        if layout is None:
            return
        for capture, positions in layout.skipped:
            self._sink.lose(
                capture,
                positions,
                capture_pb2.INCOMPLETE_REASON_WRITE_FAILED,
                "The engine did not compute these positions: it read them from a cache.",
            )
        self._sink.send(layout.full_blocks)

    def pass_through(self) -> None:
        """Make the taps do nothing, until `place` arms them again."""
        if self._armed is not None:
            self._tap.disarm()
            self._armed = None

    def _lay_out(self, rows: StepRows) -> StepLayout:
        batch = continued(self._steady, rows)
        if batch is not None:
            return batch.advance()
        new = self._new_batch(rows)
        if new is None:
            return self._plan(rows)
        self._steady.append(new)
        return new.advance()

    def _new_batch(self, rows: StepRows) -> SteadyBatch | None:
        """Return the batch of a step that continues none, or None if it is not steady."""
        self._settle(set(rows.request_ids))
        if len(rows.request_ids) < sum(rows.counts):
            return None
        states = states_by_row(rows.request_ids, self._requests)
        if not SteadyBatch.is_steady(rows, states):
            return None
        while len(self._steady) >= MOST_BATCHES:
            self._end(self._steady[:1])
        return SteadyBatch(rows, states, self._pool)

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

    def _settle(self, request_ids: AbstractSet[str]) -> None:
        """Bring request states up to date with steady batches. Call it before anything reads or changes them."""
        self._end([batch for batch in self._steady if batch.following.has_any(request_ids)])

    def _end(self, batches: Iterable[SteadyBatch]) -> None:
        for batch in batches:
            batch.settle()
            self._steady.remove(batch)

    def _admit(self, request_id: str, plan: RequestPlan) -> RequestState:
        state = RequestState(plan, first_generated=self._next_size())
        if plan.capture and plan.capture.is_followed and self._sink:
            self._sink.begin(plan)
        if plan.name:
            self._names[plan.name] = request_id
            if plan.name in self._early_changes:
                state.change_steering(self._early_changes.pop(plan.name))
        return state

    def _next_size(self) -> int:
        """Return the capacity of a new request's first block. It cycles through all sizes, in steps far apart."""
        self._admitted += 1
        return BLOCK_TOKENS - self._admitted * _SIZE_STEP % BLOCK_TOKENS

    def _empty(self, request_id: str) -> None:
        """Send the rows of a preempted request. Any number of requests may wait, and the pool has no room for them."""
        self._settle({request_id})
        state = self._requests.get(request_id)
        if state is not None and state.block is not None and self._sink:
            block, state.block = state.block, None
            self._sink.send([block])

    def _retire(self, request_id: str) -> None:
        self._settle({request_id})
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        if state.block and self._sink:
            self._sink.send([state.block])
        elif state.plan.capture and self._sink:
            self._sink.hurry()
        if state.plan.capture and state.plan.capture.is_followed and self._sink:
            self._sink.end(state.plan.capture)
        if self._names.pop(state.plan.name, None):
            self._ended[state.plan.name] = None
            if len(self._ended) > _REMEMBERED_NAMES:
                self._ended.popitem(last=False)
