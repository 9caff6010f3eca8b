"""The logit lens: rows that go through the model's final norm and unembedding, compared with transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum
from tests.conformance.rows import ALL, make_prompt
from tests.conformance.test_sampling import log_softmax

if TYPE_CHECKING:
    import numpy.typing as npt

    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

TOLERANCE = 1e-3


def expected_of(reference: Reference, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The log-probabilities of rows, [..., vocabulary]."""
    flat = reference.final_norm(rows.reshape(-1, rows.shape[-1]))
    every = np.stack([reference.output_weights(token) for token in range(reference.model.config.vocab_size)])
    return log_softmax(flat.astype(np.float64) @ every.T.astype(np.float64)).reshape(*rows.shape[:-1], -1)


def test_the_lens_agrees_with_transformers(engine: Engine, reference: Reference) -> None:
    """Every row of every layer: the most likely tokens, and the rank and log-probability of the token that came."""
    prompt = make_prompt(np.random.default_rng(90), 21)
    reply = engine.client.generate(prompt, capture=ALL, max_tokens=4, logprobs=3, prompt_logprobs=3, ignore_eos=True)
    acts = engine.client.activations(reply).select(site="resid_post")
    lens = engine.client.logit_lens(reply, top_k=5)
    tokens = [*prompt, *reply.token_ids]
    assert lens.next_tokens.tolist() == tokens[1:]
    expected = expected_of(reference, acts.stack())
    found = lens.predicted
    np.testing.assert_allclose(found.top, -np.sort(-expected, axis=-1)[..., :5], atol=TOLERANCE)
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, found.top_ids, axis=-1), atol=TOLERANCE)
    own = np.take_along_axis(expected, np.broadcast_to(lens.next_tokens, expected.shape[:2])[..., None], axis=-1)
    np.testing.assert_allclose(found.tokens, own[..., 0], atol=TOLERANCE)
    low, high = ((expected > own + shift).sum(axis=-1) + 1 for shift in (TOLERANCE, -TOLERANCE))
    assert ((low <= lens.ranks) & (lens.ranks <= high)).all()
    assert (lens.ranks > 1).any()

    # The last layer predicts what the model predicted.
    assert reply.logprobs is not None
    assert reply.prompt_logprobs is not None
    served = np.concatenate([reply.prompt_logprobs.tokens[1:], reply.logprobs.tokens])
    np.testing.assert_allclose(found.tokens[-1], served, atol=TOLERANCE)
    assert (lens.ranks[-1, len(prompt) - 1 :] == 1).all(), "the reply was sampled greedily"


def test_any_rows_can_be_unembedded(engine: Engine, reference: Reference) -> None:
    """One row, more than the engine takes at a time, and while requests run."""
    rows = np.random.default_rng(91).standard_normal((3000, engine.client.info().hidden_size), dtype=np.float32)
    prompt = make_prompt(np.random.default_rng(92), 8)
    with ThreadPoolExecutor(1) as pool:
        plain = engine.client.generate(prompt, max_tokens=40, ignore_eos=True)
        running = pool.submit(engine.client.generate, prompt, max_tokens=40, ignore_eos=True, capture=ALL)
        every = engine.client.unembed(rows, top_k=2, tokens=np.arange(3000) % 100)
        reply = running.result()
    assert reply.token_ids == plain.token_ids
    assert engine.client.activations(reply).manifest.is_complete
    expected = expected_of(reference, rows)
    np.testing.assert_allclose(every.tokens, expected[np.arange(3000), np.arange(3000) % 100], atol=TOLERANCE)
    one = engine.client.unembed(rows[7], top_k=0, tokens=5)
    assert (one.top.shape, one.ranks.shape) == ((0,), ())
    assert one.tokens == pytest.approx(expected[7, 5], abs=TOLERANCE)
    assert one.ranks == pytest.approx((expected[7] > expected[7, 5]).sum() + 1, abs=1)


@pytest.mark.parametrize(
    ("rows", "options", "told"),
    [
        (np.zeros(7), {}, "rows of .* float32 elements"),
        (np.zeros((2, 0)), {}, "not empty"),
        (np.nan, {}, "not empty"),
        ("nan", {}, "infinity or NaN"),
        ("zero", {"tokens": [1 << 30]}, "not in the vocabulary"),
        ("zero", {"tokens": [1, 2]}, "shape"),
        ("zero", {"top_k": 100_000}, "at most as many"),
        ("zero", {"top_k": -1}, "top_k=-1 must be from 0"),
    ],
)
def test_bad_rows_are_refused(engine: Engine, rows: object, options: dict, told: str) -> None:
    if isinstance(rows, str):
        rows = np.full((1, engine.client.info().hidden_size), 0.0 if rows == "zero" else np.nan)
    with pytest.raises(residuum.InvalidRequest, match=told):
        engine.client.unembed(rows, **options)
