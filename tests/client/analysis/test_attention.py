"""Attention weights from queries and keys, compared with the definition, one weight at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import residuum
from residuum.v1 import inference_pb2
from tests.client.support.peer import HIDDEN


@st.composite
def layers(draw):
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    numbers = st.lists(st.floats(-3, 3, width=32), min_size=heads, max_size=heads).map(tuple)
    return residuum.AttentionLayer(
        num_heads=heads,
        num_kv_heads=kv_heads,
        scale=draw(st.floats(0.125, 1.0, width=32)),
        sliding_window=draw(st.integers(0, 4)),
        logits_soft_cap=draw(st.sampled_from([0.0, 1.5])),
        sinks=() if draw(st.booleans()) else draw(numbers),
        alibi_slopes=() if draw(st.booleans()) else draw(numbers),
    )


def weight(layer, q, k, query, key, head):
    """The numerator of one weight, or None if the key is not seen."""
    if key > query or (layer.sliding_window and query - key >= layer.sliding_window):
        return None
    score = layer.scale * float(q[head] @ k[head * layer.num_kv_heads // layer.num_heads])
    if layer.logits_soft_cap:
        score = layer.logits_soft_cap * math.tanh(score / layer.logits_soft_cap)
    return math.exp(score + (layer.alibi_slopes[head] * (key - query) if layer.alibi_slopes else 0.0))


@settings(deadline=None, max_examples=100)
@given(layers(), st.integers(1, 6), st.data())
def test_weights_are_those_of_the_definition(layer, count, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    queries = rng.standard_normal((count, layer.num_heads, 2)).astype(np.float32)
    keys = rng.standard_normal((count, layer.num_kv_heads, 2)).astype(np.float32)
    positions = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    heads = data.draw(st.lists(st.integers(0, layer.num_heads - 1), min_size=1, max_size=3))
    got = layer.weights(queries[positions].reshape(len(positions), -1), keys.reshape(count, -1), positions, heads)
    assert (got.shape, got.dtype) == ((len(heads), len(positions), count), np.float32)
    for h, head in enumerate(heads):
        for p, query in enumerate(positions):
            found = [weight(layer, queries[query], keys[key], query, key, head) for key in range(count)]
            total = sum(item for item in found if item is not None)
            total += math.exp(layer.sinks[head]) if layer.sinks else 0.0
            expected = [0.0 if item is None else item / total for item in found]
            np.testing.assert_allclose(got[h, p], expected, rtol=1e-4, atol=1e-6)


def test_large_scores_do_not_overflow():
    layer = residuum.AttentionLayer(1, 1, scale=1.0)
    ours = layer.weights(np.full((2, 4), 1e4, np.float32), np.full((2, 4), 1e4, np.float32), [0, 1], [0])
    assert ours.tolist() == [[[1.0, 0.0], [0.5, 0.5]]]


def test_a_layer_is_read_from_its_message():
    message = inference_pb2.AttentionLayer(
        num_heads=4, num_kv_heads=2, scale=0.5, sliding_window=8, logits_soft_cap=30.0, sinks=[0.5, 1, 2, 3]
    )
    layer = residuum.AttentionLayer.from_proto(message)
    assert layer == residuum.AttentionLayer(4, 2, 0.5, 8, 30.0, (0.5, 1.0, 2.0, 3.0), ())


ATTENTION = residuum.AttentionLayer(num_heads=4, num_kv_heads=4, scale=0.5)


def info(attention):
    proto = inference_pb2.GetModelInfoResponse(dtype=1, hidden_size=HIDDEN)
    for layer in attention:
        proto.attention.add(num_heads=layer.num_heads, num_kv_heads=layer.num_kv_heads, scale=layer.scale)
    return residuum.ModelInfo.from_proto(proto)


async def captured(client, **options):
    reply = await client.generate("a bb ccc", max_tokens=2, capture=residuum.Capture(**options))
    return await client.activations(reply)


async def test_weights_of_a_capture(client):
    acts = await captured(client, layers=[1, 2], sites=["q", "k"])
    model = info([ATTENTION] * 3)
    ours = residuum.attention_weights(acts, 2, model)
    q, k = (np.asarray(acts.select(site=site)[2], np.float32) for site in "qk")
    np.testing.assert_array_equal(ours, ATTENTION.weights(q, k, range(4), range(4)))
    some = residuum.attention_weights(acts, 2, model, heads=[3, 0], positions=[1, 3])
    np.testing.assert_array_equal(some, ours[[3, 0]][:, [1, 3]])
    early = residuum.attention_weights(acts, 2, model, positions=[1])
    assert early.shape == (4, 1, 2), "later keys are not needed"
    np.testing.assert_array_equal(early[:, 0], ours[:, 1, :2])


@pytest.mark.parametrize(
    ("captures", "arguments", "told"),
    [
        ({}, {"layer": 7}, "does not describe the attention of layer 7"),
        ({}, {"layer": 0}, "does not describe the attention of layer 0"),
        ({}, {"layer": 2}, "has no rows of layer 2"),
        ({}, {"heads": [4]}, "there is no head 4: layer 1 has 4"),
        ({}, {"heads": [-1]}, "there is no head -1"),
        ({}, {"positions": []}, "no position of a query"),
        ({}, {"positions": [9]}, "has no q of position 9. Capture q"),
        ({"positions": [1, 3]}, {}, "has no k of position 0 and of 1 others"),
        ({"encoding": "topk", "dimensions": 4}, {}, None),
    ],
)
async def test_missing_queries_and_keys_are_named(client, captures, arguments, told):
    acts = await captured(client, layers=[1], sites=["q", "k"], **captures)
    model = info([residuum.AttentionLayer(0), ATTENTION, ATTENTION])
    arguments = {"layer": 1, **arguments}
    if told is None:
        assert residuum.attention_weights(acts, info=model, **arguments).shape == (4, 4, 4)
        return
    with pytest.raises(residuum.InvalidRequest, match=told):
        residuum.attention_weights(acts, info=model, **arguments)


async def test_a_capture_without_keys_is_refused(client):
    acts = await captured(client, layers=[1], sites=["q"])
    with pytest.raises(residuum.InvalidRequest, match=r"have the sites q\. Capture and read both"):
        residuum.attention_weights(acts, 1, info([ATTENTION] * 2))
