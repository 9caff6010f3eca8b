"""Manifests as JSON match the committed schema, have the fields of `vllm_capture`, and lose nothing."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from google.protobuf import json_format

import residuum
from residuum.v1 import capture_pb2, tensor_pb2
from residuum.values.captures.manifest_json import from_document
from tests.client.support.peer import HIDDEN

SCHEMA = json.loads((Path(__file__).parents[3] / "protos/residuum/v1/manifest.schema.json").read_text())


def checked(manifest):
    """Return the manifest's JSON document, after checking it against the schema and reading it back."""
    document = json.loads(json.dumps(manifest.to_dict()))
    jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker()).validate(document)
    assert from_document(document) == manifest.proto
    assert residuum.Manifest.from_json(manifest.to_json()) == manifest
    return document


@pytest.fixture
def client(endpoint):
    with residuum.Client(endpoint) as opened:
        yield opened


def test_the_manifest_schema_is_valid():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_a_manifest_has_the_fields_of_vllm_capture(client):
    reply = client.generate("a bb ccc", max_tokens=4, capture=residuum.Capture(layers=[1, 4]))
    manifest = client.manifest(reply.request_id, wait=True)
    document = checked(manifest)
    assert (document["request_id"], document["tp_rank"], document["tp_world_size"]) == (reply.request_id, 0, 1)
    assert (document["mode"], document["compression"]) == ("raw", {})
    sequence = document["sequences"]["0"]
    assert (sequence["prompt_len"], sequence["total_len"], sequence["finish_reason"]) == (3, 7, "length")
    assert {layer: entry["shape"] for layer, entry in sequence["layers"].items()} == {
        "1": [6, HIDDEN],
        "4": [6, HIDDEN],
    }
    assert np.shape(client.activations(reply)[4]) == tuple(sequence["layers"]["4"]["shape"])
    assert (document["state"], document["num_rows"]) == ("CAPTURE_STATE_COMPLETE", 12)
    assert document["present"][0]["positions"] == [{"first": 0, "last": 5}]


def test_a_manifest_of_sequences_sites_and_steering(client):
    vector = residuum.Vector.from_array(np.arange(HIDDEN))
    reply = client.generate(
        "a bb ccc", max_tokens=4, n=2, steer=[residuum.Cap(vector, layer=2, max=1.0), residuum.Add(vector, layer=3)],
        capture=residuum.Capture(layers=[1], sites="resid_post,resid_pre", positions="generated", before_steering=True),
    )  # fmt: skip
    document = checked(client.manifest(reply.request_id, wait=True))
    assert list(document["sequences"]) == ["0", "1"]
    for sequence in document["sequences"].values():
        assert sequence["layers"] == {
            "1": {"shape": [3, HIDDEN], "sites": {"resid_post": [3, HIDDEN], "resid_pre": [3, HIDDEN]}}
        }
    assert document["description"]["spec"]["before_steering"] is True
    assert len(document["description"]["steering"]["operations"]) == 2


def test_a_manifest_of_an_incomplete_capture_says_what_is_missing(client, peer):
    peer.script.lost_layers = (1,)
    reply = client.generate("a bb ccc", max_tokens=4, capture=residuum.Capture(layers=[1, 4]))
    document = checked(client.manifest(reply.request_id, wait=True))
    assert (document["state"], document["incomplete_reason"]) == (
        "CAPTURE_STATE_INCOMPLETE",
        "INCOMPLETE_REASON_OVERFLOW",
    )
    assert document["missing"][0]["layers"] == [1]
    shapes = [document["sequences"]["0"]["layers"][layer]["shape"] for layer in ("1", "4")]
    assert shapes == [[0, HIDDEN], [6, HIDDEN]]


def test_a_manifest_of_an_open_capture_has_no_length_yet(client, peer):
    peer.script.delay_seal = threading.Event()
    reply = client.generate("a bb ccc", max_tokens=4, capture=residuum.Capture(layers=[1]))
    document = checked(client.manifest(reply.request_id))
    peer.script.delay_seal.set()
    assert document["state"] == "CAPTURE_STATE_OPEN"
    assert document["sequences"]["0"]["prompt_len"] == 3
    assert not {"total_len", "finish_reason"} & document["sequences"]["0"].keys()


def test_a_manifest_of_an_aborted_capture(client, peer):
    peer.script.hold = threading.Event()
    stream = client.stream("a bb ccc", max_tokens=9, capture=residuum.Capture(layers=[1]))
    next(stream)
    client.abort(stream.request_id)
    peer.script.hold.set()
    with pytest.raises(residuum.RequestAborted):
        list(stream)
    document = checked(client.manifest(stream.request_id, wait=True))
    assert document["state"] == "CAPTURE_STATE_ABORTED"


