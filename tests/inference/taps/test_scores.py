"""Which rows of a step are copied to the score board, and to which of its lines."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.taps.plan import Kind, Operation, RequestPlan, ScoreRegion
from inference_svc.taps.points import TapPoints
from inference_svc.taps.scores import Scores
from inference_svc.taps.steps.layout import StepRows
from residuum.v1 import selection_pb2

EVERYWHERE = selection_pb2.PositionSelection()
COLUMNS = 2


class Copies:
    """Notes which row of the buffer goes to which element of the board."""

    def __init__(self):
        self.made = {}

    def copy(self, runs):
        for row, rows, column, columns, line, stride in runs.tolist():
            for at in range(rows):
                for number in range(column, column + columns):
                    element = line + at * stride + number
                    assert element not in self.made
                    self.made[element] = (row + at, number)

    def take(self):
        made, self.made = self.made, {}
        return made


def plan(region):
    operations = tuple(Operation(Kind.SCORE, 0, (0,), EVERYWHERE, column=column) for column in range(COLUMNS))
    return RequestPlan(1, operations=operations, scores=region)


class Worker:
    """Scores of requests whose regions lie one after the other. Every third request is not scored."""

    def __init__(self):
        self.copies = Copies()
        self.scores = Scores(self.copies, TapPoints(0, 1))
        self.regions = {}
        self.offset = 0

    def begin(self, finished, admitted):
        """`admitted`: the first position and the number of positions of each request."""
        plans = []
        for name, first, positions in admitted:
            self.regions[name] = ScoreRegion(self.offset, first, positions, COLUMNS)
            self.offset += positions * COLUMNS
            if len(self.regions) % 3 == 0:
                del self.regions[name]
            plans.append((name, plan(self.regions.get(name))))
        for name in finished:
            self.regions.pop(name, None)
        self.scores.begin_step(finished, plans)

    def step(self, names, firsts, counts):
        """Run a step, and compare what is copied with the definition."""
        rows = StepRows(names, np.array(firsts, dtype=np.int32), np.array(counts, dtype=np.int32))
        self.scores.place(lambda: rows)
        self.scores.send()
        wanted, row = {}, 0
        for name, first, count in zip(names, firsts, counts, strict=True):
            region = self.regions.get(name)
            for position in range(first, first + count):
                at = position - (region.first_position if region else 0)
                if region and 0 <= at < region.positions:
                    wanted |= {region.offset + at * COLUMNS + number: (row, number) for number in range(COLUMNS)}
                row += 1
        assert self.copies.take() == wanted


@pytest.fixture
def worker():
    return Worker()


def test_steps_that_continue_a_batch_do_not_make_its_runs_anew(worker):
    """Also if two batches take turns, as with pipeline parallelism."""
    batches = [["a", "b", "c"], ["d", "e"]]
    worker.begin([], [(name, 4, 50) for names in batches for name in names])
    with mock.patch.object(Scores, "_new_runs", autospec=True, side_effect=Scores._new_runs) as made:
        for position in range(5, 50):
            for names in batches:
                worker.step(names, [position] * len(names), [1] * len(names))
    assert made.call_count == len(batches)


def test_a_request_begins_and_ends_to_be_scored_within_a_batch(worker):
    worker.begin([], [("a", 3, 4), ("b", 5, 20), ("unscored", 0, 9), ("c", 0, 6)])
    for position in range(12):
        worker.step(["a", "b", "unscored", "c"], [position] * 4, [1] * 4)


def test_a_request_with_an_id_that_was_used_before_has_its_own_region(worker):
    worker.begin([], [("a", 0, 30)])
    for position in range(3):
        worker.step(["a"], [position], [1])
    worker.begin(["a"], [])
    worker.begin([], [("a", 0, 30)])
    worker.step(["a"], [3], [1])


numbers = st.integers(0, 9)
happenings = st.one_of(
    st.tuples(st.just("admit"), numbers, st.integers(1, 12)),
    st.tuples(st.just("finish"), numbers),
    st.tuples(st.just("decode"), st.lists(numbers, max_size=4), st.integers(1, 6)),
    st.tuples(st.just("prefill"), st.lists(st.tuples(numbers, st.integers(1, 5)), max_size=3)),
    st.tuples(st.just("preempt"), numbers),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(happenings, max_size=40))
def test_whatever_happens_each_scored_position_reaches_its_line(events):
    worker, places, serial = Worker(), {}, 0  # `places`: the next position of each request
    for what, *how in events:
        chosen = list(places)
        match what:
            case "admit":
                worker.begin([], [(f"r{serial}", *how)])
                places[f"r{serial}"] = 0
                serial += 1
            case "finish" if chosen:
                name = chosen[how[0] % len(chosen)]
                worker.begin([name], [])
                del places[name]
            case "preempt" if chosen:
                places[chosen[how[0] % len(chosen)]] = 0
            case "decode":
                names = list(dict.fromkeys(chosen[number % len(chosen)] for number in how[0])) if chosen else []
                for _ in range(how[1]):
                    worker.step(names, [places[name] for name in names], [1] * len(names))
                    places |= {name: places[name] + 1 for name in names}
            case "prefill" if chosen:
                counts = {chosen[number % len(chosen)]: count for number, count in how[0]}
                worker.step([*counts], [places[name] for name in counts], [*counts.values()])
                places |= {name: places[name] + count for name, count in counts.items()}
