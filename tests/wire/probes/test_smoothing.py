"""Smoothing of scores, against the definition, in float64."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from residuum.v1 import probe_pb2
from residuum.wire.limits import MAX_SMOOTHING_WINDOW
from residuum.wire.probes.smoothing import Smoother, problem_of

SCORES = hnp.arrays(
    np.float32,
    st.tuples(st.integers(0, 40), st.integers(1, 3)),
    elements=st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from([math.nan, math.inf, -math.inf])),
)
SPECS = st.one_of(
    st.floats(1 / 64, 63 / 64, width=32).map(lambda decay: probe_pb2.Smoothing(ema=decay)),
    st.sampled_from([0, 1, 2, 5, 7, 64]).map(lambda window: probe_pb2.Smoothing(max=window)),
    st.sampled_from([0, 1, 2, 5, 7, 64]).map(lambda window: probe_pb2.Smoothing(mean=window)),
)


def defined(spec: probe_pb2.Smoothing, scores: np.ndarray) -> np.ndarray:
    """Return the smoothed scores, one by one, as the contract defines them."""
    result = scores.astype(np.float64)
    method = spec.WhichOneof("method")
    for output in range(scores.shape[1]):
        column = scores[:, output].astype(np.float64)
        for row in range(len(column)):
            if not math.isfinite(column[row]):
                continue
            known = [float(value) for value in column[: row + 1] if math.isfinite(value)]
            if method == "ema":
                average = known[0]
                for value in known[1:]:
                    average = spec.ema * average + (1 - spec.ema) * value
                result[row, output] = average
                continue
            window = getattr(spec, method) or len(column)
            recent = [float(value) for value in column[max(row + 1 - window, 0) : row + 1] if math.isfinite(value)]
            result[row, output] = max(recent) if method == "max" else math.fsum(recent) / len(recent)
    return result


@given(SPECS, SCORES, st.lists(st.integers(0, 40), max_size=5))
def test_scores_in_any_parts_are_smoothed_as_defined(
    spec: probe_pb2.Smoothing, scores: np.ndarray, cuts: list[int]
) -> None:
    smoother = Smoother(spec, scores.shape[1])
    parts = [smoother.add(part) for part in np.split(scores, sorted(min(cut, len(scores)) for cut in cuts))]
    found = np.concatenate(parts)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, defined(spec, scores), rtol=1e-6, atol=1e-6)


def test_a_window_after_a_huge_score_keeps_its_digits() -> None:
    scores = np.float32([[1e30], *([[0.25]] * 20)])
    found = Smoother(probe_pb2.Smoothing(mean=4), 1).add(scores)
    np.testing.assert_array_equal(found[4:], scores[4:])


def test_long_prompts_with_long_windows_take_little_time() -> None:
    scores = np.random.default_rng(0).standard_normal((32_768, 64)).astype(np.float32)
    for spec in (probe_pb2.Smoothing(mean=1024), probe_pb2.Smoothing(max=1024)):
        start = time.process_time()
        found = Smoother(spec, 64).add(scores)
        assert time.process_time() - start < 2, "a reduction of each window takes several times as long"
        np.testing.assert_allclose(found[:2000:37, :1], defined(spec, scores[:2000, :1])[::37], rtol=1e-5, atol=1e-6)


@given(SPECS, SCORES)
def test_a_smoothed_score_is_within_the_range_of_the_scores(spec: probe_pb2.Smoothing, scores: np.ndarray) -> None:
    """So the range of a sigmoid's or a softmax's scores is that of the smoothed ones."""
    scores = np.nan_to_num(scores, posinf=1e6, neginf=-1e6)
    found = Smoother(spec, scores.shape[1]).add(scores)
    if len(scores):
        assert (found.min(axis=0) >= scores.min(axis=0)).all()
        assert (found.max(axis=0) <= scores.max(axis=0)).all()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (probe_pb2.Smoothing(), "no method"),
        (probe_pb2.Smoothing(ema=0), "above 0 and below 1, not 0"),
        (probe_pb2.Smoothing(ema=1), "not 1"),
        (probe_pb2.Smoothing(ema=math.nan), "not nan"),
        (probe_pb2.Smoothing(max=MAX_SMOOTHING_WINDOW + 1), "at most 1024 tokens, not 1025"),
        (probe_pb2.Smoothing(mean=MAX_SMOOTHING_WINDOW), ""),
        (probe_pb2.Smoothing(mean=0), ""),
        (probe_pb2.Smoothing(ema=0.9), ""),
    ],
)
def test_what_is_wrong_with_a_message(spec: probe_pb2.Smoothing, words: str) -> None:
    problem = problem_of(spec)
    assert words in problem
    assert bool(words) == bool(problem)
