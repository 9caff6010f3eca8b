"""Captures with every encoding and reduction: requested, read, decoded and described."""

from __future__ import annotations

import json

import numpy as np
import pytest

import residuum
from residuum.protocol.generation.lens import LensPlan
from residuum.v1 import capture_pb2, tensor_pb2
from residuum.values.captures.blocks import EncodedBlock
from residuum.wire.rows.encodings import BY_DIMENSION, TOPK, RowFormat
from tests.client.support.peer import HIDDEN, POST, row
from tests.wire.rows.test_encoding_projection import signs_in_words

LAYERS, PROMPT, ROWS = (1, 4), 3, 6
"""The layers; tokens of the prompt; rows of a prompt of 3 tokens and a reply of 4."""
JOY = residuum.Vector([1, 2, 3, 4, 5, 6, 7, 8])
WOE = residuum.Vector([0, 0, 0.5, 0, 0, 0, 0, -1])


def capturing(**fields):
    return residuum.Capture(layers=LAYERS, **fields)


def truth(layer, positions=range(ROWS)):
    """Return the rows that the model computed, float64 [positions, HIDDEN]."""
    return np.stack([row(0, POST, layer, position).astype(np.float64) for position in positions])


async def read(client, **fields):
    reply = await client.generate("a bb ccc", max_tokens=4, capture=capturing(**fields))
    return await client.activations(reply.request_id)


@pytest.mark.parametrize("encoding", ["raw", "fp32", "fp16", "bf16"])
async def test_lossless_encodings_return_exact_rows(client, encoding):
    """The peer's rows are small whole numbers, so every cast is exact."""
    acts = await read(client, encoding=encoding)
    assert (acts.encoding, acts.width, acts.hidden_size) == (encoding, HIDDEN, HIDDEN)
    for layer in LAYERS:
        np.testing.assert_array_equal(acts[layer], truth(layer))
        assert acts[layer].dtype == np.float32
        np.testing.assert_array_equal(acts.encoded(layer)["x"].astype(np.float64), truth(layer))
    assert acts.dtype.itemsize == (4 if encoding == "fp32" else 2)


@pytest.mark.parametrize("axis", [None, "row", "dimension"])
async def test_encoding_full8(client, axis):
    acts = await read(client, encoding="full8", axis=axis)
    assert acts.manifest.axis == (axis or "row")
    for layer in LAYERS:
        exact, part = truth(layer), acts.encoded(layer)
        assert part["q"].shape == (ROWS, HIDDEN)
        if axis == "dimension":  # blocks of four positions
            assert part["scale"].shape == part["zero"].shape == (2, HIDDEN)
            assert part["group"].tolist() == [0, 0, 0, 0, 1, 1]
            spread = np.stack([np.ptp(block, axis=0) for block in (exact[:4], exact[4:])])
            scale, zero = part["scale"][part["group"]], part["zero"][part["group"]]
        else:
            spread = np.ptp(exact, axis=1)
            scale, zero = part["scale"][:, None], part["zero"][:, None]
        np.testing.assert_allclose(part["scale"], spread / 255, rtol=1e-6)
        np.testing.assert_allclose(acts[layer], scale * part["q"] + zero, rtol=1e-6)
        assert (np.abs(acts[layer] - exact) <= scale / 2 + 1e-5).all()
    assert acts.nbytes < 2 * len(LAYERS) * ROWS * (HIDDEN + 8) + 1000


@pytest.mark.parametrize("encoding", ["topk", "topk8"])
async def test_encoding_topk(client, encoding):
    acts = await read(client, encoding=encoding, dimensions=2)
    assert (acts.width, acts.manifest.dimensions) == (HIDDEN, 2)
    for layer in LAYERS:
        exact = truth(layer)
        for values, whole, index in zip(acts[layer], exact, acts.encoded(layer)["index"], strict=True):
            kept = sorted(range(HIDDEN), key=lambda at: (-abs(whole[at]), at))[:2]
            assert index.tolist() == sorted(kept)
            limit = 0 if encoding == "topk" else np.ptp(whole[kept]) / 255 / 2 + 1e-5
            expected = np.where(np.isin(np.arange(HIDDEN), kept), whole, 0)
            assert (np.abs(values - expected) <= limit).all()


