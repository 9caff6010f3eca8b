"""Exports of encoded captures: npz and safetensors have the encodings' own fields, Zarr and Parquet decoded rows."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

import residuum
from residuum.wire.rows.encodings import RowFormat
from tests.client.captures.test_encodings import JOY, WOE
from tests.client.support.opened import OPENERS
from tests.client.support.peer import HIDDEN

LAYERS = (1, 4)
ENCODINGS = {
    "fp32": ({}, HIDDEN),
    "fp16": ({}, HIDDEN),
    "bf16": ({}, HIDDEN),
    "full8": ({}, HIDDEN),
    "full8 by dimension": ({"axis": "dimension"}, HIDDEN),
    "rp8": ({"dimensions": 4, "seed": 7}, 4),
    "rp": ({"dimensions": 4}, 4),
    "topk8": ({"dimensions": 2}, HIDDEN),
    "topk": ({"dimensions": 2}, HIDDEN),
    "project": ({"vectors": [JOY, WOE]}, 2),
    "sae": ({"sae": residuum.SAE(np.eye(12, HIDDEN), np.eye(12, HIDDEN)), "dimensions": 4}, 12),
}


@pytest.fixture(params=list(ENCODINGS))
def encoding(request):
    return request.param


@pytest.fixture
def client(endpoint):
    with residuum.Client(endpoint) as opened:
        yield opened


def generate(client, encoding, **more):
    options, _ = ENCODINGS[encoding]
    capture = residuum.Capture(layers=LAYERS, encoding=encoding.split()[0], **options, **more)
    return client.generate("a bb ccc", max_tokens=60, capture=capture)


def fields_of(name, arrays):
    return {key.removeprefix(f"{name}."): values for key, values in arrays.items() if key.startswith(f"{name}.")}


@pytest.mark.parametrize("kind", ["zarr", "parquet"])
def test_exports_contain_decoded_rows(client, encoding, kind, tmp_path):
    reply = generate(client, encoding)
    acts = client.activations(reply)
    made = client.export(reply, tmp_path / f"x.{kind}")
    found, manifest = OPENERS[kind](tmp_path / f"x.{kind}")
    assert f"2 layers × 62 positions × {ENCODINGS[encoding][1]}" in str(made)
    assert manifest["mode"] == encoding.split()[0]
    one = found["resid_post"]
    assert one.positions == list(range(62))
    for layer in LAYERS:
        assert one.rows[layer].shape == (62, ENCODINGS[encoding][1])
        assert np.array_equal(one.rows[layer], acts[layer])


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_exports_of_encoded_rows_have_the_fields_of_the_encoding(client, encoding, kind, tmp_path):
    reply = generate(client, encoding)
    acts = client.activations(reply)
    path = tmp_path / f"x.{kind}"
    client.export(reply, path)
    if kind == "npz":
        arrays = dict(np.load(path, allow_pickle=False))
    else:
        with safe_open(path, framework="np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    for layer in LAYERS:
        expected = acts.encoded(layer)
        if encoding in {"fp32", "fp16", "bf16"}:
            fields = {"x": arrays[f"resid_post.{layer}"]}
        else:
            fields = fields_of(f"resid_post.{layer}", arrays)
        assert fields.keys() == expected.keys()
        for name, values in expected.items():
            portable = kind == "npz" and values.dtype == ml_dtypes.bfloat16
            assert fields[name].dtype == (np.float32 if portable else values.dtype)
            assert np.array_equal(fields[name].astype(np.float64), values.astype(np.float64))


def test_npz_exports_of_full8_match_vllm_capture(client, tmp_path):
    """`q` uint8 [tokens, dims], `scale` and `zero` for each row: readers compute the row from them."""
    reply = generate(client, "full8")
    client.export(reply, tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz") as file:
        q, scale, zero = (file[f"resid_post.4.{field}"] for field in ("q", "scale", "zero"))
        manifest = json.loads(str(file["manifest"]))
    assert (q.dtype, q.shape, scale.shape, zero.shape) == (np.uint8, (62, HIDDEN), (62,), (62,))
    np.testing.assert_allclose(q * scale[:, None] + zero[:, None], client.activations(reply)[4], rtol=1e-6)
    assert manifest["compression"] == {"quant_bits": 8, "axis": "row"}
    assert manifest["sequences"]["0"]["layers"]["4"]["shape"] == list(q.shape)


def test_encoded_rows_come_back_from_a_safetensors_export(client, encoding, tmp_path):
    reply = generate(client, encoding)
    acts = client.activations(reply)
    client.export(reply, tmp_path / "x.safetensors")
    again = residuum.Activations.from_safetensors(tmp_path / "x.safetensors")
    assert repr(again) == repr(acts)
    assert (again.nbytes, again.dtype, again.width) == (acts.nbytes, acts.dtype, acts.width)
    for layer in LAYERS:
        assert np.array_equal(again[layer], acts[layer])
        for name, values in acts.encoded(layer).items():
            assert np.array_equal(again.encoded(layer)[name], values)
    again.to_safetensors(tmp_path / "y.safetensors")
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()


@pytest.mark.parametrize("kind", list(OPENERS))
def test_exports_of_incomplete_encoded_captures(client, peer, encoding, kind, tmp_path):
    peer.script.lost_layers = (1,)
    reply = generate(client, encoding)
    path = tmp_path / f"x.{kind}"
    with pytest.raises(residuum.IncompleteCapture):
        client.export(reply, path)
    made = client.export(reply, path, allow_partial=True)
    assert (made.num_rows, made.num_missing) == (62, 62)
    acts = client.activations(reply, allow_partial=True)
    assert np.isnan(acts[1]).all()
    if kind == "safetensors":
        again = residuum.Activations.from_safetensors(path)
        assert np.array_equal(again.present, acts.present)
        for layer in LAYERS:
            assert np.array_equal(again[layer], acts[layer], equal_nan=True)
    elif kind == "npz":
        fields = fields_of("resid_post.1", np.load(path)) or {"x": np.load(path)["resid_post.1"]}
        numbers = [values for values in fields.values() if values.dtype.kind == "f" and len(values) == 62]
        assert all(np.isnan(values).all() for values in numbers)
        assert np.array_equal(np.load(path)["resid_post.present"], acts.present)
    else:
        one = OPENERS[kind](path)[0]["resid_post"]
        assert np.array_equal(one.rows[4], acts[4])
        assert np.isnan(one.rows[1]).all() if kind == "zarr" else 1 not in one.rows


@pytest.mark.parametrize("kind", list(OPENERS))
def test_exports_of_reduced_captures(client, kind, tmp_path):
    reply = client.generate(
        "a bb ccc", max_tokens=60, capture=residuum.Capture(layers=LAYERS, reduction="mean", encoding="fp32")
    )
    client.export(reply, tmp_path / f"x.{kind}")
    found, manifest = OPENERS[kind](tmp_path / f"x.{kind}")
    acts = client.activations(reply)
    assert found["resid_post"].positions == acts.positions.tolist() == [2, 61]
    assert np.array_equal(found["resid_post"].rows[4], acts[4])
    assert manifest["compression"]["reduction"] == "mean"


def test_an_export_of_encoded_rows_needs_memory_for_one_slice(monkeypatch, client, tmp_path):
    """Rows are decoded one slice at a time, so a large layer is never decoded as a whole."""
    monkeypatch.setattr("residuum.exports.parts.SLICE_BYTES", 10 * HIDDEN * 4)
    decoded = []
    decode = RowFormat.decode

    def watched(form, rows, prefixes=None):
        decoded.append(np.shape(rows))
        return decode(form, rows, prefixes)

    acts = client.activations(generate(client, "full8 by dimension"))
    monkeypatch.setattr(RowFormat, "decode", watched)
    acts.export(tmp_path / "x.parquet")
    assert decoded == [(10,)] * 6 + [(2,)] + [(10,)] * 6 + [(2,)]
    monkeypatch.undo()
    assert np.array_equal(OPENERS["parquet"](tmp_path / "x.parquet")[0]["resid_post"].rows[4], acts[4])


def test_a_training_loop_gets_decoded_rows(client, encoding, endpoint):
    torch = pytest.importorskip("torch")
    from residuum.torch import ActivationDataset

    reply = generate(client, encoding)
    acts = client.activations(reply)
    (batch,) = ActivationDataset(endpoint, [reply], batch_size=4 * 62)
    assert batch.activations.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}.get(encoding, torch.float32)
    for values, layer, position in zip(batch.activations, batch.layers.tolist(), batch.positions.tolist(), strict=True):
        assert np.array_equal(values.float().numpy(), acts[layer][position])


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        ({"encoding": "rp", "dimensions": 4}, {"encoding": "full8"}, r"encoding \(rp and full8\)"),
        ({"encoding": "rp8"}, {"encoding": "rp8", "dimensions": 4}, r"dimensions \(8 and 4\)"),
        ({"encoding": "rp8", "seed": 1}, {"encoding": "rp8", "seed": 2}, r"seed \(1 and 2\)"),
        ({"reduction": "mean"}, {}, r"reduction \(mean and none\)"),
        ({"before_steering": True}, {}, r"before_steering \(True and False\)"),
    ],
)
def test_a_training_loop_does_not_mix_encodings(client, endpoint, one, other, what):
    pytest.importorskip("torch")
    from residuum.torch import ActivationDataset

    replies = []
    for options in (one, other):
        replies.append(client.generate("a bb ccc", max_tokens=3, capture=residuum.Capture(layers=[1], **options)))
        client.manifest(replies[-1], wait=True)
    with pytest.raises(residuum.InvalidRequest, match=rf"differ in {what}\. The captures of one dataset"):
        ActivationDataset(endpoint, replies)


def test_a_training_loop_does_not_mix_adapters_or_features(client, peer, endpoint):
    pytest.importorskip("torch")
    from residuum.torch import ActivationDataset

    def captured(**options):
        reply = client.generate("a bb ccc", max_tokens=3, capture=residuum.Capture(layers=[1], **options))
        client.manifest(reply, wait=True)
        return reply

    plain = captured()
    peer.script.adapter = "polite"
    polite = captured()
    with pytest.raises(residuum.InvalidRequest, match=r"differ in adapter \(none and polite\)\. The captures of one"):
        ActivationDataset(endpoint, [plain, polite])
    sae = residuum.SAE(np.ones((20, HIDDEN)), np.ones((20, HIDDEN)))
    some, others = captured(sae=sae, features=[1, 2]), captured(sae=sae, features=[3, 4])
    with pytest.raises(residuum.InvalidRequest, match=r"differ in features"):
        ActivationDataset(endpoint, [some, others])
