"""Lenses of matrices: their files, what is sent, and what is refused. tests/conformance compares the tokens."""

from __future__ import annotations

import json
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch

import residuum
from residuum.exports.torch_files import read_state_dict
from residuum.v1 import sae_pb2
from tests.client.support.peer import HIDDEN, LAYERS


def matrix(seed=0, width=HIDDEN):
    return np.random.default_rng(seed).standard_normal((width, width)).astype(np.float32)


def translators(count=3, width=HIDDEN, **options):
    """The translators of the package tuned-lens: one linear layer for each layer of a model."""
    torch.manual_seed(0)
    return torch.nn.ModuleList(torch.nn.Linear(width, width, **options) for _ in range(count))


def saved(folder, modules, **config):
    """A folder as TunedLens.save writes it."""
    torch.save(modules.state_dict(), folder / "params.pt")
    fields = {"base_model_name_or_path": "x", "d_model": HIDDEN, "num_hidden_layers": len(modules), "bias": True}
    (folder / "config.json").write_text(json.dumps({**fields, "lens_type": "linear_tuned_lens", **config}))
    return folder


def sent(peer, name):
    return [request for call, request in zip(peer.calls, peer.requests, strict=True) if call == name]


def test_a_map_computes_its_formula():
    rows = np.random.default_rng(1).standard_normal((2, 3, HIDDEN))
    replaced = residuum.LensMap(matrix())
    added = residuum.LensMap(matrix(), np.arange(HIDDEN), is_added=True)
    product = np.einsum("ij,abj->abi", matrix().astype(np.float64), rows)
    np.testing.assert_allclose(replaced.apply(rows), product, rtol=1e-12)
    np.testing.assert_allclose(added.apply(rows), rows + product + np.arange(HIDDEN), rtol=1e-12)
    assert replaced.apply(rows[0, 0].astype(np.float32)).dtype == np.float32
    assert replaced != added
    assert added == residuum.LensMap(matrix(), np.arange(HIDDEN), is_added=True)
    assert added != residuum.LensMap(matrix(), np.arange(HIDDEN)), "the same weights, used in another way"
    assert residuum.LensMap(matrix().astype(ml_dtypes.bfloat16)).shape.nbytes == HIDDEN * (2 * HIDDEN + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_folder_of_tuned_lens_is_read_without_torch(tmp_path, dtype, monkeypatch):
    """A translator i is for the stream before layer i, which is that after layer i - 1."""
    modules = translators(dtype=dtype)
    lens = residuum.Lens.from_tuned_lens(saved(tmp_path, modules))
    assert list(lens) == [-1, 0, 1, 2]
    assert lens[2] is None, "the last layer's rows are used as they are"
    rows = torch.randn(4, HIDDEN, dtype=torch.float64)
    for index, module in enumerate(modules):
        found = lens.at("resid_pre", index)
        assert found is lens[index - 1]
        exact = rows + module.double()(rows)
        np.testing.assert_allclose(found.apply(rows.numpy()), exact.detach().numpy(), rtol=1e-12)
    assert lens.at("resid_post", 0) is lens[0]


def test_a_state_dict_is_read_with_and_without_its_prefix():
    modules = translators()
    plain = residuum.Lens.from_tuned_lens(modules.state_dict())
    named = residuum.Lens.from_tuned_lens(torch.nn.ModuleDict({"layer_translators": modules}).state_dict())
    assert plain == named
    assert plain[0].bias.tolist() == modules[1].bias.tolist()
    without = residuum.Lens.from_tuned_lens(translators(bias=False).state_dict())
    assert without[0].bias.tolist() == [0.0] * HIDDEN


def test_a_lens_is_written_and_read(tmp_path):
    half = residuum.LensMap(matrix(1).astype(ml_dtypes.bfloat16), is_added=True)
    lens = residuum.Lens({3: matrix(), -1: half, 4: None, 0: residuum.LensMap(matrix(2), np.ones(HIDDEN))})
    lens.save(tmp_path / "lens.safetensors")
    again = residuum.Lens.load(tmp_path / "lens.safetensors")
    assert again == lens
    assert (list(again), again[4], again[-1].weights.dtype) == ([-1, 0, 3, 4], None, half.weights.dtype)
    assert repr(again) == f"Lens(layers -1 to 4, {HIDDEN} elements)"


@pytest.mark.parametrize(
    ("maps", "told"),
    [
        ({}, "maps of one width, but these have none"),
        ({0: None}, "maps of one width, but these have none"),
        ({0: matrix(), 1: matrix(width=3)}, r"these have \[3, 8\]"),
        ({0: np.ones((2, 3))}, r"must be \[width, width\], but it is \[2, 3\]"),
        ({0: np.ones(3)}, r"must be \[width, width\], but it is \[3\]"),
        ({0: np.full((2, 2), np.nan)}, "NaN, infinite"),
        ({0: np.full((2, 2), 1e300)}, "beyond float32"),
        ({0: np.array([["a"]])}, "not an array of real numbers"),
        ({-2: matrix()}, "layer -2 does not exist"),
    ],
)
def test_bad_maps_are_refused(maps, told):
    with pytest.raises(residuum.InvalidRequest, match=told):
        residuum.Lens(maps)


def test_bad_biases_and_layers_are_refused():
    with pytest.raises(residuum.InvalidRequest, match="must have 8 elements"):
        residuum.LensMap(matrix(), np.ones(HIDDEN - 1))
    with pytest.raises(TypeError, match="must be a whole number"):
        residuum.Lens({"0": matrix()})
    lens = residuum.Lens({0: matrix(), 1: None})
    with pytest.raises(residuum.UnknownLayer, match=r"no map for the rows of resid_pre\.0, .* its layer -1\. It has"):
        lens.at("resid_pre", 0)
    with pytest.raises(residuum.InvalidRequest, match="not of mlp_out"):
        lens.at("mlp_out", 0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: saved(folder, translators(), num_hidden_layers=4), "lacks the translator 3"),
        (lambda folder: saved(folder, translators(), num_hidden_layers=2), "has 3 translators"),
        (lambda folder: saved(folder, translators(), num_hidden_layers="3"), "not a positive whole number"),
        (lambda folder: saved(folder, translators(), lens_type="other"), "lens_type is 'other'"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not an object with num_hidden_layers"),
        (lambda folder: (folder / "params.pt").write_bytes(b"no zip"), "not a zip file"),
        (lambda folder: saved(folder, torch.nn.ModuleDict({"x": translators()})), "'x.0.weight'; expected are"),
    ],
)
def test_other_folders_are_refused(tmp_path, change, told):
    change(saved(tmp_path, translators()) and tmp_path)
    with pytest.raises(residuum.InvalidRequest, match=told):
        residuum.Lens.from_tuned_lens(tmp_path)


