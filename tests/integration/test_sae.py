"""Sparse autoencoders on a real model: features of captured rows, and features that are clamped."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import residuum

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("integration")]

PROMPT = "The capital of France is"
WIDTH, FEATURES, LAYER = 576, 2048, 12
RAW = residuum.Capture(layers=[LAYER], positions=slice(1, None))


def made(seed: int = 0, **options) -> residuum.SAE:
    rng = np.random.default_rng(seed)
    decoder = rng.standard_normal((FEATURES, WIDTH)).astype(np.float32)
    decoder /= np.linalg.norm(decoder, axis=1, keepdims=True)
    biases = rng.standard_normal((2, FEATURES)).astype(np.float32)
    if options.get("activation") == "jumprelu":
        options["threshold"] = np.abs(biases[1])
    return residuum.SAE(decoder, decoder, encoder_bias=biases[0], decoder_bias=np.ones(WIDTH), **options)


SAES = {
    "jumprelu": made(activation="jumprelu", subtracts_decoder_bias=True),
    "topk": made(1, activation="topk", active=20),
    "layer norm": made(2, layer_norm=True),
    "bfloat16": made(3).astype(ml_dtypes.bfloat16),
}


def rows_of(client: residuum.Client, **options) -> np.ndarray:
    reply = client.generate(PROMPT, max_tokens=40, ignore_eos=True, capture=RAW, **options)
    acts = client.activations(reply)
    client.delete(reply)
    return acts[LAYER].astype(np.float64)


@pytest.mark.parametrize("name", SAES)
def test_features_are_those_of_the_captured_rows(client: residuum.Client, name: str) -> None:
    sae = SAES[name]
    exact = sae.encode(rows_of(client))
    what = residuum.Capture(layers=[LAYER], positions=slice(1, None), sae=sae, dimensions=24)
    reply = client.generate(PROMPT, max_tokens=40, ignore_eos=True, capture=what)
    acts = client.activations(reply)
    assert (acts.encoding, acts.width, acts.manifest.sae) == ("sae", FEATURES, sae.digest.hex())
    assert acts[LAYER].shape == exact.shape
    values = acts.encoded(LAYER)["value"]
    assert values.shape == (len(exact), 24)
    bound = 1e-6 * np.sqrt(WIDTH) * np.abs(exact).max()
    assert np.abs(values + np.sort(-exact, axis=1)[:, :24]).max() <= bound
    dense = acts[LAYER]
    assert np.abs(np.where(dense > 0, dense - exact, 0)).max() <= bound
    strongest = int(dense.sum(axis=0).argmax())
    np.testing.assert_array_equal(acts.feature(LAYER, strongest), dense[:, strongest])
    assert acts.manifest.num_bytes < len(exact) * (24 * 8 + 40), "a row takes 8 bytes for each kept feature"
    client.delete(reply)


def test_chosen_features_are_followed_live(client: residuum.Client) -> None:
    sae = SAES["jumprelu"]
    exact = sae.encode(rows_of(client))
    chosen = [int(number) for number in (-exact.sum(axis=0)).argsort()[[3, 0, 700]]]
    what = residuum.Capture(layers=[LAYER], positions=slice(1, None), sae=sae, features=chosen, flush_interval=1)
    with client.stream(PROMPT, max_tokens=40, ignore_eos=True, capture=what) as stream:
        followed = list(client.follow(stream))
        list(stream)
    found = np.concatenate([piece.rows for piece in followed if piece.layer == LAYER])
    assert found.shape == (len(exact), FEATURES)
    bound = 1e-6 * np.sqrt(WIDTH) * np.abs(exact).max()
    assert np.abs(found[:, chosen] - exact[:, chosen]).max() <= bound
    acts = client.activations(stream)
    assert acts.manifest.features == tuple(chosen)
    with pytest.raises(residuum.InvalidRequest, match="was not captured"):
        acts.feature(LAYER, 5)
    client.delete(stream)


@pytest.mark.parametrize("bounds", [{"value": 0.0}, {"value": 30.0}, {"min": 4.0}, {"max": 2.0}], ids=str)
def test_a_clamped_feature_changes_rows_as_the_formula_says(client: residuum.Client, bounds: dict[str, float]) -> None:
    sae = SAES["jumprelu"]
    prompt = {"max_tokens": 0, "capture": RAW}
    plain = client.generate(PROMPT, **prompt)
    before = client.activations(plain)[LAYER].astype(np.float64)
    values = sae.encode(before)
    feature = int((np.abs(values - 3).sum(axis=0) + 99 * (values == 0).all(axis=0)).argmin())
    clamp = residuum.ClampFeature(sae, feature=feature, layer=LAYER, **bounds)
    reply = client.generate(PROMPT, steer=clamp, **prompt)
    acts = client.activations(reply)
    low, high = bounds.get("min", bounds.get("value", -np.inf)), bounds.get("max", bounds.get("value", np.inf))
    moves = np.clip(values[:, feature], low, high) - values[:, feature]
    expected = before + moves[:, None] * sae.decoder[feature]
    # Both rows are rounded to bfloat16, each by 2**-8 of an element at most. The tap computes the feature from the row
    # before that, so its value differs by what the rounding of all elements adds up to. The row is a sum of two
    # bfloat16 parts, of which the tap changes one; that part is rounded too. Its elements are a few units at most, and
    # the row's largest is about 90: hence 2**-13 of the largest.
    rounding, encoder = 2**-8, np.abs(sae.encoder[feature].astype(np.float64))
    missed = rounding * (np.abs(before) @ encoder)[:, None] * np.abs(sae.decoder[feature])
    bound = rounding * (np.abs(before) + np.abs(expected)) + missed + 2**-13 * np.abs(before).max()
    assert (np.abs(acts[LAYER] - expected) <= bound).all()
    assert np.abs(moves).max() > 0.5
    (record,) = acts.manifest.steering
    assert (record.operation, record.digests) == ("clamp_feature", (sae.vector(feature).hexdigest,))
    client.delete([plain, reply])


def test_an_encoder_is_sent_once_and_again_when_the_server_dropped_it(services, client: residuum.Client) -> None:
    limit = client.info().limits["sae_bytes"]
    assert limit == 32 << 20
    with residuum.Client(services[1].endpoint) as own:
        first, others = made(10), [made(seed) for seed in range(11, 11 + limit // (4 * FEATURES * WIDTH) + 1)]
        result = own.put_sae(first)
        assert result.sent
        assert result.num_bytes == 4 * FEATURES * (WIDTH + 1)
        assert not own.put_sae(first).sent
        for other in others:
            own.put_sae(other)
        what = residuum.Capture(layers=[LAYER], sae=first)
        reply = own.generate(PROMPT, max_tokens=2, capture=what)
        assert own.activations(reply).encoded(LAYER)["feature"].shape[1] == 32
        own.delete(reply)


@pytest.mark.parametrize(
    ("sae", "error", "message"),
    [
        (residuum.SAE(np.ones((4, 9)), np.ones((4, 9))), residuum.BadSAE, "takes rows of 9 elements, but .* have 576"),
        (
            residuum.SAE(np.ones((1 << 14, WIDTH)), np.ones((1 << 14, WIDTH))), residuum.LimitReached,
            "takes 37814272 bytes, and the server has 33554432 bytes for encoders",
        ),
    ],
)  # fmt: skip
def test_an_encoder_that_does_not_fit_is_refused(client: residuum.Client, sae, error, message: str) -> None:
    with pytest.raises(error, match=message):
        client.generate(PROMPT, max_tokens=2, capture=residuum.Capture(layers=[LAYER], sae=sae))


def test_rows_of_another_width_have_no_features(client: residuum.Client) -> None:
    what = residuum.Capture(layers=[LAYER], sites=["mlp_act"], sae=SAES["jumprelu"])
    with pytest.raises(residuum.InvalidRequest, match=r"takes rows of 576 elements, but .* have 1536"):
        client.generate(PROMPT, max_tokens=2, capture=what)
    reply = client.generate(PROMPT, max_tokens=2, capture=residuum.Capture(points="z.3", sae=SAES["jumprelu"]))
    assert client.activations(reply).at("z.3").shape[1] == FEATURES
    client.delete(reply)