@pytest.mark.parametrize("encoding", ["rp", "rp8"])
async def test_encoding_rp_and_its_projection(client, encoding):
    acts = await read(client, encoding=encoding, dimensions=5, seed=2**64 - 7)
    assert (acts.width, acts.manifest.seed) == (5, 2**64 - 7)
    matrix = np.array(signs_in_words(2**64 - 7, HIDDEN, 5)) / np.sqrt(5)
    np.testing.assert_allclose(acts.projection(), matrix, rtol=1e-6)
    for layer in LAYERS:
        exact = truth(layer) @ matrix
        limit = np.ptp(exact, axis=1, keepdims=True) / 255 / 2 + 1e-5 if encoding == "rp8" else 1e-5
        assert (np.abs(acts[layer] - exact) <= limit).all()
        direction = JOY.values @ acts.projection()
        np.testing.assert_allclose(acts[layer] @ direction, exact @ (matrix.T @ JOY.values), atol=5)
    assert acts.stack([4, 1]).shape == (2, ROWS, 5)
    np.testing.assert_array_equal(np.asarray(acts)[1], acts[4])


async def test_encoding_project_sends_its_vectors(client, peer):
    acts = await read(client, encoding="project", vectors=[JOY, WOE])
    assert peer.vectors.keys() == {JOY.digest, WOE.digest}
    assert acts.manifest.projected_onto == (JOY.hexdigest, WOE.hexdigest)
    for layer in LAYERS:
        expected = truth(layer) @ np.stack([JOY.values, WOE.values], axis=1).astype(np.float64)
        np.testing.assert_allclose(acts[layer], expected, rtol=1e-6)
        np.testing.assert_array_equal(acts.encoded(layer)["y"], acts[layer])
    peer.vectors.clear()  # like a server that evicted them or was restarted
    again = await read(client, encoding="project", vectors={1: WOE})
    np.testing.assert_allclose(again[4], truth(4) @ WOE.values[:, None], rtol=1e-6)


async def test_an_encoding_of_a_registered_request(client):
    registration = await client.register(capture=capturing(encoding="project", vectors=JOY))
    reply = await client.generate("a bb ccc", registration=registration, max_tokens=4)
    acts = await client.activations(reply.request_id)
    assert acts[1].shape == (ROWS, 1)


async def test_encoded_rows_can_be_followed(client):
    """Followed pieces are decoded."""
    reply = await client.generate("a bb ccc", max_tokens=4, capture=capturing(encoding="full8", axis="dimension"))
    acts = await client.activations(reply.request_id)
    pieces = await client.follow(reply.request_id)
    assert sum(len(piece.positions) for piece in pieces) == len(LAYERS) * ROWS
    for piece in pieces:
        np.testing.assert_array_equal(piece.rows, acts[piece.layer][piece.positions])


async def test_slices_of_encoded_rows(client):
    whole = await read(client, encoding="full8", axis="dimension")
    name = whole.manifest.capture_id
    part = await client.activations(name, layers=[4], positions=[2, 5])
    assert part.positions.tolist() == [2, 5]
    np.testing.assert_array_equal(part[4], whole[4][[2, 5]])
    assert part.encoded(4)["group"].tolist() == [0, 1]


@pytest.mark.filterwarnings("ignore::residuum.EmptyCaptureWarning")
async def test_full8_along_dimensions_has_0_rows_if_none_is_selected(client, tmp_path):
    """Then no chunk comes, and so no scales."""
    reply = await client.generate("a bb ccc", max_tokens=4, capture=capturing(encoding="full8", axis="dimension"))
    acts = await client.activations(reply, positions=[100])
    acts.to_safetensors(tmp_path / "none.safetensors")
    for found in (acts, residuum.Activations.from_safetensors(tmp_path / "none.safetensors")):
        assert found[1].shape == found.raw(4).shape == (0, HIDDEN)
        assert found.stack().shape == (2, 0, HIDDEN)
        assert {name: values.shape for name, values in found.encoded(1).items()} == {
            "q": (0, HIDDEN), "scale": (0, HIDDEN), "zero": (0, HIDDEN), "group": (0,),
        }  # fmt: skip
    rows = await client.rows([reply], layer=1, positions=[100])
    assert rows.values.shape == (0, HIDDEN)


