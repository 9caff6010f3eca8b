"""The pooling of attention probes against torch, and against the same rows in other parts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residuum.v1 import probe_pb2
from residuum.wire.probes.arithmetic import num_outputs, problem_of_attention
from residuum.wire.probes.pooling import AttentionPool


def probe(heads, outputs, position_weights=()):
    message = probe_pb2.Probe(outputs=[probe_pb2.ProbeOutput()] * (heads * (1 + outputs)))
    message.attention.heads = heads
    message.attention.position_weights.extend(position_weights)
    return message


def expected(rows, heads, outputs, slopes):
    """The definition, position by position, in float64."""
    torch = pytest.importorskip("torch")
    exact = torch.tensor(rows, dtype=torch.float64)
    logits = exact[:, :heads] + torch.arange(len(rows), dtype=torch.float64)[:, None] * torch.tensor(slopes)
    values = exact[:, heads:].reshape(-1, heads, outputs)
    found = [(torch.softmax(logits[: t + 1], 0)[..., None] * values[: t + 1]).sum((0, 1)) for t in range(len(rows))]
    return torch.stack(found).numpy()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_division_of_the_rows_gives_the_definition(data):
    heads, outputs = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 4))
    count, scale = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([0.1, 3.0, 400.0, 1e5]))
    slopes = data.draw(st.sampled_from([0.0, 0.5, -2.0, 300.0])) * np.ones(heads)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    rows = (rng.normal(size=(count, heads * (1 + outputs))) * scale).astype(np.float32)
    message = probe(heads, outputs, slopes)
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=6))})
    pool = AttentionPool(message)
    found = np.concatenate([pool.add(rows[first:last]) for first, last in pairwise(cuts)])
    assert found.dtype == np.float32
    assert found.shape == (count, num_outputs(message))
    size = np.abs(rows[:, heads:]).max() * heads
    np.testing.assert_allclose(found, expected(rows, heads, outputs, slopes), rtol=0, atol=1e-6 * size)
    np.testing.assert_allclose(found, AttentionPool(message).add(rows), rtol=0, atol=1e-7 * size)


def test_huge_logits_choose_one_position():
    rows = np.array([[1e30, 1], [3e38, 2], [-3e38, 4], [3e38, 6]], dtype=np.float32)
    assert AttentionPool(probe(1, 1)).add(rows)[:, 0].tolist() == [1, 2, 2, 4]


def test_later_positions_leave_out_rows_that_are_not_finite():
    rows = np.array([[np.nan, 0], [0, 1], [0, np.inf], [-np.inf, 1], [0, 3]], dtype=np.float32)
    pool = AttentionPool(probe(1, 1))
    found = [pool.add(row[None])[0, 0] for row in rows]
    np.testing.assert_array_equal(found, [np.nan, 1, np.nan, np.nan, 2])
    np.testing.assert_array_equal(AttentionPool(probe(1, 1)).add(rows)[:, 0], found)
    weighted = AttentionPool(probe(1, 1, [1.0])).add(rows)[:, 0]  # a position counts even if its row does not
    assert weighted[-1] == pytest.approx((1 + 3 * np.exp(3)) / (1 + np.exp(3)))


def test_no_rows_change_nothing():
    pool = AttentionPool(probe(2, 3))
    assert pool.add(np.zeros((0, 8), np.float32)).shape == (0, 3)
    assert pool.add(np.ones((1, 8), np.float32)).tolist() == [[2.0] * 3]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (probe(1, 1), ""),
        (probe_pb2.Probe(), ""),
        (probe_pb2.Probe(attention=probe_pb2.AttentionPooling()), "0 heads; from 1 to 16"),
        (probe(17, 1), "17 heads"),
        (probe(2, 0), "2 outputs; 2 heads need 2"),
        (probe(2, 1, [1.0]), "1 position weights for 2 heads"),
        (probe(2, 1, [1.0, np.nan]), "not all finite"),
    ],
)
def test_what_is_wrong_with_attention(message, words):
    assert words in problem_of_attention(message)
    assert bool(words) == bool(problem_of_attention(message))
