"""Changes of steering in the worker: each holds from the first position that has not been computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.taps.plan import Kind, Operation, RequestPlan
from inference_svc.taps.points import TapPoints
from inference_svc.taps.steps import runtime as runtime_module
from inference_svc.taps.steps.layout import NOWHERE, PLACE, PROGRAM, ROW, RequestState, StepRows
from inference_svc.taps.steps.programs import Step
from inference_svc.taps.steps.runtime import TapRuntime
from tests.inference.taps_support import GENERATED, PROMPT, Worker, capture, is_wanted, select

HIDDEN, LAYERS = 4, 3
VECTORS = np.eye(4, HIDDEN, dtype=np.float32)


def add(row=0, scale=1.0, positions=None, layers=(0,)):
    return Operation(Kind.ADD, row, tuple(layers), positions or select(), scale)


class Engine:
    """A worker's runtime. It records the operations of each row of a step. Its tap stays armed, as on a device."""

    def __init__(self):
        self.runtime = TapRuntime(TapPoints(0, LAYERS), self, None, None)
        self.layout = None

    def arm(self, layout):
        self.layout = layout

    def disarm(self):
        self.layout = None

    def step(self, *rows, admitted=(), finished=()):
        """Run a step; return the operations of each row, for each request (ID, first position, count) in order."""
        self.runtime.begin_step(finished, admitted)
        names, firsts, counts = zip(*rows, strict=True) if rows else ((), (), ())
        self.runtime.place(lambda: StepRows(names, firsts, counts))
        self.runtime.finish_step()
        steps = [()] * sum(counts)
        if self.layout:
            for line in self.layout.lines:
                assert line[PLACE] == NOWHERE
                assert not steps[line[ROW]], "a row is steered once"
                steps[line[ROW]] = self.layout.programs[line[PROGRAM]].steps
        return steps

    def change(self, *operations, name="n"):
        return self.runtime.change_steering(name, operations)


@pytest.fixture
def engine():
    return Engine()


def plan(*operations, prompt=4, name="n", **options):
    return RequestPlan(prompt, operations=operations, name=name, **options)


def scales(steps):
    """The scale of each row's only operation; None for rows without operations."""
    return [row[0].scale if row else None for row in steps]


def test_a_change_applies_from_the_first_position_that_was_not_computed(engine):
    assert scales(engine.step(("r", 0, 4), admitted=[("r", plan(add(scale=1)))])) == [1] * 4
    assert scales(engine.step(("r", 4, 1))) == [1]
    assert engine.change(add(scale=2)) == 5
    assert scales(engine.step(("r", 5, 1))) == [2]
    assert scales(engine.step(("r", 6, 1))) == [2]


def test_recomputed_positions_keep_their_steering(engine):
    engine.step(("r", 0, 4), admitted=[("r", plan(add(scale=1)))])
    engine.change(add(scale=2))
    engine.step(("r", 4, 1))
    engine.change(add(scale=3))
    engine.step(("r", 5, 1))
    assert scales(engine.step(("r", 0, 3))) == [1] * 3  # preempted
    assert scales(engine.step(("r", 3, 4))) == [1, 2, 3, 3]
    assert scales(engine.step(("r", 7, 1))) == [3]


def test_a_change_in_the_middle_of_a_prompt_or_of_a_second_computation(engine):
    engine.step(("r", 0, 3), admitted=[("r", plan(add(scale=1), prompt=8))])
    assert engine.change(add(scale=2)) == 3
    assert scales(engine.step(("r", 3, 3))) == [2] * 3
    engine.step(("r", 0, 2))  # preempted
    assert engine.change(add(scale=3)) == 6, "positions computed before the preemption keep their steering"
    assert scales(engine.step(("r", 2, 6))) == [1, 2, 2, 2, 3, 3]


def test_of_two_changes_at_the_same_position_the_later_holds(engine):
    engine.step(("r", 0, 4), admitted=[("r", plan(add(scale=1)))])
    assert [engine.change(add(scale=2)), engine.change(add(scale=3))] == [4, 4]
    assert scales(engine.step(("r", 4, 1))) == [3]
    assert scales(engine.step(("r", 0, 5))) == [1, 1, 1, 1, 3]