@pytest.mark.parametrize("fields", [{"encoding": "rp8", "dimensions": 5}, {"encoding": "topk", "dimensions": 2}])
async def test_a_partial_encoding_has_nan_where_rows_are_missing(client, peer, fields):
    peer.script.lost_layers = (4,)
    reply = await client.generate("a bb ccc", max_tokens=4, capture=capturing(**fields))
    acts = await client.activations(reply.request_id, allow_partial=True)
    assert np.isnan(acts[4]).all()
    assert np.isfinite(acts[1]).all()
    assert acts.present.tolist() == [[True] * ROWS, [False] * ROWS]
    assert np.isnan(acts.stack()[1]).all()


async def test_an_encoding_without_positions_is_empty(client):
    reply = await client.generate("a bb ccc", max_tokens=4, capture=capturing(encoding="rp8"))
    with pytest.warns(residuum.EmptyCaptureWarning):
        acts = await client.activations(reply.request_id, positions=[100])
    assert acts[1].shape == (0, HIDDEN)


# Reductions


@pytest.mark.parametrize(
    ("reduction", "function"),
    [
        ("last", lambda rows: rows[-1]),
        ("mean", lambda rows: rows.mean(axis=0)),
        ("max", lambda rows: rows.max(axis=0)),
        ("sum", lambda rows: rows.sum(axis=0)),
    ],
)
async def test_a_reduction_with_an_encoding(client, reduction, function):
    """One row for the prompt and one for the generated tokens, at the last position of each."""
    acts = await read(client, encoding="fp32", reduction=reduction)
    assert acts.positions.tolist() == [PROMPT - 1, ROWS - 1]
    assert acts.manifest.reduction == reduction
    assert acts.manifest.num_rows == 2 * len(LAYERS)
    for layer in LAYERS:
        exact = truth(layer)
        expected = [function(exact[:PROMPT]), function(exact[PROMPT:])]
        np.testing.assert_allclose(acts[layer], expected, rtol=2**-8)  # the peer rounds to bfloat16
    assert f"{reduction} of each phase" in repr(acts)


async def test_a_reduction_of_one_phase(client):
    acts = await read(client, reduction="mean", positions="prompt")
    assert acts.positions.tolist() == [PROMPT - 1]
    acts = await read(client, reduction="last", positions="generated")
    assert acts.positions.tolist() == [ROWS - 1]
    np.testing.assert_array_equal(acts[4], truth(4, [ROWS - 1]))


async def test_a_reduction_can_be_read_while_open(client, peer):
    """Generated rows before the last are dropped when the last is known."""
    import threading

    peer.script.delay_seal = threading.Event()
    reply = await client.generate("a bb ccc", max_tokens=4, capture=capturing(encoding="fp32", reduction="max"))
    early = await client.activations(reply.request_id, wait=False, allow_partial=True)
    assert early.positions.tolist() == [PROMPT - 1, 3, 4, 5]
    peer.script.delay_seal.set()
    acts = await client.activations(reply.request_id)
    assert acts.positions.tolist() == [PROMPT - 1, ROWS - 1]
    np.testing.assert_array_equal(early[1][[0, 3]], acts[1])


# What is said about it


async def test_the_manifest_says_how_rows_are_encoded(client):
    acts = await read(client, encoding="rp8", dimensions=4, seed=9, reduction="mean")
    found = acts.manifest
    assert (found.encoding, found.dimensions, found.seed, found.reduction) == ("rp8", 4, 9, "mean")
    assert (found.axis, found.projected_onto) == ("", ())
    document = json.loads(found.to_json())
    assert document["mode"] == "rp8"
    assert document["compression"] == {"rp_k": 4, "seed": 9, "quant_bits": 8, "reduction": "mean"}
    assert document["sequences"]["0"]["layers"]["1"]["shape"] == [2, 4]
    assert residuum.Manifest.from_json(found.to_json()) == found
    assert repr(acts).endswith("2 layers × 2 positions × 4, mean of each phase, rp8)")


async def test_info_lists_the_servers_encodings(client):
    info = await client.info()
    assert {"raw", "rp8", "project"} <= set(info.encodings)
    assert info.default_encoding == "raw"
    assert info.reductions == ("none", "last", "mean", "max", "sum")


