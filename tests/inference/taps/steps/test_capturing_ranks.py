"""The ranks of a tensor-parallel group divide the captures, and agree without a message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.taps.plan import Capture, Kind, Operation, RequestPlan
from inference_svc.taps.points import TapPoints
from inference_svc.taps.steps.capturing_ranks import CapturingRanks
from inference_svc.taps.steps.runtime import TapRuntime
from inference_svc.taps.steps.runtimes import TapRuntimes
from tests.inference.taps_support import select

CAPTURE = Capture("c", 0, (0,), select())
CAPTURING = RequestPlan(4, CAPTURE)
STEERED = RequestPlan(4, name="steered")


def owners(group, name):
    return [rank for rank, ranks in group.items() if ranks.is_own(name)]


def test_a_capture_goes_to_the_rank_with_the_fewest_open_ones():
    group = {rank: CapturingRanks([0, 1, 2], rank) for rank in range(3)}

    def step(finished, admitted):
        for ranks in group.values():
            ranks.begin_step(finished, admitted)

    step([], [(name, CAPTURING) for name in "abcd"])
    assert [owners(group, name) for name in "abcd"] == [[0], [1], [2], [0]]
    step(["c"], [("e", CAPTURING), ("b", CAPTURING), ("f", CAPTURING)])  # b was preempted, and is reported again
    assert [owners(group, name) for name in "abcdef"] == [[0], [1], [], [0], [2], [1]]
    assert {ranks.open_captures for ranks in group.values()} == {5}


def test_captures_one_after_the_other_go_to_all_ranks_in_turn():
    group = {rank: CapturingRanks([0, 1, 2], rank) for rank in range(3)}
    taken = []
    for before, name in (("", "a"), ("a", "b"), ("b", "c"), ("c", "d")):
        for ranks in group.values():
            ranks.begin_step([before], [(name, CAPTURING)])
        taken += owners(group, name)
    assert taken == [0, 1, 2, 0]


def test_requests_without_a_capture_have_no_rank():
    group = {rank: CapturingRanks([0, 1], rank) for rank in range(2)}
    for ranks in group.values():
        ranks.begin_step([], [("plain", None), ("steered", STEERED), ("captured", CAPTURING)])
        ranks.begin_step(["plain", "unknown"], [])
    assert [owners(group, name) for name in ("plain", "steered", "captured")] == [[], [], [0]]


def test_only_ranks_that_can_capture_do():
    group = {rank: CapturingRanks([1], rank) for rank in range(2)}
    nobody = CapturingRanks([], 0)
    for ranks in (*group.values(), nobody):
        ranks.begin_step([], [("a", CAPTURING), ("b", CAPTURING)])
        ranks.begin_step(["a"], [])
    assert owners(group, "b") == [1]
    assert not nobody.is_own("b")


@pytest.mark.parametrize("scores", [False, True])
def test_the_runtime_of_a_rank_scores_and_captures_what_is_its_own(scores):
    group = CapturingRanks([0, 1], 1)
    score = Operation(Kind.SCORE, 0, (0,), select())
    admitted = [
        (name, RequestPlan(2, capture, (score,)))
        for name, capture in (("scored", None), ("another's", CAPTURE), ("own", CAPTURE))
    ]
    runtime = TapRuntime(TapPoints(0, 1), tap=None, pool=object(), sink=None, ranks=group, scores=scores)
    runtimes = TapRuntimes([runtime], ranks=group)
    runtimes.begin_step([], admitted)
    assert runtime.open_requests == (3 if scores else 1)
    assert runtimes.open_requests == (3 if scores else 2), "another rank's capture is open, too"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60), st.integers(1, 4))
def test_no_rank_has_two_more_captures_than_another_when_they_begin(events, size):
    group, running = {rank: CapturingRanks(range(size), rank) for rank in range(size)}, set()
    for begins, number in events:
        name = f"r{number}"
        before = [sum(ranks.is_own(other) for other in running) for ranks in group.values()]
        new = begins and name not in running
        for ranks in group.values():
            ranks.begin_step([] if begins else [name], [(name, CAPTURING)] if begins else [])
        (running.add if begins else running.discard)(name)
        assert all(len(owners(group, other)) == 1 for other in running)
        if new:
            assert before[owners(group, name)[0]] == min(before)
