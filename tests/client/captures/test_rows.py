"""Rows are placed correctly for any split, order and repetition of chunks, with known and unknown length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import residuum
from residuum.protocol.captures.reading import Reading, plan_read
from residuum.v1 import capture_pb2, selection_pb2, store_pb2, tensor_pb2
from tests.client.support.peer import HIDDEN, POST, chunk, rows

LAYERS = [0, 2, 3, 7]


def manifest(state, prompt, generated, spec_positions=None):
    complete = state == capture_pb2.CAPTURE_STATE_COMPLETE
    return capture_pb2.CaptureManifest(
        description=capture_pb2.CaptureDescription(
            capture_id="c", hidden_size=HIDDEN, num_layers=8, dtype=tensor_pb2.DATA_TYPE_BFLOAT16,
            spec=capture_pb2.CaptureSpec(
                layers=selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=LAYERS)), sites=[POST],
                positions=spec_positions,
            ),
            prompt_token_ids=range(prompt), num_sequences=1,
        ),
        state=state,
        sequences=[capture_pb2.SequenceOutcome(generated_token_ids=range(generated))] if complete else [],
    )  # fmt: skip


def message(**content):
    return store_pb2.ReadChunksResponse(**content).SerializeToString()


def begin(state, prompt, generated, *, keep_values=True, spec_positions=None, **chosen):
    names = {"layers": None, "sites": None, "sequences": None, "positions": None, **chosen}
    reading = Reading(plan_read("c", follow=True, allow_partial=False, **names), keep_values=keep_values)
    reading.begin()
    reading.add(message(manifest=manifest(state, prompt, generated, spec_positions)))
    return reading


@st.composite
def splits(draw, positions):
    """Chunks that together contain every (layer, position) at least once."""
    parts = []
    for layer in LAYERS:
        left = list(positions)
        while left:
            part = draw(st.lists(st.sampled_from(left), min_size=1, max_size=len(left), unique=True))
            together = draw(st.sets(st.sampled_from(LAYERS))) | {layer}
            parts.append((sorted(together), sorted(part)))
            left = [position for position in left if position not in part]
    return draw(st.permutations(parts))


@given(st.data(), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_split_in_any_order_gives_the_same_rows(data, known, every_third):
    prompt = data.draw(st.integers(1, 12), label="prompt")
    generated = data.draw(st.integers(1, 150), label="generated")
    positions = np.arange(prompt + generated - 1)
    selection = selection_pb2.PositionSelection(every=3) if every_third else None
    wanted = positions[positions % 3 == 0] if every_third else positions
    state = capture_pb2.CAPTURE_STATE_COMPLETE if known else capture_pb2.CAPTURE_STATE_OPEN
    reading = begin(state, prompt, generated, spec_positions=selection)
    for layers, part in data.draw(splits(wanted.tolist()[:40]), label="chunks"):
        reading.add(message(chunk=chunk(0, POST, layers, part)))
    for at in range(40, len(wanted), 32):
        reading.add(message(chunk=chunk(0, POST, LAYERS, wanted[at : at + 32])))
    reading.add(message(manifest=manifest(capture_pb2.CAPTURE_STATE_COMPLETE, prompt, generated, selection)))
    acts = reading.activations()
    assert acts.positions.tolist() == wanted.tolist()
    for layer in LAYERS:
        assert np.array_equal(acts.raw(layer), rows(0, POST, layer, wanted))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_pieces_contain_each_row_once(data):
    reading = begin(capture_pb2.CAPTURE_STATE_OPEN, 5, 0, keep_values=False, layers=[2, 7])
    seen = {2: [], 7: []}
    for layers, part in data.draw(splits(range(20))):
        for site, layer, positions, values in reading.add(message(chunk=chunk(0, POST, layers, part))):
            assert site == "resid_post"
            assert np.array_equal(values, rows(0, POST, layer, positions).astype(np.float32))
            seen[layer] += positions.tolist()
    assert {layer: sorted(positions) for layer, positions in seen.items()} == {2: [*range(20)], 7: [*range(20)]}


@given(st.sets(st.integers(0, 30), min_size=1), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_one_missing_row_is_never_complete(dropped, layer):
    reading = begin(capture_pb2.CAPTURE_STATE_OPEN, 10, 0)
    for at, number in enumerate(LAYERS):
        kept = [position for position in range(31) if at != layer or position not in dropped]
        if kept:
            reading.add(message(chunk=chunk(0, POST, [number], kept)))
    reading.add(message(manifest=manifest(capture_pb2.CAPTURE_STATE_COMPLETE, 10, 22)))
    with pytest.raises(residuum.DamagedCapture):
        reading.activations()


def test_rows_of_other_sites_and_sequences_are_ignored():
    reading = begin(capture_pb2.CAPTURE_STATE_COMPLETE, 2, 1)
    assert reading.add(message(chunk=chunk(1, POST, LAYERS, [0]))) == []
    assert reading.add(message(chunk=chunk(0, capture_pb2.SITE_MLP_OUT, LAYERS, [0]))) == []
    assert reading.add(message(chunk=chunk(0, POST, [1, 5], [0]))) == []


def test_a_long_capture_of_unknown_length_grows():
    reading = begin(capture_pb2.CAPTURE_STATE_OPEN, 1, 0)
    for at in range(0, 3000, 100):
        reading.add(message(chunk=chunk(0, POST, LAYERS, range(at, at + 100))))
    reading.add(message(manifest=manifest(capture_pb2.CAPTURE_STATE_COMPLETE, 1, 3000)))
    assert np.array_equal(reading.activations()[7], rows(0, POST, 7, range(3000)).astype(np.float32))


@pytest.mark.parametrize(("max_generated", "grows"), [(0, True), (200, False)])
def test_room_for_all_rows_is_made_at_once_if_the_length_is_foreseen(max_generated, grows):
    """Growing copies all rows."""
    made = []

    def allocate(shape, dtype):
        made.append(shape)
        return np.empty(shape, dtype)

    first = manifest(capture_pb2.CAPTURE_STATE_OPEN, 10, 0)
    first.description.max_generated_tokens = max_generated
    choice = {"layers": None, "sites": None, "sequences": None, "positions": None}
    reading = Reading(plan_read("c", follow=True, allow_partial=False, **choice), allocate=allocate)
    reading.begin()
    reading.add(message(manifest=first))
    arrays = len(made)
    reading.add(message(chunk=chunk(0, POST, LAYERS, range(209))))
    assert (len(made) > arrays) == grows
    reading.add(message(manifest=manifest(capture_pb2.CAPTURE_STATE_COMPLETE, 10, 200)))
    assert np.array_equal(reading.activations().raw(2), rows(0, POST, 2, range(209)))