async def test_saving_keeps_encoded_rows(client, tmp_path):
    acts = await read(client, encoding="full8")
    acts.to_safetensors(tmp_path / "x.safetensors")
    again = residuum.Activations.from_safetensors(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(again[4], acts[4])
    assert again.encoding == "full8"


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize(
    "use",
    [
        lambda acts: residuum.directions.difference_of_means([acts], [acts]),
        lambda acts: residuum.Directions({4: np.ones(8)}).project(acts),
        lambda acts: residuum.Set.from_activations(acts, layers=[4], positions=[0]),
        lambda acts: LensPlan(acts, None),
    ],
)
async def test_encoded_rows_are_not_taken_for_rows_even_if_they_are_as_wide(client, use, width):
    """The model's rows have 8 elements."""
    vectors = [residuum.Vector.from_array(row) for row in np.eye(8)[:width]]
    for options in ({"encoding": "rp8", "dimensions": width}, {"encoding": "project", "vectors": vectors}):
        acts = await read(client, **options)
        assert acts.width == width
        with pytest.raises(residuum.InvalidRequest, match=rf"\b{options['encoding']}\b"):
            use(acts)


async def test_only_random_projections_have_a_matrix(client):
    acts = await read(client, encoding="full8")
    with pytest.raises(residuum.InvalidRequest, match="'full8', which is not a random projection"):
        acts.projection()


async def test_an_unknown_encoding_is_an_error(make, endpoint, flaky, captured):
    def change(number, messages):
        from residuum.v1 import store_pb2

        first = store_pb2.ReadChunksResponse.FromString(messages[0])
        first.manifest.description.spec.encoding = 99
        yield first.SerializeToString()
        yield from messages[1:]

    flaky.change = change
    with pytest.raises(residuum.ServerFault, match=r"unknown encoding 99.*newer version"):
        await make(endpoint, store=flaky.endpoint, timeout=10).activations(captured)


@pytest.mark.parametrize("call", ["activations", "follow"])
async def test_an_encoding_with_a_wrong_size_is_an_error(make, endpoint, flaky, call):
    from residuum.v1 import store_pb2
    from residuum.wire.rows.frames import checksum

    with residuum.Client(endpoint) as plain:
        reply = plain.generate("a bb ccc", max_tokens=4, capture=capturing(encoding="topk8", dimensions=2))
        plain.manifest(reply.request_id, wait=True)

    def change(number, messages):
        for data in messages:
            message = store_pb2.ReadChunksResponse.FromString(data)
            if message.HasField("chunk"):
                payload = bytearray(message.chunk.payload)
                payload[8:10] = b"\xff\xff"  # the first row's first index
                message.chunk.payload = bytes(payload)
                message.chunk.crc32c = checksum(message.chunk.payload)
            yield message.SerializeToString()

    flaky.change = change
    with pytest.raises(residuum.ServerFault, match="has the index 65535, but only 8 elements"):
        await getattr(make(endpoint, store=flaky.endpoint, timeout=10), call)(reply.request_id)


def test_missing_rows_are_never_decoded():
    """The memory of missing rows may contain anything; here it contains an invalid index."""
    form = RowFormat(TOPK, 4, tensor_pb2.DATA_TYPE_FLOAT32, dimensions=1)
    encoded = np.zeros((1, 2), form.row_dtype)
    encoded["index"], encoded["x"] = [[[3], [9]]], 2.0
    block = EncodedBlock(np.arange(2), encoded, np.array([[True, False]]), form)
    np.testing.assert_array_equal(block.layer(0), [[0, 0, 0, 2], [np.nan] * 4])
    np.testing.assert_array_equal(block.values[0], block.stack([0])[0])


# What is asked for


def test_encodings_are_sent_as_the_contract_says():
    spec = capturing(encoding="rp8", dimensions=np.int64(64), seed=3, reduction="max").to_proto()
    assert spec.encoding == capture_pb2.ENCODING_RP8
    assert (spec.encoding_options.dimensions, spec.encoding_options.seed) == (64, 3)
    assert spec.reduction == capture_pb2.REDUCTION_MAX
    assert capturing(encoding="full8", axis="dimension").to_proto().encoding_options.axis == BY_DIMENSION
    assert list(capturing(encoding="project", vectors=iter([JOY])).to_proto().encoding_options.vectors) == [JOY.digest]
    plain = capturing().to_proto()
    assert (plain.encoding, plain.reduction, plain.HasField("encoding_options")) == (0, 0, False)
    assert (
        capturing(dimensions=64).to_proto().encoding_options.dimensions == 64
    )  # the server checks it against its default encoding


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoding": "zip"}, "'zip' is unknown; choose among raw, fp32, fp16"),
        ({"reduction": "median"}, "'median' is unknown; choose among none, last, mean, max, sum"),
        ({"encoding": "full8", "axis": "column"}, "choose among row, dimension"),
        ({"encoding": "raw", "dimensions": 4}, 'dimensions= needs encoding="rp8" or encoding="rp"'),
        ({"encoding": "topk", "seed": 4}, 'seed= needs encoding="rp8"'),
        ({"encoding": "rp8", "axis": "row"}, 'axis= needs encoding="full8"'),
        ({"encoding": "raw", "vectors": [JOY]}, 'vectors= needs encoding="project"'),
        ({"vectors": [JOY]}, 'vectors= needs encoding="project"'),
        ({"encoding": "project"}, "takes 1 to 256 vectors="),
        ({"encoding": "project", "vectors": [JOY, JOY]}, "each vector once"),
        ({"encoding": "rp8", "dimensions": 0}, "at least 1, not 0"),
        ({"encoding": "rp8", "seed": -1}, "from 0 to"),
        ({"encoding": "rp8", "seed": 1 << 64}, "from 0 to"),
    ],
)
def test_invalid_encodings_are_refused(fields, message):
    with pytest.raises(residuum.InvalidRequest, match=message):
        capturing(**fields)


