"""Several stores share a ring: a store that gives nothing back leaves the others their reserves."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.shipping.ring import EXTENT_ALIGNMENT
from inference_svc.shipping.worker.allotment import SharedAllotment, least_ring_bytes, reserve_bytes

UNIT = EXTENT_ALIGNMENT


def spans(extents):
    return sorted((extent.offset, extent.offset + extent.nbytes) for extent in extents)


def test_a_single_store_has_the_whole_ring():
    allotment = SharedAllotment(8 * UNIT, ["a"])
    whole = allotment.take(8 * UNIT, "a")
    assert whole == (0, 8 * UNIT)
    assert allotment.take(1, "a") is None
    allotment.give_back(whole)
    assert allotment.bytes_used == 0


def test_half_of_the_ring_is_reserved_and_half_is_shared():
    allotment = SharedAllotment(16 * UNIT, ["a", "b"])
    held = [allotment.take(UNIT, "a") for _ in range(12)]
    assert None not in held
    assert allotment.take(1, "a") is None, "a's reserve and the common half are full"
    theirs = [allotment.take(2 * UNIT, "b") for _ in range(2)]
    assert None not in theirs, "b's reserve is free"
    assert allotment.take(1, "b") is None
    assert allotment.used == {"a": 12 * UNIT, "b": 4 * UNIT}
    taken = spans([*held, *theirs])
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))


def test_fullness_is_that_of_the_store_with_the_least_room():
    alone = SharedAllotment(16 * UNIT, ["a"])
    alone.take(4 * UNIT, "a")
    assert alone.fullness == 4 / 16
    two = SharedAllotment(16 * UNIT, ["a", "b"])
    for _ in range(4):
        two.take(UNIT, "a")
    assert two.fullness == 0, "a's reserve is full, but the common half is free"
    two.take(6 * UNIT, "a")
    assert two.fullness == 6 / 8
    two.take(4 * UNIT, "b")
    assert two.fullness == 6 / 8


@pytest.mark.parametrize("nbytes", [0, -1, 8 * UNIT + 1])
def test_sizes_that_can_never_be_allocated_are_refused(nbytes):
    allotment = SharedAllotment(16 * UNIT, ["a", "b"])
    assert allotment.largest == 8 * UNIT
    with pytest.raises(ValueError, match="this ring allows 1 to 2048 bytes"):
        allotment.take(nbytes, "a")


@given(st.integers(1, 1 << 20), st.integers(1, 9))
def test_the_least_ring_has_room_for_an_extent_in_each_reserve(nbytes, stores):
    assert reserve_bytes(least_ring_bytes(nbytes, stores), stores) >= nbytes


@given(
    st.integers(2, 5),
    st.integers(40, 400),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40), st.booleans()), max_size=150),
)
def test_stores_that_give_nothing_back_leave_the_others_their_reserves(count, units, steps):
    """Store 0 gives everything back, the others give back nothing. Store 0 gets any extent that fits its reserve."""
    names = [f"s{at}" for at in range(count)]
    allotment = SharedAllotment(units * UNIT, names)
    reserve = reserve_bytes(units * UNIT, count)
    held, own = [], []
    for at, size, returns in steps:
        name = names[at % count]
        nbytes = size * UNIT - 7
        if nbytes > allotment.largest:
            continue
        extent = allotment.take(nbytes, name)
        if extent is not None:
            (own if name == "s0" else held).append(extent)
        if returns and own:
            allotment.give_back(own.pop(0))
        taken = spans([*held, *own])
        assert all(end <= start for (_, end), (start, _) in pairwise(taken)), "extents do not overlap"
        assert not taken or 0 <= taken[0][0] <= taken[-1][1] <= units * UNIT
        assert allotment.bytes_used == sum(-(-extent.nbytes // UNIT) * UNIT for extent in [*held, *own])
    for extent in own:
        allotment.give_back(extent)
    assert allotment.take(reserve, "s0") is not None, "s0's reserve is free, wherever the other extents are"
