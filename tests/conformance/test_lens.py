"""The logit lens: rows that go through the model's final norm and unembedding, compared with transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

import residuum
from tests.conformance.rows import ALL, make_prompt
from tests.conformance.test_sampling import log_softmax
from tests.reference.tiny import HIDDEN, LAYERS

if TYPE_CHECKING:
    import numpy.typing as npt

    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

TOLERANCE = 1e-3


def expected_of(reference: Reference, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The log-probabilities of rows, [..., vocabulary]."""
    flat = reference.final_norm(rows.reshape(-1, rows.shape[-1]))
    every = reference.all_output_weights().astype(np.float64)
    return log_softmax(flat.astype(np.float64) @ every.T).reshape(*rows.shape[:-1], -1)


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
    for first in range(0, 3000, 100):  # all at once would be a gigabyte
        expected, own = expected_of(reference, rows[first : first + 100]), np.arange(100)
        np.testing.assert_allclose(every.tokens[first : first + 100], expected[own, own], atol=TOLERANCE)
    one = engine.client.unembed(rows[7], top_k=0, tokens=5)
    (expected,) = expected_of(reference, rows[7:8])
    assert (one.top.shape, one.ranks.shape) == ((0,), ())
    assert one.tokens == pytest.approx(expected[5], abs=TOLERANCE)
    assert one.ranks == pytest.approx((expected > expected[5]).sum() + 1, abs=1)


def translators(rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """The state dict of a tuned lens that changes rows a lot."""
    scale = 0.7 / np.sqrt(HIDDEN)
    return {
        name: (rng.standard_normal(shape) * scale).astype(np.float32)
        for index in range(LAYERS)
        for name, shape in ((f"{index}.weight", (HIDDEN, HIDDEN)), (f"{index}.bias", (HIDDEN,)))
    }


@pytest.mark.parametrize("site", ["resid_post", "resid_pre"])
def test_a_tuned_lens_agrees_with_transformers(engine: Engine, reference: Reference, site: str) -> None:
    """Translator i is for transformers' hidden_states[i], whichever site has these rows."""
    weights = translators(np.random.default_rng(93))
    lens = residuum.Lens.from_tuned_lens(weights)
    prompt = make_prompt(np.random.default_rng(94), 21)
    reply = engine.client.generate(prompt, capture=ALL, max_tokens=4, ignore_eos=True)
    acts = engine.client.activations(reply).select(site=site)
    found = engine.client.logit_lens(acts, lens=lens, top_k=5)
    rows = acts.stack().astype(np.float64)
    np.testing.assert_allclose(
        rows[-1], reference.rows([*prompt, *reply.token_ids[:-1]])[site][-1], rtol=1e-3, atol=1e-4
    )
    for layer in range(LAYERS):
        translator = layer + (site == "resid_post")
        if translator < LAYERS:
            rows[layer] += rows[layer] @ weights[f"{translator}.weight"].T.astype(np.float64)
            rows[layer] += weights[f"{translator}.bias"]
    expected = expected_of(reference, rows.astype(np.float32))
    np.testing.assert_allclose(found.predicted.top, -np.sort(-expected, axis=-1)[..., :5], atol=TOLERANCE)
    own = np.take_along_axis(expected, np.broadcast_to(found.next_tokens, expected.shape[:2])[..., None], axis=-1)
    np.testing.assert_allclose(found.predicted.tokens, own[..., 0], atol=TOLERANCE)
    plain = engine.client.logit_lens(acts, top_k=5)
    differs = (np.abs(plain.predicted.top - found.predicted.top) > 100 * TOLERANCE).any(axis=(1, 2))
    assert differs.tolist() == [lens.at(site, layer) is not None for layer in range(LAYERS)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_jacobian_lens_agrees_with_transformers(engine: Engine, reference: Reference, dtype: npt.DTypeLike) -> None:
    """More rows than the engine takes at a time; in float32, with more maps than the server's memory holds."""
    rng = np.random.default_rng(95)
    limit = engine.client.info().limits["sae_bytes"]
    needed = limit // (HIDDEN * HIDDEN * 4) + 1 if dtype is np.float32 else 3
    matrices = [(rng.standard_normal((HIDDEN, HIDDEN)) / np.sqrt(HIDDEN)).astype(dtype) for _ in range(needed)]
    lens = residuum.Lens(dict(enumerate(matrices)))
    rows = rng.standard_normal((600, HIDDEN)).astype(np.float32)
    for layer in (0, *range(1, needed), 0):  # the first one has to be sent again
        some = rows if layer == 0 else rows[:2]
        found = engine.client.unembed(some, top_k=3, via=lens[layer])
        mapped = some.astype(np.float64) @ matrices[layer].T.astype(np.float64)
        if layer in (0, needed - 1):
            expected = expected_of(reference, mapped.astype(np.float32))
            np.testing.assert_allclose(found.top, -np.sort(-expected, axis=-1)[..., :3], atol=TOLERANCE)


def test_a_lens_of_another_model_is_refused(engine: Engine) -> None:
    reply = engine.client.generate([5, 6], capture=residuum.Capture([1]), max_tokens=1)
    with pytest.raises(residuum.InvalidRequest, match=r"rows of 9 elements, and these have 128\. Use"):
        engine.client.logit_lens(reply, lens=residuum.Lens({1: np.eye(9)}))
    with pytest.raises(residuum.InvalidRequest, match="takes rows of 9 elements"):
        engine.client.unembed(np.zeros(9), via=residuum.LensMap(np.eye(9)))
    with pytest.raises(residuum.InvalidRequest, match="turns a row into infinity or NaN"):
        engine.client.unembed(np.full(HIDDEN, 1e30), via=residuum.LensMap(np.full((HIDDEN, HIDDEN), 1e30)))
    big = residuum.LensMap(np.eye(1 << 9))
    with pytest.raises(residuum.InvalidRequest, match="takes rows of 512 elements"):
        engine.client.unembed(np.zeros(1 << 9), via=big)


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
        ("zero", {"top_k": -1}, "top_k must be from 0"),
    ],
)
def test_bad_rows_are_refused(engine: Engine, rows: object, options: dict, told: str) -> None:
    if isinstance(rows, str):
        rows = np.full((1, engine.client.info().hidden_size), 0.0 if rows == "zero" else np.nan)
    with pytest.raises(residuum.InvalidRequest, match=told):
        engine.client.unembed(rows, **options)
