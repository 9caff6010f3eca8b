"""Directions in safetensors and GGUF files, checked with the formats' own libraries."""

from __future__ import annotations

import dataclasses
import json
import sys

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import residuum
from residuum.directions import Origin

ORIGIN = Origin(
    method="pca_diff", model="HuggingFaceTB/SmolLM2", site="mlp_out", positions="all", positive_examples=3,
    negative_examples=4, steered=True,
)  # fmt: skip


@st.composite
def any_directions(draw, first=0):
    hidden = draw(st.integers(1, 20))
    chosen = draw(st.sets(st.integers(first, 500), min_size=1, max_size=6))
    row = hnp.arrays(np.float32, hidden, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
    return {layer: draw(row) for layer in chosen}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("directions")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "joy.safetensors"


@pytest.fixture
def joy():
    return residuum.Directions({2: [1.0, 2, 3], 5: [0.5, -1, 1e-30]}, origin=ORIGIN)


# --------------------------------------------------------------------------------------------------------- safetensors


@given(vectors=any_directions(), model=st.text(), site=st.sampled_from(["resid_post", "resid_pre", "attn_out"]))
def test_file_and_back(folder, vectors, model, site):
    before = residuum.Directions(vectors, origin=dataclasses.replace(ORIGIN, model=model, site=site))
    before.save(folder / "any.safetensors")
    after = residuum.Directions.load(folder / "any.safetensors")
    assert after == before
    assert all(after[layer].values.tobytes() == vectors[layer].tobytes() for layer in vectors)


def test_files_are_standard_safetensors(joy, path):
    joy.save(str(path))
    arrays = load_file(path)
    assert sorted(arrays) == ["mlp_out.2", "mlp_out.5"]
    assert arrays["mlp_out.2"].dtype == np.float32
    assert arrays["mlp_out.2"].tolist() == [1, 2, 3]
    with safe_open(path, framework="np") as file:
        assert json.loads(file.metadata()["origin"])["positive_examples"] == 3
    assert residuum.load_vectors(path)["mlp_out.5"] == joy[5]


def rewritten(path, *, origin=None, fmt="residuum.directions.v1", **arrays):
    metadata = {"format": fmt} if origin is None else {"format": fmt, "origin": origin}
    save_file(arrays, path, metadata=metadata)
    return path


GOOD = json.dumps(dataclasses.asdict(Origin()))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"fmt": "pt", "origin": GOOD}, "was not written by Directions.save"),
        ({}, "does not say where"),
        ({"origin": "{"}, "does not say where"),
        ({"origin": "3"}, "does not say where"),
        ({"origin": '{"positive_examples": "3"}'}, "positive_examples is '3'"),
        ({"origin": '{"steered": 1}'}, "steered is 1"),
        ({"origin": '{"site": "nowhere"}', "nowhere.1": np.ones(2, np.float32)}, "'nowhere' is not a site"),
        ({"origin": GOOD}, "holds no direction"),
        ({"origin": GOOD, "resid_post": np.ones(2)}, "'resid_post' is not named resid_post.LAYER"),
        ({"origin": GOOD, "resid_pre.1": np.ones(2)}, "'resid_pre.1' is not named resid_post.LAYER"),
        ({"origin": GOOD, "resid_post.-1": np.ones(2)}, "is not named"),
        ({"origin": GOOD, "resid_post.²": np.ones(2)}, "is not named"),
        ({"origin": GOOD, f"resid_post.{'1' * 5000}": np.ones(2)}, "is not named"),
        ({"origin": GOOD, "resid_post.1\n": np.ones(2)}, "is not named"),
        ({"origin": GOOD, "resid_post.1": np.ones(2), "resid_post.01": np.ones(2)}, "repeats a layer"),
        ({"origin": GOOD, "resid_post.1": np.ones((1, 2))}, r"layer 1: .*\[1, 2\]"),
        ({"origin": GOOD, "resid_post.1": np.array([np.nan])}, "layer 1: 1 of 1"),
        ({"origin": GOOD, "resid_post.1": np.ones(2), "resid_post.2": np.ones(3)}, "layer 2 has 3"),
    ],
)
def test_files_that_hold_something_else(path, written, message):
    rewritten(path, **written)
    with pytest.raises(residuum.InvalidRequest, match=message) as caught:
        residuum.Directions.load(path)
    assert "joy.safetensors" in str(caught.value)