@pytest.mark.parametrize(
    "fields", [{"vectors": [np.ones(8)]}, {"encoding": "rp8", "dimensions": 2.5}, {"encoding": "rp8", "seed": "1"}]
)
def test_encodings_of_the_wrong_type_are_refused(fields):
    with pytest.raises(TypeError):
        capturing(**fields)


async def test_options_that_depend_on_the_model_are_left_to_the_server(client):
    with pytest.raises(residuum.InvalidRequest, match="rp8 takes 1 to 8 dimensions, not 9"):
        await client.generate("a", capture=capturing(encoding="rp8", dimensions=9))


def test_the_command_line_selects_encodings(cli, peer, tmp_path):
    arguments = ["generate", "a bb ccc", "--max-tokens", 4, "--capture", "1", "--id", "small"]
    assert cli(*arguments, "--encoding", "rp8", "--dimensions", 4, "--encoding-seed", 5, "--reduction", "mean")[0] == 0
    sent = peer.requests[-1].spec.capture
    assert (sent.encoding, sent.reduction) == (capture_pb2.ENCODING_RP8, capture_pb2.REDUCTION_MEAN)
    assert (sent.encoding_options.dimensions, sent.encoding_options.seed) == (4, 5)
    code, out, _ = cli("pull", "small", "--out", tmp_path / "small.safetensors", "--json")
    assert code == 0
    assert json.loads(out)["shape"] == [1, 2, 4]

    np.save(tmp_path / "joy.npy", JOY.values)
    assert cli("generate", "a", "--capture", "1", "--onto", tmp_path / "joy.npy")[0] == 0
    assert list(peer.requests[-1].spec.capture.encoding_options.vectors) == [JOY.digest]
    assert cli("generate", "a", "--capture", "1", "--encoding", "full8", "--axis", "dimension")[0] == 0


def test_command_line_errors_about_encodings_name_flags(cli):
    code, _, err = cli("generate", "a", "--capture", "1", "--encoding", "raw", "--dimensions", 4)
    assert code == 1
    assert "--dimensions needs --encoding" in err
    with pytest.raises(SystemExit):
        cli("generate", "a", "--encoding", "rp8")
    with pytest.raises(SystemExit):
        cli("generate", "a", "--capture", "1", "--encoding", "zip")