def test_missing_files_are_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        residuum.Lens.from_tuned_lens(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        residuum.Lens.load(tmp_path / "lens.safetensors")


def test_a_file_runs_no_code(tmp_path):
    """A pickle may name any function. Only those that build tensors are known."""

    class Evil:
        def __reduce__(self):
            return print, ("this would be code of the file",)

    for content, told in (
        (pickle.dumps({"0.weight": Evil()}), "names builtins.print"),
        (pickle.dumps({"a": 1}), "no state dict"),
        (b"\x80\x02}", "cannot be read"),
    ):
        with zipfile.ZipFile(tmp_path / "params.pt", "w") as file:
            file.writestr("params/data.pkl", content)
        with pytest.raises(residuum.InvalidRequest, match=told):
            read_state_dict(tmp_path / "params.pt")


def test_tensors_that_share_memory_are_read(tmp_path):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {"all": base, "part": base[1:3, ::2], "turned": base.T, "empty": base[:0], "one": base[0, 0]}
    torch.save(tensors, tmp_path / "x.pt")
    found = read_state_dict(tmp_path / "x.pt")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor.numpy())


async def test_each_map_is_sent_once_and_named_with_its_rows(client, peer):
    lens = residuum.Lens({layer: matrix(layer) for layer in range(LAYERS - 1)} | {LAYERS - 1: None})
    layers = [0, 2, LAYERS - 1]
    reply = await client.generate("a bb", capture=residuum.Capture(layers=layers), max_tokens=2)
    first = await client.logit_lens(reply, lens=lens, top_k=2)
    acts = await client.activations(reply)
    requests = sent(peer, "Unembed")
    assert [request.map.digest for request in requests] == [lens[0].digest, lens[2].digest, b""]
    assert [request.HasField("map") for request in requests] == [True, True, False]
    assert not any(request.map.is_added for request in requests)
    for request, layer in zip(requests, layers, strict=True):
        np.testing.assert_array_equal(np.frombuffer(request.rows, "<f4").reshape(-1, HIDDEN), acts[layer])
        assert list(request.token_ids) == [*reply.prompt_token_ids, *reply.token_ids][1:]
    assert set(peer.saes) == {lens[0].digest, lens[2].digest}, "only the maps of the captured layers"
    assert {encoder.shape.activation for encoder in peer.saes.values()} == {sae_pb2.SAE_ACTIVATION_NONE}
    for digest, item in ((lens[layer].digest, lens[layer]) for layer in (0, 2)):
        np.testing.assert_array_equal(peer.saes[digest].weights, item.weights)
    puts = peer.calls.count("PutSAE")
    again = await client.logit_lens(reply, lens=lens, top_k=2)
    assert peer.calls.count("PutSAE") == puts, "the client knows that the server has them"
    plain = await client.logit_lens(reply, top_k=2)
    for name in ("top_ids", "top", "tokens", "ranks"):
        np.testing.assert_array_equal(getattr(first.predicted, name), getattr(again.predicted, name))
        np.testing.assert_array_equal(getattr(first.predicted, name), getattr(plain.predicted, name))  # no real maps
    assert first.predicted.texts == plain.predicted.texts


