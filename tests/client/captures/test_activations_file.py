"""Activations in memory and in a safetensors file."""

from __future__ import annotations

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import residuum
from tests.client.support.disks import no_file_above
from tests.client.support.peer import HIDDEN, POST, PRE, rows


@pytest.fixture
def acts(endpoint):
    with residuum.Client(endpoint) as client:
        capture = residuum.Capture(layers=[1, 4], sites=("resid_post", "resid_pre"), positions=slice(1, None))
        reply = client.generate("a bb ccc", max_tokens=4, capture=capture, n=2)
        return client.activations(reply.request_id)


@pytest.fixture
def partial(endpoint, peer):
    peer.script.lost_layers = (1,)
    with residuum.Client(endpoint) as client:
        reply = client.generate("a bb ccc", max_tokens=4, capture=residuum.Capture(layers=[1, 4]))
        return client.activations(reply.request_id, allow_partial=True)


def test_a_mapping_of_layers(acts):
    assert list(acts) == [1, 4]
    assert len(acts) == 2
    assert 4 in acts
    assert 2 not in acts
    assert acts.get(2) is None
    assert {layer: values.shape for layer, values in acts.items()} == {1: (5, HIDDEN), 4: (5, HIDDEN)}
    assert acts == acts  # noqa: PLR0124 - the arrays' own comparison would raise here
    assert isinstance(hash(acts), int)


def test_stack(acts):
    assert acts.stack().shape == (2, 5, HIDDEN)
    assert acts.stack().dtype == np.float32
    assert np.array_equal(acts.stack([4])[0], acts[4])
    assert np.array_equal(acts.stack([4, 1])[1], acts[1])


def test_as_one_array(acts):
    assert np.array_equal(np.asarray(acts), acts.stack())
    assert np.asarray(acts).dtype == np.float32
    assert np.asarray(acts, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        acts.__array__(copy=False)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_file_has_the_permissions_of_any_new_file(acts, tmp_path, umask):
    before = os.umask(umask)
    try:
        acts.to_safetensors(tmp_path / "x.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_file_keeps_its_permissions_when_it_is_written_again(acts, tmp_path):
    path = tmp_path / "x.safetensors"
    path.touch()
    path.chmod(0o640)
    acts.to_safetensors(path)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_failed_write_leaves_no_file(acts, tmp_path):
    with no_file_above(100), pytest.raises(OSError, match=r"x.safetensors cannot be written.*File too large"):
        acts.to_safetensors(tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("look", [lambda a: a[2], lambda a: a.raw(2), lambda a: a.stack([2]), lambda a: a["x"]])
def test_a_layer_that_was_not_fetched_is_reported(acts, look):
    with pytest.raises(KeyError, match=r"choose among \[1, 4\]"):
        look(acts)


def test_a_sequence_or_site_that_was_not_fetched_is_reported(acts):
    with pytest.raises(KeyError, match=r"choose among sequences \[0, 1\]"):
        acts.select(sequence=2)
    with pytest.raises(KeyError, match="resid_pre"):
        acts.select(site="mlp_out")


def test_repr_shows_shapes(acts):
    assert "complete: 2 layers × 5 positions × 8, 2 sequences, site resid_post (also resid_pre), bfloat16" in repr(acts)
    assert ", site resid_pre (also resid_post), " in repr(acts.select(site="resid_pre"))


def test_a_file_keeps_the_order_of_sites_and_the_selection(acts, tmp_path):
    chosen = acts.select(site="resid_pre", sequence=1)
    chosen.to_safetensors(tmp_path / "x.safetensors")
    back = residuum.Activations.from_safetensors(tmp_path / "x.safetensors")
    assert (back.site, back.sequence, back.sites) == ("resid_pre", 1, acts.sites)
    for layer in back.layers:
        assert np.array_equal(back[layer], chosen[layer])


def test_a_set_of_sites_has_one_order():
    assert residuum.Capture(sites={"mlp_out", "resid_post", "attn_out"}).sites == ("resid_post", "attn_out", "mlp_out")


def test_each_access_returns_a_copy_but_raw_does_not(acts):
    acts[1][:] = 0
    assert np.array_equal(acts[1], rows(0, POST, 1, range(1, 6)).astype(np.float32))
    with pytest.raises(ValueError, match="read-only"):
        acts.raw(1)[:] = 0


def test_file_and_back(acts, tmp_path):
    path = tmp_path / "x.safetensors"
    acts.to_safetensors(path)
    again = residuum.Activations.from_safetensors(path)
    assert repr(again) == repr(acts)
    assert again.manifest == acts.manifest
    for sequence in (0, 1):
        for name, site in (("resid_post", POST), ("resid_pre", PRE)):
            chosen = again.select(sequence=sequence, site=name)
            assert np.array_equal(chosen.raw(4), rows(sequence, site, 4, range(1, 6)))
            assert chosen.token_ids.tolist() == acts.select(sequence=sequence).token_ids.tolist()
            assert chosen.positions.tolist() == [1, 2, 3, 4, 5]


def test_files_are_standard_safetensors(acts, tmp_path):
    path = tmp_path / "x.safetensors"
    acts.to_safetensors(str(path))
    arrays = load_file(path)
    assert arrays["resid_post.4"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(arrays["sequence1/resid_pre.1"], rows(1, PRE, 1, range(1, 6)))
    assert arrays["resid_post.positions"].tolist() == [1, 2, 3, 4, 5]
    with safe_open(path, framework="np") as file:
        assert json.loads(file.metadata()["manifest"])["request_id"] == acts.manifest.capture_id


def test_torch_reads_the_file(acts, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    path = tmp_path / "x.safetensors"
    acts.to_safetensors(path)
    tensor = load_torch(path)["resid_post.4"]
    assert tensor.dtype == torch.bfloat16
    assert np.array_equal(tensor.float().numpy(), acts[4])


def test_a_partial_file_stays_partial(partial, tmp_path):
    path = tmp_path / "x.safetensors"
    partial.to_safetensors(path)
    again = residuum.Activations.from_safetensors(path)
    assert np.array_equal(again.present, partial.present)
    assert np.isnan(again[1]).all()
    assert again.manifest.state == "incomplete"


def test_other_files_are_refused(tmp_path):
    save_file({"a": np.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("hello")
    for name in ("other", "text"):
        with pytest.raises(residuum.InvalidRequest, match=name):
            residuum.Activations.from_safetensors(tmp_path / f"{name}.safetensors")
    with pytest.raises(FileNotFoundError):
        residuum.Activations.from_safetensors(tmp_path / "none.safetensors")
    with pytest.raises(residuum.InvalidRequest):
        residuum.Manifest.from_json("hello")