def test_rows_stay_encoded_in_memory(endpoint):
    with residuum.Client(endpoint) as client:
        reply = client.generate("a bb ccc", max_tokens=4, capture=capturing(encoding="rp8", dimensions=4))
        acts = client.activations(reply.request_id)
    (block,) = acts.blocks().values()
    assert isinstance(block, EncodedBlock)
    assert acts.nbytes == len(LAYERS) * ROWS * (8 + 4)
    with pytest.raises(ValueError, match="read-only"):
        acts.encoded(1)["q"][0] = 1


# Features of sparse autoencoders

SAE = residuum.SAE(
    np.random.default_rng(4).standard_normal((50, HIDDEN)), np.ones((50, HIDDEN)), activation="jumprelu", threshold=0.5
)


async def test_features_are_those_of_the_rows(client, peer):
    acts = await read(client, sae=SAE, dimensions=9)
    assert (acts.encoding, acts.width) == ("sae", 50)
    for layer in LAYERS:
        exact = SAE.encode(truth(layer))
        kept = acts.encoded(layer)
        np.testing.assert_allclose(kept["value"], -np.sort(-exact, axis=1)[:, :9], rtol=1e-5, atol=1e-5)
        dense = acts[layer]
        assert dense.shape == (ROWS, 50)
        at = np.where(kept["feature"] < 50, kept["feature"], 0).astype(int)
        expected = np.where(kept["feature"] < 50, np.take_along_axis(dense, at, axis=1), 0)
        np.testing.assert_array_equal(kept["value"], expected)
        for number in (0, 7, 49):
            np.testing.assert_array_equal(acts.feature(layer, number), dense[:, number])
    assert (acts.manifest.sae, acts.manifest.features) == (SAE.digest.hex(), ())
    document = acts.manifest.to_dict()
    assert (document["mode"], document["compression"]) == ("sae", {"features": 9})
    assert document["sequences"]["0"]["layers"]["1"]["shape"] == [ROWS, 50]
    with pytest.raises(residuum.InvalidRequest, match="The feature 50 does not exist"):
        acts.feature(1, 50)
    with pytest.raises(residuum.InvalidRequest, match="not as 'sae'"):
        (await read(client)).feature(1, 0)


async def test_chosen_features_keep_all_their_values(client):
    acts = await read(client, sae=SAE, features=[31, 4])
    exact = SAE.encode(truth(4))
    assert (acts.encoded(4)["feature"] == [31, 4]).all()
    np.testing.assert_allclose(acts.encoded(4)["value"], exact[:, [31, 4]], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(acts.feature(4, 31), acts.encoded(4)["value"][:, 0])
    with pytest.raises(residuum.InvalidRequest, match=r"not captured\. .* has only: 31, 4\."):
        acts.feature(4, 5)


async def test_an_encoder_is_sent_once_and_again_if_the_server_lacks_it(client, peer):
    result = await client.put_sae(SAE)
    assert (result.sent, result.digest, result.free_bytes) == (True, SAE.digest.hex(), 1 << 20)
    assert not (await client.put_sae(SAE)).sent
    calls = peer.calls.count("PutSAE")
    assert calls == 3, "one asks, one sends; then one asks"
    await read(client, sae=SAE)
    assert peer.calls.count("PutSAE") == calls
    peer.script.drop_vectors = True
    await read(client, sae=SAE)
    assert peer.calls.count("PutSAE") == calls + 2
    registration = await client.register(capture=capturing(sae=SAE))
    peer.script.drop_vectors = True
    reply = await client.generate("a bb ccc", registration=registration, max_tokens=4)
    assert (await client.activations(reply))[1].shape == (ROWS, 50)
    peer.saes.clear()
    with pytest.raises(residuum.MissingSAE) as caught:
        await client.generate("a", registration=(await client.register(capture=capturing(sae=SAE))).request_id)
    assert caught.value.digest == SAE.digest.hex()


async def test_an_encoder_of_another_width_is_refused(client):
    wide = residuum.SAE(np.ones((3, HIDDEN + 1)), np.ones((3, HIDDEN + 1)))
    with pytest.raises(residuum.BadSAE, match=f"rows of {HIDDEN + 1} elements"):
        await client.put_sae(wide)
    with pytest.raises(TypeError, match=r"must be a residuum\.SAE"):
        await client.put_sae("sae")