def test_unknown_metadata_of_a_newer_version_is_ignored(path):
    rewritten(path, origin='{"model": "m", "moon": "full"}', **{"resid_post.3": np.ones(2, np.float32)})
    assert residuum.Directions.load(path).origin == Origin(model="m")


def test_missing_and_damaged_files_are_reported(joy, path):
    with pytest.raises(FileNotFoundError):
        residuum.Directions.load(path)
    joy.save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(residuum.InvalidRequest, match="not a safetensors file"):
        residuum.Directions.load(path)
    with pytest.raises(OSError, match="written"):
        joy.save(path.parent / "none" / "joy.safetensors")


# ----------------------------------------------------------------------------------------------------------------- GGUF


def write_gguf(path, tensors, *, architecture="controlvector", hint="mistral", **options):
    """Write a file in the order in which repeng's `export_gguf` calls the library (0.4.0)."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    if hint is not None:
        writer.add_string("controlvector.model_hint", hint)
    writer.add_uint32("controlvector.layer_count", len(tensors))
    for name, (values, *how) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=how[0] if how else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "trippy.gguf"


@given(vectors=any_directions(), hint=st.text(st.characters(codec="utf-8"), min_size=1))
def test_a_control_vector_as_repeng_writes_it(folder, vectors, hint):
    # repeng counts down from the last layer
    tensors = {f"direction.{layer}": (vectors[layer],) for layer in sorted(vectors, reverse=True)}
    found = residuum.Directions.from_gguf(write_gguf(folder / "any.gguf", tensors, hint=hint))
    assert found == residuum.Directions(vectors, origin=Origin(method="control_vector", model=hint))
    assert found.origin.site == "resid_post"


@given(vectors=any_directions(first=1))
def test_gguf_and_back(folder, vectors):
    before = residuum.Directions(vectors, origin=Origin(method="control_vector", model="llama"))
    before.to_gguf(folder / "back.gguf")
    assert residuum.Directions.from_gguf(folder / "back.gguf") == before


def test_repeng_reads_the_written_file(file):
    joy = residuum.Directions({0: [1.0, 2], 3: [3.0, 4], 7: [5.0, 6]})
    joy.to_gguf(file, layers=[3, 7], model_hint="qwen2")
    reader = gguf.GGUFReader(file)
    assert bytes(reader.get_field("general.architecture").parts[-1]) == b"controlvector"
    assert bytes(reader.get_field("controlvector.model_hint").parts[-1]) == b"qwen2"
    assert reader.get_field("controlvector.layer_count").contents() == 2
    assert {tensor.name: tensor.data.tolist() for tensor in reader.tensors} == {
        "direction.3": [3.0, 4], "direction.7": [5.0, 6],
    }  # fmt: skip
    # the only dtype that llama.cpp accepts
    assert {tensor.tensor_type for tensor in reader.tensors} == {gguf.GGMLQuantizationType.F32}


def test_a_model_hint_is_always_written(file):
    """repeng cannot read a file without a model hint."""
    residuum.Directions({1: [1.0]}).to_gguf(file)
    assert gguf.GGUFReader(file).get_field("controlvector.model_hint").contents() == "unknown"


def test_directions_that_llama_cpp_refuses_are_not_written(file):
    joy = residuum.Directions({0: [1.0], 1: [1.0], 2: [1.0]})
    with pytest.raises(residuum.UnknownLayer, match=r"layer 0.*layers=\[1, 2\]"):
        joy.to_gguf(file)
    pre = residuum.Directions(joy, origin=Origin(site="resid_pre"))
    with pytest.raises(residuum.UnknownLayer, match=r"layer 0.*layers=\[2\]"):
        pre.to_gguf(file, layers=[1, 2])
    assert not file.exists()
    pre.to_gguf(file, layers=[2])
    assert residuum.Directions.from_gguf(file).layers == (1,), "the stream before layer 2 is the one after layer 1"


@pytest.mark.parametrize("site", ["z", "mlp_act"])
def test_directions_beside_the_stream_are_not_written_for_programs_that_steer_only_the_stream(file, site):
    with pytest.raises(residuum.UnknownSite, match=f"Directions of {site} cannot be written as GGUF"):
        residuum.Directions({1: [1.0]}, origin=Origin(site=site)).to_gguf(file)
    assert not file.exists()
    residuum.Directions({1: [1.0]}, origin=Origin(site="attn_out")).to_gguf(file)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_gguf_dtypes(file, dtype):
    write_gguf(file, {"direction.4": (np.array([1.5, -2, 0.25], dtype),)})
    assert residuum.Directions.from_gguf(file)[4].values.tolist() == [1.5, -2, 0.25]


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.Q8_0])
def test_gguf_quantized(file, kind):
    values = np.linspace(-4, 4, 64, dtype=np.float32)
    write_gguf(file, {"direction.4": (gguf.quantize(values, kind), kind)})
    np.testing.assert_allclose(residuum.Directions.from_gguf(file)[4].values, values, atol=0.04)


def test_gguf_big_endian(file):
    values = np.array([1.5, -2], np.float32)
    write_gguf(file, {"direction.4": (values,)}, endianess=gguf.GGUFEndian.BIG)
    assert residuum.Directions.from_gguf(file)[4].values.tolist() == [1.5, -2]


def test_a_file_can_be_overwritten_while_its_directions_are_in_use(file):
    write_gguf(file, {"direction.4": (np.float32([1, 2]),)})
    found = residuum.Directions.from_gguf(file)
    file.write_bytes(b"\0" * file.stat().st_size)
    assert found[4].values.tolist() == [1, 2]


def test_a_gguf_file_that_cannot_be_written_stays_as_it_was(file, monkeypatch):
    residuum.Directions({4: [1, 2]}).to_gguf(file)
    before = file.read_bytes()

    def fail(writer):
        raise OSError("no room")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", fail)
    with pytest.raises(OSError, match="no room"):
        residuum.Directions({5: [3, 4]}).to_gguf(file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


ONE = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("tensors", "facts", "message"),
    [
        ({"direction.1": (ONE,)}, {"architecture": "llama"}, "of architecture 'llama' and not a control vector"),
        ({}, {}, "holds no direction"),
        ({"output.weight": (ONE,)}, {}, "holds no direction"),
        ({"direction.one": (ONE,)}, {}, "'direction.one' is not named direction.LAYER"),
        ({"direction.1.bias": (ONE,)}, {}, "is not named direction.LAYER"),
        ({"direction.1": (np.ones((2, 2), np.float32),)}, {}, r"layer 1: .*\[2, 2\]"),
        ({"direction.1": (ONE,), "direction.2": (np.ones(3, np.float32),)}, {}, "layer 2 has 3"),
        ({"direction.1": (np.float32([np.inf, 1]),)}, {}, "layer 1: 1 of 2"),
    ],
)
def test_other_gguf_files_are_refused(file, tensors, facts, message):
    with pytest.raises(residuum.InvalidRequest, match=message) as caught:
        residuum.Directions.from_gguf(write_gguf(file, tensors, **facts))
    assert "trippy.gguf" in str(caught.value)


def test_gguf_without_a_model_hint(file):
    found = residuum.Directions.from_gguf(write_gguf(file, {"direction.0": (ONE,)}, hint=None))
    assert found.origin.model == ""
    assert found.layers == (0,), "repeng may have layer 0, though llama.cpp has not"


def test_truncated_gguf_files_are_refused(file):
    whole = write_gguf(file, {"direction.1": (ONE,), "direction.2": (ONE,)}).read_bytes()
    assert residuum.Directions.from_gguf(file).layers == (1, 2)
    end = whole.rindex(ONE.tobytes()) + ONE.nbytes  # the rest is padding of the last block
    for length in range(end):
        file.write_bytes(whole[:length])
        with pytest.raises(residuum.InvalidRequest, match=r"trippy\.gguf"):
            residuum.Directions.from_gguf(file)


def test_missing_gguf_files_are_reported(file):
    with pytest.raises(FileNotFoundError):
        residuum.Directions.from_gguf(file)


def test_gguf_without_its_package_names_the_extra(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"extra 'gguf' \(from a checkout: pip install '\.\[gguf\]'\)"):
        residuum.Directions.from_gguf(file)
    with pytest.raises(ImportError, match="gguf"):
        residuum.Directions({1: [1.0]}).to_gguf(file)
