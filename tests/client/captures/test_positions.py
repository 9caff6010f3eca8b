"""The positions that users write, and their form in the contract."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import residuum
from residuum.values.selections.layers_and_positions import Positions, layer_selection
from residuum.wire.selection import wanted_positions


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, Positions()),
        ("all", Positions()),
        ("prompt", Positions(phases=("prompt",))),
        ("last_prompt", Positions(ranges=((-1, -1),))),
        (7, Positions(ranges=((7, 7),))),
        (-2, Positions(ranges=((-2, -2),))),
        (slice(None), Positions()),
        (slice(4), Positions(ranges=((0, 3),))),
        (slice(2, None), Positions(ranges=((2, None),))),
        (slice(-4, -1), Positions(ranges=((-4, -2),))),
        (slice(0, None, 4), Positions(every=4)),
        (slice(8, 20, 4), Positions(ranges=((8, 19),), every=4)),
        (range(3, 6), Positions(ranges=((3, 5),))),
        (range(-4, 0), Positions(ranges=((-4, -1),))),
        ([range(-4, 0), 0], Positions(ranges=((-4, -1), (0, 0)))),
        ([3, 1, 2, 9], Positions(ranges=((1, 3), (9, 9)))),
        ([(0, 3), slice(10, 12), (20, None)], Positions(ranges=((0, 3), (10, 11), (20, None)))),
        ([5, 5], Positions(ranges=((5, 5),))),
        (Positions(every=2), Positions(every=2)),
    ],
)
def test_positions(value, expected):
    assert Positions.of(value) == expected
    assert Positions.from_proto(expected.to_proto()) == expected


@pytest.mark.parametrize(
    "value",
    [
        "later", [], slice(3, 3), slice(5, 2), slice(0, 0), range(0), slice(1, None, 2), slice(None, None, -1),
        slice(-4, 0), [slice(0, 9, 3)], [0, *range(2, 200, 2)], 1 << 31, [(5, 2)], "generatd", "",
    ],
)  # fmt: skip
def test_invalid_positions_are_refused(value):
    with pytest.raises(residuum.InvalidRequest):
        Positions.of(value)


@pytest.mark.parametrize("value", [slice(-4, None, 2), slice(-4, -1, 2), range(-4, 0, 2)])
def test_a_step_from_the_prompts_end_is_refused_with_advice(value):
    with pytest.raises(residuum.InvalidRequest, match=r"\[-4, -2\]"):
        Positions.of(value)


def test_a_range_across_the_prompts_end_is_refused_with_advice():
    with pytest.raises(residuum.InvalidRequest, match="into a list"):
        Positions.of(range(-2, 3))


@pytest.mark.parametrize(
    "value", [["a"], [(1, 2, 3)], [None], [0.5], [(0.5, 1)], True, [True, False], np.ones(3, bool)]
)
def test_positions_of_the_wrong_type_are_refused(value):
    with pytest.raises(TypeError):
        Positions.of(value)


@pytest.mark.parametrize("arguments", [{"phases": ["later"]}, {"every": 0}, {"ranges": [(3, 1)]}])
def test_invalid_position_messages_are_refused(arguments):
    with pytest.raises(residuum.InvalidRequest):
        Positions(**arguments)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"every": 1.5}, "whole number"),
        ({"every": True}, "whole number"),
        ({"ranges": [1]}, "pair"),
        ({"ranges": ["a"]}, "pair"),
    ],
)
def test_position_messages_of_the_wrong_type_are_refused(arguments, told):
    with pytest.raises(TypeError, match=told):
        Positions(**arguments)


def test_a_mask_is_refused_with_advice():
    with pytest.raises(TypeError, match=r"np\.flatnonzero\(mask\)"):
        Positions.of(np.array([True, False, True]))


def test_one_phase_may_be_a_string():
    assert Positions(phases="generated") == Positions(phases=("generated",))


def test_a_pair_is_a_range_only_inside_a_list():
    assert Positions.of([(2, 5)]) == Positions(ranges=((2, 5),))
    assert Positions.of((2, 5)) == Positions.of([2, 5]) == Positions(ranges=((2, 2), (5, 5)))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 5))
def test_slices_follow_python(start, length, step):
    start -= start % step
    value = slice(start, start + length, step)
    if not length or start + length == 0:
        return
    selection = Positions.of(value).to_proto()
    assert np.flatnonzero(wanted_positions(selection, 10, 0, 100)).tolist() == list(range(100))[value]


def test_numpy_integers_are_accepted():
    assert list(layer_selection(np.arange(3)).list.layers) == [0, 1, 2]
    assert Positions.of(np.int64(3)) == Positions.of(3)
    assert Positions.of(np.array([3, 4])) == Positions.of([3, 4])
