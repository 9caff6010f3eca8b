"""Selections follow selection.proto, compared with a slow reference implementation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from residuum.v1 import capture_pb2, selection_pb2
from residuum.wire.limits import MAX_RANGES
from residuum.wire.selection import (
    borders,
    captured_positions,
    check_positions,
    expected_rows,
    resolve_layers,
    selects_any,
    to_ranges,
    wanted_positions,
)

PROMPT, GENERATED = selection_pb2.PHASE_PROMPT, selection_pb2.PHASE_GENERATED


def by_the_words(selection, prompt_tokens, position):
    """Every condition that is set must hold."""
    if selection.phases:
        phase = PROMPT if position < prompt_tokens else GENERATED
        if phase not in selection.phases:
            return False
    if selection.ranges and not any(in_range(item, prompt_tokens, position) for item in selection.ranges):
        return False
    return selection.every in (0, 1) or position % selection.every == 0


def in_range(item, prompt_tokens, position):
    first = item.first if item.first >= 0 else prompt_tokens + item.first
    if not item.HasField("last"):
        return position >= first
    last = item.last if item.last >= 0 else prompt_tokens + item.last
    return first <= position <= last


ends = st.integers(-12, 40)
ranges = st.builds(lambda first, last: selection_pb2.PositionRange(first=first, last=last), ends, st.none() | ends)
selections = st.builds(
    lambda phases, runs, every: selection_pb2.PositionSelection(phases=phases, ranges=runs, every=every),
    st.lists(st.sampled_from([PROMPT, GENERATED]), max_size=2, unique=True),
    st.lists(ranges, max_size=4),
    st.integers(0, 5),
)


@given(selections, st.integers(1, 20), st.integers(0, 30), st.integers(0, 40))
def test_wanted_positions(selection, prompt_tokens, first, count):
    wanted = wanted_positions(selection, prompt_tokens, first, count)
    assert wanted.shape == (count,)
    assert wanted.tolist() == [by_the_words(selection, prompt_tokens, first + at) for at in range(count)]


@given(selections, st.integers(1, 20), st.integers(0, 30), st.integers(0, 40))
def test_whether_any_position_is_selected(selection, prompt_tokens, first, count):
    wanted = any(by_the_words(selection, prompt_tokens, first + at) for at in range(count))
    assert selects_any(selection, prompt_tokens, first, count) == wanted


@given(selections, st.integers(1, 20))
def test_a_selection_changes_only_at_its_borders(selection, prompt_tokens):
    found = borders(selection, prompt_tokens)
    if found is None:
        assert selection.every > 1
        return
    wanted = [by_the_words(selection, prompt_tokens, position) for position in range(70)]
    assert {at for at in range(1, 70) if wanted[at] != wanted[at - 1]} <= set(found)


@given(selections, st.integers(1, 20), st.integers(0, 20), st.integers(0, 20))
def test_asking_in_parts_gives_the_same_positions(selection, prompt_tokens, first, second):
    whole = wanted_positions(selection, prompt_tokens, 0, first + second)
    parts = [wanted_positions(selection, prompt_tokens, 0, first)]
    parts.append(wanted_positions(selection, prompt_tokens, first, second))
    assert np.array_equal(whole, np.concatenate(parts))


@given(selections, st.integers(1, 20), st.integers(0, 30), st.integers(0, 40), st.none() | st.integers(0, 45))
def test_captured_positions(selection, prompt_tokens, first, count, more):
    length = None if more is None else prompt_tokens + more
    asked = range(first, first + count)
    plain = capture_pb2.CaptureSpec(positions=selection, reduction=capture_pb2.REDUCTION_NONE)
    reduced = capture_pb2.CaptureSpec(positions=selection, reduction=capture_pb2.REDUCTION_MAX)
    wanted = [at for at in range(100) if by_the_words(selection, prompt_tokens, at) and at < (length or 100)]
    captured = captured_positions(plain, prompt_tokens, first, count, length)
    assert captured.tolist() == [at in wanted for at in asked]

    prompt = [at for at in wanted if at < prompt_tokens][-1:]
    generated = [at for at in wanted if at >= prompt_tokens]
    kept = prompt + (generated if length is None else generated[-1:])
    assert captured_positions(reduced, prompt_tokens, first, count, length).tolist() == [at in kept for at in asked]


def test_the_last_position_is_found_however_far_back_it_lies():
    early = selection_pb2.PositionSelection(ranges=[selection_pb2.PositionRange(first=2, last=3)])
    spec = capture_pb2.CaptureSpec(positions=early, reduction=capture_pb2.REDUCTION_LAST)
    assert np.flatnonzero(captured_positions(spec, 20_000, 0, 30_000, 30_000)).tolist() == [3]


def test_the_empty_selection_wants_everything():
    assert wanted_positions(selection_pb2.PositionSelection(), 3, 0, 9).all()


@pytest.mark.parametrize(
    ("message", "good"),
    [
        (selection_pb2.PositionSelection(), True),
        (selection_pb2.PositionSelection(phases=[PROMPT, GENERATED], every=7), True),
        (selection_pb2.PositionSelection(phases=[0]), False),
        (selection_pb2.PositionSelection(phases=[9]), False),
        (selection_pb2.PositionSelection(ranges=[{"first": 3, "last": 2}]), False),
        (selection_pb2.PositionSelection(ranges=[{"first": -1, "last": -2}]), False),
        (selection_pb2.PositionSelection(ranges=[{"first": 3, "last": -1}]), True),  # depends on the prompt
        (selection_pb2.PositionSelection(ranges=[{"first": -5, "last": 2}]), True),
        (selection_pb2.PositionSelection(ranges=[{"first": 3}]), True),
        (selection_pb2.PositionSelection(ranges=[{"first": 0, "last": 0}] * MAX_RANGES), True),
        (selection_pb2.PositionSelection(ranges=[{"first": 0, "last": 0}] * (MAX_RANGES + 1)), False),
    ],
)
def test_check_positions(message, good):
    if good:
        check_positions(message)
    else:
        with pytest.raises(ValueError, match=r"."):
            check_positions(message)


def layers(*numbers):
    return selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=numbers))


def test_resolve_layers():
    assert resolve_layers(selection_pb2.LayerSelection(all=True), 3) == [0, 1, 2]
    assert resolve_layers(layers(0, 2), 3) == [0, 2]


@pytest.mark.parametrize(
    "selection",
    [selection_pb2.LayerSelection(), selection_pb2.LayerSelection(all=False), layers(), layers(2, 1), layers(1, 1)],
)
def test_layers_that_name_none_or_do_not_ascend(selection):
    with pytest.raises(ValueError, match=r"."):
        resolve_layers(selection, 3)


def test_a_layer_that_the_model_lacks_is_named():
    with pytest.raises(IndexError) as caught:
        resolve_layers(layers(1, 3), 3)
    assert caught.value.args[0] == 3


@pytest.mark.parametrize(
    ("prompt", "generated", "rows"), [(4, 7, 10), (1, 1, 1), (5, 1, 5), (5, 0, 5), (0, 0, 0), (0, 1, 0)]
)
def test_expected_rows(prompt, generated, rows):
    assert expected_rows(prompt, generated) == rows


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_exactly_the_positions(positions):
    runs = to_ranges(np.array(sorted(positions), dtype=np.int64))
    assert {position for first, last in runs for position in range(first, last + 1)} == positions
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(runs))