def test_protobuf_json_is_also_read_as_a_manifest(client):
    """Files of an earlier version have this JSON in their metadata."""
    reply = client.generate("a bb", max_tokens=2, capture=residuum.Capture(layers=[1]))
    manifest = client.manifest(reply.request_id, wait=True)
    assert residuum.Manifest.from_json(json_format.MessageToJson(manifest.proto)) == manifest


@pytest.mark.parametrize(
    ("encoding", "options", "compression", "width"),
    [
        ("RAW", {}, {}, 64),
        ("BF16", {}, {}, 64),
        ("FULL8", {}, {"quant_bits": 8, "axis": "row"}, 64),
        ("FULL8", {"axis": 2}, {"quant_bits": 8, "axis": "dimension"}, 64),
        ("RP8", {"dimensions": 16, "seed": 7}, {"rp_k": 16, "seed": 7, "quant_bits": 8}, 16),
        ("RP", {"dimensions": 16, "seed": 1 << 63}, {"rp_k": 16, "seed": 1 << 63}, 16),
        ("TOPK8", {"dimensions": 4}, {"top_k": 4, "quant_bits": 8}, 64),
        ("TOPK", {"dimensions": 4}, {"top_k": 4}, 64),
        ("PROJECT", {"vectors": [bytes(32), bytes(32)]}, {"vectors": 2}, 2),
    ],
)
def test_a_manifest_says_how_rows_are_encoded(encoding, options, compression, width):
    proto = capture_pb2.CaptureManifest(state=capture_pb2.CAPTURE_STATE_COMPLETE)
    what = proto.description
    what.capture_id, what.hidden_size, what.num_layers, what.num_sequences = "c", 64, 4, 1
    what.dtype = tensor_pb2.DATA_TYPE_BFLOAT16
    what.prompt_token_ids.extend([5, 6])
    what.spec.layers.list.layers.append(3)
    what.spec.encoding = capture_pb2.Encoding.Value(f"ENCODING_{encoding}")
    what.spec.encoding_options.CopyFrom(capture_pb2.EncodingOptions(**options))
    proto.sequences.add(generated_token_ids=[7], finish_reason="length")
    proto.present.add(sequence=0, site=capture_pb2.SITE_RESID_POST, layers=[3]).positions.add(first=0, last=1)
    document = checked(residuum.Manifest.from_proto(proto))
    assert (document["mode"], document["compression"]) == (encoding.lower(), compression)
    assert document["sequences"]["0"]["layers"]["3"]["shape"] == [2, width]


@pytest.mark.parametrize(
    "text",
    [
        "hello", "[]", "{}", '{"description": 3}', '{"description": {}, "sequences": 7}',
        '{"description": {}, "sequences": {"0": 7}}', "[" * 100_000,
    ],
    ids=range(7),
)  # fmt: skip
def test_invalid_manifests_are_refused(text):
    with pytest.raises(residuum.InvalidRequest, match="not a manifest"):
        residuum.Manifest.from_json(text)


def test_the_manifest_command(cli, captured):
    code, out, err = cli("manifest", captured)
    assert (code, err) == (0, "")
    assert out.count("\n") > 10
    document = json.loads(out)
    jsonschema.validate(document, SCHEMA)
    assert document["request_id"] == captured
    assert json.loads(cli("manifest", captured, "--json")[1]) == document
    assert cli("manifest", captured, "--json")[1].count("\n") == 1


def test_the_manifest_command_can_wait(cli, endpoint, peer):
    peer.script.delay_seal = threading.Event()
    with residuum.Client(endpoint) as client:
        name = client.generate("a bb", max_tokens=3, capture=residuum.Capture(layers=[0])).request_id
    assert json.loads(cli("manifest", name)[1])["state"] == "CAPTURE_STATE_OPEN"
    assert json.loads(cli("manifest", name, "--wait", "--timeout", "0.2")[1])["state"] == "CAPTURE_STATE_OPEN"
    peer.script.delay_seal.set()
    assert json.loads(cli("manifest", name, "--wait")[1])["state"] == "CAPTURE_STATE_COMPLETE"


def test_the_manifest_command_of_an_unknown_capture_fails(cli):
    code, out, err = cli("manifest", "never-was")
    assert (code, out) == (1, "")
    assert "never-was" in err
