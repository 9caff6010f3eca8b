from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from store_svc.captures.positions import Positions

sets = st.sets(st.one_of(st.integers(0, 80), st.integers(1000, 1050), st.integers(0, 2**32 - 1)), max_size=60)


def positions(numbers: set[int]) -> Positions:
    return Positions.of(sorted(numbers))


def numbers(these: Positions) -> set[int]:
    return {number for first, last in these.runs() for number in range(first, last + 1)}


@settings(deadline=None)
@given(sets, sets)
def test_sets_behave_as_sets(a: set[int], b: set[int]) -> None:
    assert numbers(positions(a)) == a
    assert numbers(positions(a) | positions(b)) == a | b
    assert numbers(positions(a) & positions(b)) == a & b
    assert numbers(positions(a) - positions(b)) == a - b
    assert len(positions(a)) == len(a)
    assert bool(positions(a)) == bool(a)
    assert all((number in positions(a)) == (number in a) for number in a | b)


@settings(deadline=None)
@given(sets, sets)
def test_equal_sets_are_equal_whatever_their_construction(a: set[int], b: set[int]) -> None:
    assert positions(a) | positions(b) == positions(a | b)
    assert hash(positions(a) | positions(b)) == hash(positions(a | b))
    assert (positions(a) == positions(b)) == (a == b)


@settings(deadline=None)
@given(sets)
def test_runs_ascend_and_do_not_touch(a: set[int]) -> None:
    runs = positions(a).runs()
    assert all(first <= last for first, last in runs)
    assert all(left[1] + 1 < right[0] for left, right in pairwise(runs))
    assert Positions.of_runs(runs) == positions(a)


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=3000))
def test_where_returns_the_true_positions(mask: list[bool]) -> None:
    assert numbers(Positions.where(np.array(mask, dtype=np.bool_))) == {at for at, on in enumerate(mask) if on}


@settings(deadline=None)
@given(sets)
def test_filter_keeps_the_selected_positions(a: set[int]) -> None:
    kept = positions(a).filter(lambda first, count: np.arange(first, first + count) % 3 == 0)
    assert numbers(kept) == {number for number in a if number % 3 == 0}
