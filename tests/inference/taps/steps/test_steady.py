"""A steady batch, laid out at once, gets the same layout as request by request."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.plan import Kind, Operation, RequestPlan
from inference_svc.taps.points import TapPoints
from inference_svc.taps.steps.layout import StepPlanner, StepRows
from inference_svc.taps.steps.runtime import TapRuntime
from inference_svc.taps.steps.steady import SteadyBatch
from residuum.v1 import capture_pb2
from tests.inference.taps_support import CPU, GENERATED, PROMPT, capture, select

LAYERS, HIDDEN, PROMPT_TOKENS = 3, 4, 2
POST, ATTN = capture_pb2.SITE_RESID_POST, capture_pb2.SITE_ATTN_OUT


class Worker:
    """A runtime whose tap records layouts and whose sink gives blocks back at once."""

    def __init__(self, *, steadies: bool, looks_at_each_position: bool = False) -> None:
        self.pool = BlockPool(BlockPool.rows_needed(64, 16, 2 * LAYERS), HIDDEN, torch.float32, CPU, 0)
        self.runtime = TapRuntime(TapPoints(0, LAYERS), self, self.pool, self)
        self.lines, self.sent, self.gathering, self.lost, self.published = [], [], [], [], []
        self.armed = self.hurries = 0
        if not steadies:
            self.runtime._lay_out = self._plan_each_position if looks_at_each_position else self.runtime._plan

    def _plan_each_position(self, rows):
        """Lay out a step without any assumption about positions that have the same treatment."""
        planner, row = StepPlanner(self.pool), 0

        def add(state, steering, row, first, count):
            if first > state.next_position:
                planner._skip(state, first)
            planner._add_many(state, steering.plan, row, first, count)

        planner._add = add
        for request_id, first, count in zip(rows.request_ids, rows.firsts.tolist(), rows.counts.tolist(), strict=True):
            if request_id in self.runtime._requests:
                planner.add_request(self.runtime._requests[request_id], row, first, count)
            row += count
        return planner.finish()

    def arm(self, layout):
        self.armed += 1
        programs = [layout.programs[index] for index in layout.lines[:, 1]]
        self.lines = sorted(
            (row, id(program), place, stride if place >= 0 else 0)
            for (row, _, place, stride), program in zip(layout.lines.tolist(), programs, strict=True)
        )
        self.kept = programs  # keeps interned programs alive

    def disarm(self):
        self.lines = []

    def send(self, blocks):
        for block in blocks:
            self.sent.append((block.capture.capture_id, block.first_row, list(block.positions)))
            self.gathering.append(block.may_gather)
            self.pool.give_back(block)

    def publish(self, *, may_be_last):
        self.published.append(may_be_last)

    def hurry(self):
        self.hurries += 1

    def lose(self, capture, positions, reason, detail):
        self.lost.append((capture.capture_id, list(positions)))

    def step(self, rows, admitted=(), finished=()):
        self.runtime.begin_step(finished, admitted)
        names, firsts, counts = zip(*rows, strict=True)
        self.runtime.place(lambda: StepRows(list(names), np.array(firsts), np.array(counts)))
        self.runtime.finish_step()


selections = st.sampled_from(
    [
        *(select(), select(phases=(PROMPT,)), select(phases=(GENERATED,)), select(every=3)),
        *(select((-1, None)), select((-1, -1)), select((0, 0), (6, None)), select((1, 4)), select((-2, 40))),
        *(select((1, 9), phases=(GENERATED,)), select((3, None), every=2), select((0, None))),
    ]
)
captures = st.none() | st.builds(
    lambda layers, sites, positions, interval: capture(
        layers=sorted(layers), sites=sorted(sites), positions=positions, flush_interval=interval
    ),
    st.sets(st.integers(0, LAYERS - 1), min_size=1),
    st.sets(st.sampled_from([POST, ATTN]), min_size=1),
    selections,
    st.sampled_from([1, 5, 32]),
)
operations = st.lists(
    st.builds(lambda row, where: Operation(Kind.ADD, row, (0, 2), where, 2.0), st.integers(0, 3), selections),
    max_size=2,
)
requests = st.tuples(captures, operations, st.booleans())
happenings = st.one_of(
    st.tuples(st.just("go_on"), st.integers(1, 70)),
    st.tuples(st.just("admit"), requests),
    st.tuples(st.just("finish"), st.integers(0, 7)),
    st.tuples(st.just("preempt"), st.integers(0, 7)),
    st.tuples(st.just("change"), st.integers(0, 7)),
    st.tuples(st.just("swap"), st.integers(0, 7)),
    st.tuples(st.just("compute_two"), st.integers(0, 7)),
    st.tuples(st.just("compute_again"), st.integers(0, 7)),
    st.tuples(st.just("take_turns"), st.integers(1, 3)),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 150), captures, operations), min_size=1, max_size=3),
    st.integers(0, 40),
    st.lists(st.integers(1, 64), min_size=1, max_size=4),
)
def test_prompts_in_stretches_are_laid_out_as_position_by_position(asked, cached, chunks):
    """Prompts of any length, in chunks, whose first tokens may come from the prefix cache."""
    workers = Worker(steadies=False), Worker(steadies=False, looks_at_each_position=True)
    plans = [
        (f"r{number}", RequestPlan(length, replace(what, capture_id=f"r{number}") if what else None, tuple(steers)))
        for number, (length, what, steers) in enumerate(asked)
    ]
    firsts = {name: min(cached, plan.prompt_tokens - 1) for name, plan in plans}
    admitted = plans
    for step in range(40):
        size = chunks[step % len(chunks)]
        rows = [
            (
                name,
                firsts[name],
                min(size, plan.prompt_tokens - firsts[name]) if firsts[name] < plan.prompt_tokens else 1,
            )
            for name, plan in plans
        ]
        rows = [(name, first, min(count, 21)) for name, first, count in rows]
        for worker in workers:
            worker.step(rows, admitted=admitted)
        one, other = workers
        assert one.lines == other.lines
        assert one.sent == other.sent
        assert one.lost == other.lost
        admitted, firsts = (), {name: first + count for name, first, count in rows}
        if all(firsts[name] > plan.prompt_tokens + 2 for name, plan in plans):
            break


class Workers:
    """Workers that get the same steps. All but the first lay out every request separately."""

    def __init__(self):
        self.workers = (
            Worker(steadies=True),
            Worker(steadies=False),
            Worker(steadies=False, looks_at_each_position=True),
        )
        self.running: dict[str, int] = {}  # name -> next position
        self.count = 0
        self.batches = 1

    def step(self, rows, **options):
        for worker in self.workers:
            worker.step(rows, **options)
        steady, *others = self.workers
        for other in others:
            assert steady.lines == other.lines
            assert steady.sent == other.sent

    def compute(self, more=(), **options):
        """Compute a token of each running request, and the given rows. With several batches, a step computes one."""
        rows = [*((name, first, 1) for name, first in self.running.items()), *more]
        for batch in range(self.batches):
            if rows[batch :: self.batches]:
                self.step(rows[batch :: self.batches], **options)
                options = {}
        self.running = {name: first + 1 for name, first in self.running.items()}

    def some(self, number):
        return list(self.running)[number % len(self.running)]

    def admit(self, *wanted):
        """Admit requests in one step."""
        names, admitted = [], []
        for what, steers, is_bare in wanted:
            name, self.count = f"r{self.count}", self.count + 1
            names.append(name)
            plan = RequestPlan(PROMPT_TOKENS, replace(what, capture_id=name) if what else None, tuple(steers), name)
            admitted += [] if is_bare else [(name, plan)]
        self.compute([(name, 0, PROMPT_TOKENS) for name in names], admitted=admitted)
        self.running |= dict.fromkeys(names, PROMPT_TOKENS)

    def go_on(self, steps):
        for _ in range(steps):
            self.compute()

    def finish(self, number):
        name = self.some(number)
        del self.running[name]
        self.compute(finished=[name])
        if not self.running:
            for worker in self.workers:
                worker.runtime.begin_step([name], [])

    def preempt(self, number):
        name = self.some(number)
        self.step([(name, 0, self.running[name])])

    def compute_two(self, number):
        name = self.some(number)
        self.step([(other, first, 1 + (other == name)) for other, first in self.running.items()])
        self.running = {other: first + 1 + (other == name) for other, first in self.running.items()}

    def compute_again(self, number):
        name = self.some(number)
        self.step([(other, first - (other == name), 1) for other, first in self.running.items()])
        self.running = {other: first + (other != name) for other, first in self.running.items()}

    def change(self, number):
        assert len({worker.runtime.change_steering(self.some(number), ()) for worker in self.workers}) == 1

    def take_turns(self, number):
        """From now on, divide the requests into that many batches."""
        self.batches = number

    def swap(self, number):
        name = self.some(number)  # vLLM moves another request into its row
        self.running[name] = self.running.pop(name)


@settings(deadline=None, max_examples=60)
@given(st.lists(requests, min_size=1, max_size=5), st.booleans(), st.lists(happenings, max_size=12))
def test_a_steady_batch_is_laid_out_as_one_request_after_the_other(begin, together, then):
    pair = Workers()
    for wanted in [begin] if together else [[each] for each in begin]:
        pair.admit(*wanted)
    for what, value in then:
        if pair.running or what in {"admit", "go_on", "take_turns"}:
            getattr(pair, what)(value)
    for worker in pair.workers:
        worker.runtime.begin_step(list(pair.running), [])
    assert all(worker.sent == pair.workers[0].sent for worker in pair.workers)
    assert all(worker.pool.free_rows == len(worker.pool.memory) for worker in pair.workers)


def worker_that_only_steers():
    """A worker that has computed the prompt of the request "r"."""
    worker = Worker(steadies=True)
    plan = RequestPlan(PROMPT_TOKENS, None, (Operation(Kind.ADD, 0, (0,), select()),), "r")
    worker.step([("r", 0, PROMPT_TOKENS)], admitted=[("r", plan)])
    return worker


def test_a_batch_that_is_only_steered_is_armed_once():
    worker = worker_that_only_steers()
    for position in range(2, 40):
        worker.step([("r", position, 1)])
    assert worker.armed == 2, "armed once for the prompt, and once for all generated tokens"
    assert len(worker.runtime._steady) == 1


@pytest.mark.parametrize("where", [select((-1, None)), select((-1, -1)), select((0, 5)), select((4, None))])
def test_replies_are_steady_as_soon_as_their_positions_have_one_treatment(where):
    worker = Worker(steadies=True)
    worker.step([("r", 0, PROMPT_TOKENS)], admitted=[("r", RequestPlan(PROMPT_TOKENS, capture(positions=where)))])
    for position in range(2, 10):
        worker.step([("r", position, 1)])
    assert len(worker.runtime._steady) == 1


def test_steady_batches_may_take_turns():
    """With pipeline parallelism, a step computes only the requests of its batch."""
    pair = Workers()
    pair.admit(*((capture(layers=(0, 1)), (), False) for _ in range(6)))
    pair.batches = 3
    with mock.patch.object(SteadyBatch, "__init__", autospec=True, side_effect=SteadyBatch.__init__) as make:
        pair.go_on(40)
        assert make.call_count == 3
        pair.finish(0)
        pair.go_on(2)
        assert make.call_count == 3 + 1, "only the batch that lacks the request"


def test_a_request_that_ends_or_changes_affects_only_its_batch():
    worker = Worker(steadies=True)
    names = ["a", "b", "c"]
    plans = [(name, RequestPlan(PROMPT_TOKENS, capture(name), (), name)) for name in names]
    worker.step([(name, 0, PROMPT_TOKENS) for name in names], admitted=plans)
    for position in range(2, 5):
        worker.step([("a", position, 1), ("b", position, 1)])
        worker.step([("c", position, 1)])
    with mock.patch.object(SteadyBatch, "__init__", autospec=True, side_effect=SteadyBatch.__init__) as make:
        worker.step([("c", 5, 1)], finished=["b"])
        assert make.call_count == 0
        worker.step([("a", 5, 1)])
        assert make.call_count == 1
        assert worker.runtime.change_steering("c", ()) == 6
        worker.step([("a", 6, 1)])
        assert make.call_count == 1
        worker.step([("c", 6, 1)])
        assert make.call_count == 2
    assert ("b", [2, 3, 4]) in [(name, positions) for name, _, positions in worker.sent]


def test_a_steered_batch_is_armed_again_after_one_without_work():
    worker = worker_that_only_steers()
    for position in range(2, 6):
        worker.step([("r", position, 1)])
        assert worker.lines
        worker.step([("bare", position, 1)])
        assert not worker.lines


def test_only_some_steady_batches_are_kept():
    worker = Worker(steadies=True)
    names = [f"r{number}" for number in range(12)]
    plans = [(name, RequestPlan(PROMPT_TOKENS, capture(name))) for name in names]
    worker.step([(name, 0, PROMPT_TOKENS) for name in names], admitted=plans)
    for name in names:
        worker.step([(name, PROMPT_TOKENS, 1)])
        if name != "r0":
            worker.step([("r0", PROMPT_TOKENS + int(name[1:]), 1)])
    kept = [batch.following._request_ids for batch in worker.runtime._steady]
    assert kept == [["r5"], ["r6"], ["r7"], ["r8"], ["r9"], ["r10"], ["r11"], ["r0"]], "those that were used last"
    worker.step([(name, PROMPT_TOKENS + (12 if name == "r0" else 1), 1) for name in names])
    worker.runtime.begin_step(names, ())
    found = {name: positions for name, _, positions in worker.sent[len(names) :]}
    assert found == {name: list(range(2, 15)) if name == "r0" else [2, 3] for name in names}


def test_requests_that_began_together_may_change_places():
    pair = Workers()
    pair.admit(*((capture(layers=layers), (), False) for layers in ((0, 1), (2,))))
    for change in (pair.compute, lambda: pair.swap(0), lambda: pair.compute_two(0), lambda: pair.compute_again(1)):
        pair.go_on(3)
        change()
    pair.go_on(3)


@pytest.mark.parametrize(("interval", "gathers"), [(32, True), (31, False), (1, False)])
def test_only_blocks_of_a_reply_whose_rows_are_not_asked_for_at_once_may_gather(interval, gathers):
    worker = Worker(steadies=True)
    plan = RequestPlan(PROMPT_TOKENS, capture(flush_interval=interval))
    worker.step([("r", 0, PROMPT_TOKENS)], admitted=[("r", plan)])
    assert worker.gathering == [False], "the prompt's"
    for position in range(2, 70):
        worker.step([("r", position, 1)])
    assert set(worker.gathering[1:]) == {gathers}


def test_every_step_publishes_also_those_without_rows():
    """The last blocks leave in a step without requests."""
    worker = Worker(steadies=True)
    worker.step([("r", 0, 2)], admitted=[("r", RequestPlan(2, capture("r")))])
    for finished in ["r"], []:  # vLLM runs no model in these steps
        worker.runtime.begin_step(finished, ())
        worker.runtime.finish_step()
    assert worker.published == [False, True, True]


def test_a_reply_that_ends_with_a_full_block_hurries_it():
    """Otherwise its rows, and with them the capture's end, would wait for those of other requests."""
    for tokens, hurries in ((31, 0), (32, 1), (33, 0)):
        worker = Worker(steadies=True)
        plan = RequestPlan(PROMPT_TOKENS, capture("a", range(LAYERS), select(phases=[GENERATED])))
        worker.step([("a", 0, PROMPT_TOKENS)], [("a", plan)])
        worker.runtime._requests["a"].first_generated = 32
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + tokens):
            worker.step([("a", position, 1)])
        worker.runtime.begin_step(["a"], [])
        assert worker.hurries == hurries
        assert sum(len(positions) for *_, positions in worker.sent) == tokens


def test_a_request_that_captures_nothing_hurries_nothing():
    worker = Worker(steadies=True)
    plan = RequestPlan(PROMPT_TOKENS, operations=(Operation(Kind.ADD, 0, (0,), select()),))
    worker.step([("a", 0, PROMPT_TOKENS)], [("a", plan)])
    worker.runtime.begin_step(["a"], [])
    assert worker.hurries == 0
