"""Sparse autoencoders against SAELens' own results (scripts/make_sae_fixtures.py), their files, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import residuum
from residuum.wire.sae import activate, strongest

SAES = Path(__file__).parent / "saes"
EXPECTED = np.load(SAES / "expected.npz")
NAMES = sorted({name.partition(".")[0] for name in EXPECTED.files if "." in name})
CLOSE = 2e-6
"""The largest difference of float32 sums in another order, relative to the largest number."""


def _close(ours, theirs, bound=CLOSE):
    return np.abs(ours - theirs).max() <= bound * np.abs(theirs).max()


def small(**options) -> residuum.SAE:
    rng = np.random.default_rng(1)
    return residuum.SAE(rng.standard_normal((20, 8)), rng.standard_normal((20, 8)), **options)


@pytest.mark.parametrize("name", NAMES)
def test_features_and_reconstructions_are_those_of_saelens(name):
    sae = residuum.sae.load(SAES / name)
    rows = EXPECTED["rows"]
    features, theirs = sae.encode(rows), EXPECTED[f"{name}.features"]
    assert (features.dtype, sae.features, sae.width) == (np.float32, 80, 24)
    assert np.array_equal(features > 0, theirs > 0)
    assert 0 < np.count_nonzero(theirs) < theirs.size
    assert _close(features, theirs)
    assert _close(sae.reconstruct(rows), EXPECTED[f"{name}.rows"], 4e-6)
    exact = sae.encode(rows.astype(np.float64))
    assert exact.dtype == np.float64
    assert _close(exact, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_our_own_files_keep_everything(name, tmp_path):
    sae = residuum.sae.load(SAES / name)
    for given_sae in (sae, sae.astype(ml_dtypes.bfloat16)):
        residuum.sae.save(given_sae, tmp_path / "one.safetensors")
        again = residuum.sae.load(tmp_path / "one.safetensors")
        assert again == given_sae
        assert (again.digest, repr(again)) == (given_sae.digest, repr(given_sae))
    assert sae.digest != sae.astype(ml_dtypes.bfloat16).digest


def test_gemma_scope_files_are_read_by_file_or_folder():
    assert residuum.sae.load(SAES / "gemma-scope") == residuum.sae.load(SAES / "gemma-scope" / "params.npz")


def test_batch_topk_works_by_its_threshold():
    sae = small(activation="batchtopk", threshold=0.75)
    assert sae == small(activation="jumprelu", threshold=np.full(20, 0.75))
    features = sae.encode(np.random.default_rng(2).standard_normal((50, 8)))
    assert features[features > 0].min() > 0.75


def test_the_decoders_bias_is_folded():
    bias = np.linspace(-1, 1, 8)
    rows = np.random.default_rng(3).standard_normal((30, 8))
    folded, plain = small(decoder_bias=bias, subtracts_decoder_bias=True), small(decoder_bias=bias)
    assert _close(folded.encode(rows), plain.encode(rows - bias))


def test_a_vector_is_the_features_direction():
    sae = small()
    assert np.array_equal(sae.vector(7).values, sae.decoder[7])


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_the_strongest_features_are_those_of_a_sort(seed, count):
    rng = np.random.default_rng(seed)
    values = np.maximum(rng.integers(-3, 4, (3, 12)), 0).astype(np.float32)
    features, kept = strongest(values, count)
    assert (np.diff(kept) <= 0).all()
    assert np.array_equal(kept, -np.sort(-values, axis=-1)[:, :count])
    assert ((features == 12) == (kept == 0)).all()
    dense = np.zeros((3, 13), np.float32)
    np.put_along_axis(dense, features.astype(np.int64), kept, axis=-1)
    assert (dense[:, :12] <= values).all()
    assert dense.sum() == kept.sum()


def test_nan_is_visible():
    outputs = np.array([[1.0, np.nan, -1.0, 5.0]], np.float32)
    for activation, options in ((1, {}), (2, {"threshold": np.ones(4, np.float32)}), (3, {"active": 1})):
        values = activate(outputs, activation, **options)
        features, kept = strongest(values, 2)
        assert features[0, 0] == 1
        assert np.isnan(kept[0, 0])


ONES = np.ones((4, 3))


def test_weights_of_float8_become_float32():
    torch = pytest.importorskip("torch")
    small = torch.tensor([[1.0, -0.5]]).to(torch.float8_e4m3fn)
    assert residuum.SAE(small, small) == residuum.SAE(np.float32([[1, -0.5]]), np.float32([[1, -0.5]]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: residuum.SAE(ONES, ONES.T), "Both must be"),
        (lambda: residuum.SAE(np.ones(4), np.ones(4)), "must be .features, width."),
        (lambda: residuum.SAE(ONES * np.nan, ONES), "The encoder has elements that are NaN"),
        (lambda: residuum.SAE(ONES, ONES * 1j), "real numbers"),
        (lambda: residuum.SAE(ONES, ONES, encoder_bias=np.ones(3)), "encoder_bias must have 4 elements"),
        (lambda: residuum.SAE(ONES, ONES, decoder_bias=np.ones(4)), "decoder_bias must have 3 elements"),
        (lambda: residuum.SAE(ONES, ONES, activation="gelu"), "'gelu' is unknown"),
        (lambda: residuum.SAE(ONES, ONES, activation="jumprelu"), "needs threshold="),
        (lambda: residuum.SAE(ONES, ONES, threshold=1), "has no threshold"),
        (lambda: residuum.SAE(ONES, ONES, activation="topk"), "belong together"),
        (lambda: residuum.SAE(ONES, ONES, activation="topk", active=5), "must be from 1 to 4"),
        (lambda: residuum.SAE(ONES, ONES).vector(4), "The feature 4 does not exist: .* 0 to 3"),
        (lambda: residuum.SAE(ONES, ONES).encode(np.ones((2, 4))), "rows of 3 elements"),
        (lambda: residuum.SAE(ONES, ONES).decode(np.ones((2, 3))), "decode takes"),
        (lambda: residuum.SAE(ONES, ONES).astype(np.int8), "float32, float16 or bfloat16"),
    ],
)
def test_what_cannot_be_used_is_refused(make, message):
    with pytest.raises(residuum.BadSAE, match=message):
        make()


def _changed(folder: Path, **changes) -> Path:
    shutil.copytree(SAES / "topk", folder)
    config = json.loads((folder / "cfg.json").read_text())
    (folder / "cfg.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gated"}, "'gated' computes features in another way"),
        ({"normalize_activations": "constant_norm_rescale"}, "normalize_activations is 'constant_norm_rescale'"),
        ({"normalize_activations": 1}, "normalize_activations is 1"),
        ({"activation_fn_str": "tanh-relu"}, "the activation function 'tanh-relu' is not supported"),
        ({"activation_fn": "tanh-relu"}, "the activation function 'tanh-relu' is not supported"),
        ({"finetuning_scaling_factor": True}, "finetuning_scaling_factor"),
        ({"k": "many"}, "k is 'many'"),
        ({"architecture": "jumprelu"}, "no threshold"),
        ({"architecture": 5}, "architecture is 5"),
    ],
)
def test_files_that_compute_something_else_are_refused(changes, message, tmp_path):
    with pytest.raises(residuum.BadSAE, match=message):
        residuum.sae.load(_changed(tmp_path / "sae", **changes))


@pytest.mark.parametrize("old", [False, True])
def test_the_normalization_of_old_files_is_that_of_saelens(old, tmp_path):
    folder = _changed(tmp_path / "sae", normalize_activations=old)
    assert residuum.sae.load(folder) == residuum.sae.load(SAES / "topk")


def test_broken_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        residuum.sae.load(tmp_path / "none")
    with (tmp_path / "array.npz").open("wb") as file:
        np.save(file, np.ones(3))
    params = bytearray((SAES / "gemma-scope" / "params.npz").read_bytes())
    params[len(params) // 2] ^= 255
    for name, content, message in (
        ("a.npz", b"no zip", "not a .npz"),
        ("cut.npz", bytes(params[:100]), "not a .npz"),
        ("damaged.npz", bytes(params), "not a .npz"),
        ("array.npz", (tmp_path / "array.npz").read_bytes(), "not a .npz"),
        ("a.safetensors", b"nothing", "not a safetensors"),
        ("a.pt", b"", "give a folder"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(residuum.BadSAE, match=message) as caught:
            residuum.sae.load(tmp_path / name)
        assert str(caught.value).count(name) == 1, "the message names the file"
    with pytest.raises(residuum.BadSAE, match="neither cfg"):
        residuum.sae.load(tmp_path)
    with pytest.raises(residuum.BadSAE, match="For SAELens, give the folder"):
        residuum.sae.load(SAES / "topk" / "sae_weights.safetensors")
    folder = tmp_path / "json"
    folder.mkdir()
    (folder / "cfg.json").write_text("{")
    with pytest.raises(residuum.BadSAE, match="not JSON"):
        residuum.sae.load(folder)


# Clamping a feature


def test_a_clamped_feature_travels_as_its_two_rows():
    sae = residuum.sae.load(SAES / "jumprelu")
    made = residuum.ClampFeature(sae, feature=7, layer=3, value=2.5, keep_norm=True)
    proto = made.to_proto()
    feature = proto.clamp_feature
    assert made.vectors == (sae.vector(7), residuum.Vector.from_array(sae.encoder[7]))
    assert [feature.digest, feature.encoder_digest] == [vector.digest for vector in made.vectors]
    assert (feature.bias, feature.threshold) == (sae.encoder_bias[7], sae.threshold[7])
    assert (feature.min, feature.max, proto.keep_norm) == (2.5, 2.5, True)
    bound = residuum.ClampFeature(sae, feature=7, layers=[3, 4], max=1).to_proto().clamp_feature
    assert (bound.HasField("min"), bound.max) == (False, 1.0)
    relu = residuum.ClampFeature(residuum.sae.load(SAES / "standard"), feature=0, layer=3, value=0)
    assert relu.to_proto().clamp_feature.threshold == 0


@pytest.mark.parametrize(
    ("name", "fields", "error", "message"),
    [
        ("topk", {"value": 0}, residuum.InvalidRequest, "depend on all features"),
        ("standard-layer-norm", {"value": 0}, residuum.InvalidRequest, "layer norm"),
        ("standard", {"value": 0, "feature": 80}, residuum.BadSAE, "The feature 80 does not exist"),
        ("standard", {}, residuum.InvalidRequest, "give value="),
        ("standard", {"value": 1, "max": 2}, residuum.InvalidRequest, "give value="),
        ("standard", {"min": 3, "max": 2}, residuum.InvalidRequest, "is below min"),
        ("standard", {"value": np.nan}, residuum.InvalidRequest, "finite"),
        ("standard", {"value": 1, "feature": 1.5}, TypeError, "whole number"),
        ("standard", {"value": 1, "gate": residuum.Gate(residuum.Vector([1.0]))}, residuum.InvalidRequest, "no gate"),
    ],
)
def test_a_feature_that_cannot_be_clamped_is_refused(name, fields, error, message):
    sae = residuum.sae.load(SAES / name)
    with pytest.raises(error, match=message):
        residuum.ClampFeature(sae, **{"feature": 0, "layer": 3, **fields})


def test_only_an_autoencoder_has_features_to_clamp():
    with pytest.raises(TypeError, match=r"takes a residuum\.SAE, not Vector"):
        residuum.ClampFeature(residuum.Vector([1.0]), feature=0, layer=1, value=1)


# Captures


def test_a_capture_names_the_encoder_and_its_features():
    sae = small()
    made = residuum.Capture(layers=[1], sae=sae, dimensions=5)
    assert made.encoding == "sae"
    options = made.to_proto().encoding_options
    assert (options.sae.digest, options.sae.features, options.dimensions) == (sae.digest, 20, 5)
    chosen = residuum.Capture(layers=[1], sae=sae, features=[3, 1]).to_proto().encoding_options
    assert (list(chosen.sae.chosen), chosen.dimensions) == ([3, 1], 0)
    assert residuum.Capture(layers=[1], sae=sae, features=7).features == (7,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoding": "sae"}, 'encoding="sae" needs sae='),
        ({"encoding": "raw", "sae": small()}, 'sae= needs encoding="sae"'),
        ({"features": [1]}, "features= needs sae="),
        ({"sae": small(), "features": [20]}, "The feature 20 does not exist"),
        ({"sae": small(), "features": [1, 1]}, "the feature 1 twice"),
        ({"sae": small(), "features": []}, "features= is empty"),
        ({"sae": small(), "dimensions": 21}, "at most 20 features can be kept"),
        ({"sae": small(), "features": [1, 2], "dimensions": 3}, "leave it out with features="),
        ({"sae": small(), "seed": 3}, "seed= needs"),
    ],
)
def test_a_capture_of_features_that_are_not_there_is_refused(fields, message):
    with pytest.raises(residuum.InvalidRequest, match=message):
        residuum.Capture(layers=[1], **fields)
    with pytest.raises(TypeError, match=r"takes a residuum\.SAE"):
        residuum.Capture(layers=[1], sae="file")
