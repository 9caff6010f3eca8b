"""The client writes `vllm_xargs`, and the server reads the same."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from vllm.exceptions import VLLMValidationError

import residuum
from inference_svc.vllm_serve.plugin import _check_untapped
from inference_svc.vllm_serve.requests import xargs
from inference_svc.vllm_serve.requests.xargs import (
    check_argument_names,
    has_residuum_arguments,
    read_residuum_arguments,
    without_residuum_arguments,
)
from residuum.rpc.errors import Failure
from residuum.v1 import capture_pb2, steering_pb2

JOY = residuum.Vector.from_array(np.arange(4, dtype=np.float32))
LOVE = residuum.Vector.from_array(np.ones(4, dtype=np.float32))


def test_the_server_reads_the_arguments_that_the_client_writes():
    capture = residuum.Capture(
        layers=[0, 5], positions="last_prompt", encoding="project", vectors=[JOY, LOVE], overflow="shed"
    )
    gate = residuum.Gate(JOY, 2.5, sharpness=0.1, measure="cosine", below=True)
    steer = [residuum.Add(JOY, layer=1, scale=0.1), residuum.Cap(LOVE, layer=2, max=3.5, keep_norm=True, gate=gate)]
    sent = residuum.vllm_xargs(capture, steer, request_id="mine")
    asked = read_residuum_arguments(json.loads(json.dumps(sent)))
    assert asked.spec.request_id == "mine"
    assert asked.spec.capture == capture.to_proto()
    assert asked.spec.steering.operations[0].add == steering_pb2.Add(digest=JOY.digest, scale=0.1)
    assert asked.spec.steering.operations[1].keep_norm
    assert asked.spec.steering.operations[1].gate == gate.to_proto()
    assert {vector.digest: vector.values for vector in asked.vectors} == {
        vector.digest: vector.values.tobytes() for vector in (JOY, LOVE)
    }


def test_the_client_writes_only_types_that_vllm_accepts():
    """vLLM accepts strings, numbers and lists of these."""
    sent = residuum.vllm_xargs(residuum.Capture(), [residuum.Add(JOY, layer=1)])
    assert isinstance(sent["residuum"], str)
    assert "\n" not in sent["residuum"]
    assert all(isinstance(text, str) for text in sent["residuum_vectors"])
    assert "residuum_vectors" not in residuum.vllm_xargs(residuum.Capture())
    probe = residuum.Probe(JOY.values, layer=1)
    assert len(residuum.vllm_xargs(rules=residuum.Rule(probe, above=1))["residuum_vectors"]) == 1
    assert "residuum_vectors" not in residuum.vllm_xargs(steer=[residuum.Add(JOY, layer=1)], send_vectors=False)


def test_arguments_without_capture_or_steering_are_refused():
    with pytest.raises(residuum.InvalidRequest, match="at least one of capture=, steer=, probes= and rules="):
        residuum.vllm_xargs()
    with pytest.raises(residuum.InvalidRequest, match="is not a valid request ID"):
        residuum.vllm_xargs(residuum.Capture(), request_id="a/b")
    with pytest.raises(TypeError, match="capture="):
        residuum.vllm_xargs("all")


def test_only_the_inference_service_captures_features():
    sae = residuum.SAE(np.ones((8, 4)), np.ones((8, 4)))
    with pytest.raises(residuum.InvalidRequest, match="Capture them with the inference service") as refused:
        residuum.vllm_xargs(residuum.Capture(layers=[1], sae=sae))
    assert refused.value.metadata == {"field": "capture.sae"}
    assert residuum.vllm_xargs(steer=residuum.ClampFeature(sae, feature=3, layer=1, value=0.0))


def test_arguments_written_by_hand_are_read():
    asked = read_residuum_arguments({"residuum": '{"capture": {"layers": {"all": true}, "encoding": "ENCODING_RP8"}}'})
    assert asked.spec.capture.layers.all
    assert asked.spec.capture.encoding == capture_pb2.ENCODING_RP8
    assert read_residuum_arguments({"residuum": {"capture": {"layers": {"all": True}}}}).spec.capture.layers.all
    one = base64.b64encode(np.ones(4, dtype="<f4").tobytes()).decode()
    asked = read_residuum_arguments({"residuum": "{}", "residuum_vectors": one})
    assert [vector.digest for vector in asked.vectors] == [LOVE.digest]


def test_other_arguments_are_kept():
    others = {"session_id": "a", "kv_transfer_params": {"x": 1}}
    assert not has_residuum_arguments(others)
    assert not has_residuum_arguments(None)
    assert without_residuum_arguments(None) is None
    assert (
        without_residuum_arguments({**others, "residuum": "{}", "residuum_vectors": [], "residuum_plan": {}}) == others
    )
    assert without_residuum_arguments({"residuum_plan": {}}) is None
    assert has_residuum_arguments({"residuum_plan": 1}), "it must be removed"
    assert read_residuum_arguments({"residuum_plan": 1}) is None


@pytest.mark.parametrize(
    "value",
    ["", "{", '"x"', "3", "null", '{"nothing": 1}', '{"capture": {"layers": {"all": 1}}}'],
)
@pytest.mark.parametrize("wrap", [str, lambda text: json.loads(text) if text not in {"", "{"} else 3.5])
def test_an_invalid_spec_is_refused(value, wrap):
    with pytest.raises(Failure, match=r"vllm_xargs\.residuum: ") as caught:
        read_residuum_arguments({"residuum": wrap(value)})
    assert caught.value.reason_name == "INVALID_FIELD"
    assert caught.value.metadata["field"] == "vllm_xargs.residuum"


@pytest.mark.parametrize("value", ["[" * 100_000, '{"capture": ' * 100_000, "\ud800", '{"request_id": "\\ud800"}'])
def test_a_hostile_spec_is_refused(value):
    with pytest.raises(Failure):
        read_residuum_arguments({"residuum": value})


@pytest.mark.parametrize("value", ["AAA", "§§§§", [3], {"a": "b"}, 3, [["AAAA"]], "AAAA"])
def test_an_invalid_vector_is_refused(value):
    with pytest.raises(Failure, match="residuum_vectors"):
        read_residuum_arguments({"residuum": "{}", "residuum_vectors": value})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("residum", "residuum"),
        ("Residuum", "residuum"),
        ("resiudum", "residuum"),
        ("residuum_spec", "residuum"),
        ("residuum-vectors", "residuum_vectors"),
        ("residuum_vector", "residuum_vectors"),
        ("residum_vectors", "residuum_vectors"),
    ],
)
def test_misspelt_arguments_are_refused(name, meant):
    with pytest.raises(Failure, match=f"no such argument. Did you mean {meant}\\?") as caught:
        check_argument_names({"session_id": "a", name: "{}"})
    assert caught.value.metadata["field"] == f"vllm_xargs.{name}"
    with pytest.raises(VLLMValidationError, match="Did you mean"):
        _check_untapped({name: "{}"})


def test_arguments_of_other_plugins_are_no_misspelt_ones():
    others = ("residual", "residuals", "vectors", "session_id", "kv_transfer_params", "", "r", "resume")
    for arguments in (None, {}, dict.fromkeys(others, 1), dict.fromkeys(("residuum", "residuum_vectors"), "")):
        check_argument_names(arguments)
    check_argument_names({"residuum_plan": {}})


def test_requests_with_the_same_text_share_no_message():
    arguments = residuum.vllm_xargs(residuum.Capture(layers=[1]))
    first, second = (read_residuum_arguments(arguments).spec for _ in range(2))
    assert first == second
    first.capture.layers.list.layers.append(7)
    assert list(second.capture.layers.list.layers) == [1]
    assert list(read_residuum_arguments(arguments).spec.capture.layers.list.layers) == [1]


def test_a_long_spec_is_read_and_not_kept():
    text = '{"capture": {"layers": {"all": true}}}' + " " * 5000
    before = xargs._kept.cache_info().currsize
    assert read_residuum_arguments({"residuum": text}).spec.capture.layers.all
    assert xargs._kept.cache_info().currsize == before