def test_steering_is_switched_off_and_on_again(engine):
    engine.step(("r", 0, 4), admitted=[("r", plan())])
    assert engine.change(add(scale=2), add(1, scale=5)) == 4
    assert [step.scale for step in engine.step(("r", 4, 1))[0]] == [2, 5]
    engine.change()
    assert scales(engine.step(("r", 5, 1))) == [None]
    assert engine.layout is None, "the tap is idle in a step without steering"
    engine.change(add(scale=4))
    assert scales(engine.step(("r", 6, 1))) == [4]


def test_positions_of_a_change_are_counted_in_the_whole_sequence(engine):
    engine.step(("r", 0, 4), admitted=[("r", plan())])
    engine.change(add(scale=1, positions=select((-1, 5))), add(1, scale=9, positions=select(phases=(PROMPT,))))
    assert scales(engine.step(("r", 4, 1))) == [1]
    assert scales(engine.step(("r", 0, 7))) == [None, None, None, None, 1, 1, None]


def test_a_change_before_the_request_applies_from_its_start(engine):
    assert engine.change(add(scale=2)) == 0
    assert engine.change(add(scale=3)) == 0
    assert scales(engine.step(("r", 0, 4), admitted=[("r", plan(add(scale=1)))])) == [3] * 4
    assert engine.change(add(scale=4)) == 4
    assert scales(engine.step(("r", 0, 5))) == [3] * 4 + [4]


def test_a_change_of_a_request_that_never_starts_can_be_forgotten(engine):
    engine.change(add(scale=2))
    engine.change(add(scale=3), name="other")
    engine.runtime.forget(["n", "never heard of"])
    rows = engine.step(("r", 0, 1), ("o", 0, 1), admitted=[("r", plan()), ("o", plan(name="other"))])
    assert scales(rows) == [None, 3]


def test_a_change_of_an_ended_request_returns_none(engine):
    engine.step(("r", 0, 4), admitted=[("r", plan(add()))])
    engine.step(finished=["r"])
    assert engine.change(add(scale=2)) is None
    assert engine.runtime.open_requests == 0


def test_the_number_of_remembered_requests_is_limited(engine, monkeypatch):
    monkeypatch.setattr(runtime_module, "_REMEMBERED_NAMES", 1)
    for name in "ab":
        engine.step((name, 0, 1), admitted=[(name, plan(name=name))])
    engine.step(finished=["a", "b"])
    assert [engine.change(name=name) for name in "ab"] == [0, None]


def test_a_request_that_is_announced_again_keeps_its_changes(engine):
    first = plan(add(scale=1))
    engine.step(("r", 0, 4), admitted=[("r", first)])
    engine.change(add(scale=2))
    assert scales(engine.step(("r", 0, 5), admitted=[("r", first)])) == [1] * 4 + [2]


def test_other_requests_of_a_batch_keep_their_steering(engine):
    engine.step(("a", 0, 4), ("b", 0, 4), admitted=[("a", plan(add(scale=1))), ("b", plan(add(scale=1), name="m"))])
    engine.change(add(scale=2))
    assert scales(engine.step(("b", 4, 1), ("a", 4, 1))) == [1, 2]


# ------------------------------------------------------------------------------------------ any schedule, any changes


@dataclass
class Reference:
    """The expected operations of each position, in a list: those that held when it was first computed."""

    prompt: int
    operations: tuple
    in_force: list = field(default_factory=list)

    def compute(self, first, count):
        """Return the steps of each row, and which of them are new."""
        stop = first + count
        self.in_force += [self.operations] * (stop - len(self.in_force))
        return [
            tuple(
                Step.of(operation)
                for operation in self.in_force[position]
                if is_wanted(operation.positions, self.prompt, position)
            )
            for position in range(first, stop)
        ]