async def test_a_map_that_the_server_dropped_is_sent_again(client, peer):
    item = residuum.LensMap(matrix(), is_added=True)
    await client.unembed(np.zeros(HIDDEN), via=item)
    peer.saes.clear()
    found = await client.unembed(np.zeros((2, HIDDEN)), via=item, top_k=3)
    assert found.top_ids.shape == (2, 3)
    assert set(peer.saes) == {item.digest}
    assert sent(peer, "Unembed")[-1].map == item.message


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"lens": residuum.Lens({0: matrix()})}, residuum.UnknownLayer, r"no map for the rows of resid_post\.1"),
        ({"lens": residuum.Lens({0: matrix(width=9), 1: None})}, residuum.InvalidRequest, "rows of 9 elements"),
        ({"lens": residuum.Lens({0: matrix(), 1: None}), "transform": lambda _, rows: rows}, residuum.InvalidRequest,
         "not both"),
        ({"lens": matrix()}, TypeError, "takes a residuum.Lens, not ndarray"),
    ],
)  # fmt: skip
async def test_a_lens_that_does_not_fit_is_refused_before_anything_is_sent(client, peer, options, error, told):
    reply = await client.generate("a bb", capture=residuum.Capture(layers=[0, 1]), max_tokens=1)
    with pytest.raises(error, match=told):
        await client.logit_lens(reply, **options)
    assert not {"Unembed", "PutSAE"} & set(peer.calls)


async def test_a_map_that_does_not_fit_is_refused(client, peer):
    with pytest.raises(residuum.InvalidRequest, match="rows of 9 elements, and these have 8"):
        await client.unembed(np.zeros(HIDDEN), via=residuum.LensMap(matrix(width=9)))
    with pytest.raises(TypeError, match=r"such as lens\[12\], not Lens"):
        await client.unembed(np.zeros(HIDDEN), via=residuum.Lens({0: matrix()}))
    with pytest.raises(residuum.InvalidRequest, match=r"A map of the lens was refused\. It takes rows of 9") as caught:
        await client.unembed(np.zeros(9), via=residuum.LensMap(matrix(width=9)))
    assert not isinstance(caught.value, residuum.BadSAE)


def test_the_command_reads_a_lens(cli, peer, tmp_path):
    lens = residuum.Lens({layer: matrix(layer) for layer in range(LAYERS - 1)} | {LAYERS - 1: None})
    lens.save(tmp_path / "own.safetensors")
    code, _, _ = cli("lens", "a bb", "--lens", tmp_path / "own.safetensors")
    assert code == 0
    assert [request.map.digest for request in sent(peer, "Unembed")] == [
        b"" if item is None else item.digest for item in lens.values()
    ]
    saved(tmp_path, translators(LAYERS))
    code, _, _ = cli("lens", "a bb", "--lens", tmp_path, "--layers", "0")
    assert (code, sent(peer, "Unembed")[-1].map.is_added) == (0, True)
    code, _, errors = cli("lens", "a bb", "--lens", tmp_path / "none")
    assert code != 0
    assert "does not exist" in errors