selections = st.builds(
    lambda ranges, phases, every: select(*ranges, phases=phases, every=every),
    st.lists(st.tuples(st.integers(-6, 12), st.none()), max_size=1),
    st.sampled_from([(), (), (PROMPT,), (GENERATED,)]),
    st.sampled_from([0, 0, 2, 3]),
)
steerings = st.lists(
    st.builds(
        add, st.integers(0, 3), st.sampled_from([1.0, 2.0, 3.0]), selections, st.sampled_from([(0,), (1, 2), (0, 2)])
    ),
    max_size=3,
).map(tuple)
actions = st.one_of(
    st.tuples(st.just("compute"), st.integers(1, 9)),
    st.tuples(st.just("compute"), st.just(1)),
    st.tuples(st.just("preempt"), st.integers(0, 20)),  # positions in its own cached blocks need not be computed
    st.tuples(st.just("change"), steerings),
)


@settings(deadline=None, max_examples=300)
@given(
    st.integers(1, 12),
    steerings,
    st.lists(actions, max_size=40),
    st.booleans(),
)
def test_each_position_keeps_the_steering_of_its_first_computation(prompt, start, happenings, early):
    engine, reference = Engine(), Reference(prompt, start)
    request = RequestPlan(prompt, None, start, "n")
    known, computed, is_new = prompt, 0, True
    if early:
        reference.operations = (add(3, 7.0),)
        assert engine.change(*reference.operations) == 0
    for what, value in happenings:
        if what == "change":
            ahead = len(reference.in_force)
            assert engine.change(*value) == ahead
            reference.operations = value
        elif what == "preempt":
            computed = min(computed, value)
        else:
            count = min(value, known - computed)
            rows = engine.step(("r", computed, count), admitted=[("r", request)] if is_new else [])
            assert rows == reference.compute(computed, count)
            computed, is_new = computed + count, False
            known += computed == known


@settings(deadline=None)
@given(
    st.integers(1, 12),
    st.lists(actions, max_size=30),
    selections,
    st.booleans(),
)
def test_captures_of_a_changed_request_have_each_position_once(prompt, happenings, positions, before_steering):
    worker = Worker(hidden=HIDDEN, layers=range(LAYERS), vectors=VECTORS)
    wanted = capture("c", layers=range(LAYERS), positions=positions, before_steering=before_steering)
    request = RequestPlan(prompt, wanted, (), "n")
    known, computed, reached, is_new, shift = prompt, 0, 0, True, 0.0
    shifts = []
    for what, value in happenings:
        if what == "change":
            shift += 1.0
            worker.runtime.change_steering("n", (add(scale=shift, layers=range(LAYERS)),))
        elif what == "preempt":
            computed = min(computed, value)
        else:
            count = min(value, known - computed)
            shifts += [shift] * (computed + count - len(shifts))
            tensors = {
                layer: (torch.arange(computed, computed + count).repeat(HIDDEN, 1).T.float(), None)
                for layer in range(LAYERS)
            }
            worker.step([("r", computed, count)], admitted=[("r", request)] if is_new else [], tensors=tensors)
            for hidden, _ in tensors.values():
                assert hidden[:, 0].tolist() == [at + shifts[at] for at in range(computed, computed + count)]
            computed, is_new = computed + count, False
            known, reached = known + (computed == known), max(reached, computed)
    worker.step([], finished=["r"])
    rows = {
        (layer, position): row
        for chunk in worker.ring.take()
        for layer, of_layer in zip(chunk.header.layers, chunk.rows, strict=True)
        for position, row in zip(chunk.positions, of_layer, strict=True)
    }
    expected = [at for at in range(reached) if is_wanted(positions, prompt, at)]
    assert sorted(rows) == [(layer, position) for layer in range(LAYERS) for position in expected]
    assert not worker.ring.losses
    for (_, position), row in rows.items():
        moved = 0.0 if before_steering else shifts[position]
        assert row.tolist() == [position + moved] + [position] * (HIDDEN - 1)


# ------------------------------------------------------------------------------------------------------- hot path


def test_a_request_that_was_never_changed_is_not_divided(monkeypatch):
    monkeypatch.setattr(
        RequestState, "divide", lambda *_: pytest.fail("this would slow down every step of every request")
    )
    engine = Engine()
    engine.step(("r", 0, 4), admitted=[("r", plan(add()))])
    engine.step(("r", 0, 5))
    engine.change(add(scale=2))
    engine.step(("r", 5, 1))  # nor does it divide a request after its change
