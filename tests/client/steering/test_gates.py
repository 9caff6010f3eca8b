"""Gates of steering operations: what is sent, what is refused, and what the manifest says."""

from __future__ import annotations

import numpy as np
import pytest

import residuum
from residuum.directions.values import Origin
from residuum.protocol.requests import plan_spec, plan_steering
from residuum.v1 import inference_pb2, steering_pb2, tensor_pb2
from residuum.values.captures.manifest_records import SteeringRecord
from tests.client.support.peer import HIDDEN

JOY, WOE, REFUSAL = (residuum.Vector.from_array(np.random.default_rng(seed).normal(size=HIDDEN)) for seed in (1, 2, 3))
ZERO = residuum.Vector.from_array(np.zeros(HIDDEN))

MAKE = {
    "add": lambda **where: residuum.Add(JOY, **where),
    "ablate": lambda **where: residuum.Ablate(JOY, **where),
    "cap": lambda **where: residuum.Cap(JOY, max=0.5, **where),
    "replace": lambda **where: residuum.Replace(JOY, value=0.5, **where),
    "set": lambda **where: residuum.Set(JOY, **where),
    "multiply": lambda **where: residuum.Multiply(JOY, **where),
}


@pytest.mark.parametrize("kind", MAKE)
def test_every_operation_takes_a_gate(kind):
    gate = residuum.Gate(REFUSAL, 2.5, bias=-0.5, sharpness=4.0, measure="inner_product", below=True)
    message = MAKE[kind](layer=1, gate=gate).to_proto()
    assert message.WhichOneof("operation") == kind
    assert message.gate == steering_pb2.Gate(
        digest=REFUSAL.digest,
        measure=steering_pb2.GATE_MEASURE_INNER_PRODUCT,
        bias=-0.5,
        threshold=2.5,
        sharpness=4.0,
        below=True,
    )
    assert not MAKE[kind](layer=1).to_proto().HasField("gate")


def test_a_gate_opens_at_once_where_the_projection_is_positive_unless_it_says_otherwise():
    message = residuum.Gate(REFUSAL).to_proto()
    assert (message.threshold, message.bias, message.below) == (0.0, 0.0, False)
    assert message.measure == steering_pb2.GATE_MEASURE_PROJECTION
    assert not message.HasField("sharpness")


def test_the_vector_of_a_gate_is_sent_with_the_others():
    gated = [residuum.Add(JOY, layer=1, gate=residuum.Gate(REFUSAL)), residuum.Add(REFUSAL, layer=2)]
    assert plan_spec(None, gated, None, None).vectors == (JOY, REFUSAL)
    assert plan_steering("r", gated).vectors == (JOY, REFUSAL)


def test_a_gate_may_have_a_vector_for_each_layer():
    gate = residuum.Gate({np.int64(9): WOE, 2: REFUSAL})
    for operation in (residuum.Add(JOY, layers=[9, 2], gate=gate), residuum.Add({2: JOY, 9: WOE}, gate=gate)):
        message = operation.to_proto()
        assert list(message.layers.list.layers) == [2, 9]
        assert list(message.gate.layer_digests) == [REFUSAL.digest, WOE.digest]
        assert not message.gate.digest
        assert hash(operation)
    for layers in ("all", [2], [2, 9, 10], range(2, 10)):
        with pytest.raises(residuum.InvalidRequest, match=r"the gate has vectors for the layers \[2, 9\]"):
            residuum.Add(JOY, layers=layers, gate=gate)


def test_directions_are_a_gate_at_the_layers_where_the_operation_applies():
    def layers(made, site=None):
        gate = residuum.Gate(residuum.Directions({2: REFUSAL}, origin=Origin(site=made)))
        operation = residuum.Add(residuum.Directions({2: JOY}, origin=Origin(site=made)), site=site, gate=gate)
        assert operation.gate.vectors == (REFUSAL,)
        return list(operation.gate.vector)

    assert layers("resid_post") == [2]
    assert layers("resid_pre") == [1]
    assert layers("resid_pre", "mlp_out") == [2]
    assert layers("z") == [2]


def test_directions_are_no_gate_for_rows_of_another_kind():
    def made(site):
        return residuum.Directions({2: REFUSAL}, origin=Origin(site=site))

    for own, site in (("z", "resid_post"), ("z", "mlp_act"), ("resid_post", "z"), ("mlp_act", "mlp_out")):
        with pytest.raises(residuum.InvalidRequest, match=f"for the site {own}. Rows of {site}.*the same site"):
            residuum.Add(JOY, layer=2, site=site, gate=residuum.Gate(made(own)))
    for own, site in (("z", "z"), ("resid_post", "mlp_out"), ("attn_out", "resid_post"), ("mlp_act", "mlp_act")):
        assert residuum.Add(JOY, layer=2, site=site, gate=residuum.Gate(made(own))).gate.vectors == (REFUSAL,)
    with pytest.raises(residuum.InvalidRequest, match="for the site z"):
        residuum.Add(made("resid_post"), gate=residuum.Gate(made("z")))
    assert residuum.Add(made("z"), gate=residuum.Gate(made("z"))).site == "z"
    assert residuum.Add(JOY, layer=2, gate=residuum.Gate(dict(made("z")))).gate.vectors == (REFUSAL,)


BAD = {
    "vector": (lambda: residuum.Gate([1.0, 2.0]), TypeError, "create one with Vector.from_array"),
    "zero": (lambda: residuum.Gate(ZERO), residuum.BadVector, "its vector is zero"),
    "threshold": (lambda: residuum.Gate(JOY, np.nan), residuum.InvalidRequest, "threshold must be a finite float32"),
    "bias": (lambda: residuum.Gate(JOY, bias=1e39), residuum.InvalidRequest, "bias must be a finite float32"),
    "text": (lambda: residuum.Gate(JOY, "high"), TypeError, "threshold must be a number"),
    "blunt": (lambda: residuum.Gate(JOY, sharpness=0), residuum.InvalidRequest, "sharpness must be above 0"),
    "backwards": (lambda: residuum.Gate(JOY, sharpness=-1), residuum.InvalidRequest, "below=True opens it below"),
    "endless": (lambda: residuum.Gate(JOY, sharpness=np.inf), residuum.InvalidRequest, "finite float32"),
    "measure": (lambda: residuum.Gate(JOY, measure="angle"), residuum.InvalidRequest, "'projection', 'inner_product'"),
    "below": (lambda: residuum.Gate(JOY, below=1), TypeError, "below must be True or False"),
    "closed": (lambda: residuum.Gate(JOY, 1.0, measure="cosine"), residuum.InvalidRequest, "never opens"),
    "closed below": (
        lambda: residuum.Gate(JOY, -0.5, bias=0.5, measure="cosine", below=True),
        residuum.InvalidRequest,
        "never opens",
    ),
    "no gate": (lambda: residuum.Add(JOY, layer=1, gate=JOY), TypeError, "gate must be a residuum.Gate"),
}


@pytest.mark.parametrize(("make", "error", "told"), BAD.values(), ids=BAD)
def test_a_bad_gate_is_refused_at_once(make, error, told):
    with pytest.raises(error, match=told):
        make()


@pytest.mark.parametrize(
    "fields", [{"threshold": 1.0, "sharpness": 2.0}, {"threshold": 1.5, "bias": 1.0}, {"threshold": -2.0}]
)
def test_a_gate_that_a_cosine_can_open_is_accepted(fields):
    assert residuum.Gate(JOY, measure="cosine", **fields).measure == "cosine"


def test_the_record_of_an_operation_has_its_gate():
    gate = residuum.Gate({2: REFUSAL, 9: WOE}, 0.25, sharpness=4.0, measure="cosine", below=True)
    record = SteeringRecord.from_proto(residuum.Add(JOY, layers=[2, 9], gate=gate).to_proto())
    assert record.gate == residuum.GateRecord(
        (REFUSAL.hexdigest, WOE.hexdigest), 0.25, 0.0, 4.0, measure="cosine", below=True
    )
    plain = SteeringRecord.from_proto(residuum.Add(JOY, layer=2, gate=residuum.Gate(REFUSAL)).to_proto())
    assert plain.gate == residuum.GateRecord((REFUSAL.hexdigest,), 0.0)
    later = residuum.Add(JOY, layer=2, gate=residuum.Gate(REFUSAL)).to_proto()
    later.gate.measure = 77
    assert SteeringRecord.from_proto(later).gate.measure == "unknown"
    assert SteeringRecord.from_proto(residuum.Add(JOY, layer=2).to_proto()).gate is None


async def test_a_server_that_would_ignore_the_gate_is_not_asked(client, peer):
    gated = residuum.Add(JOY, layer=1, gate=residuum.Gate(REFUSAL))
    peer.script.is_old = True
    for call in (client.generate("a", steer=gated), client.register(steer=gated)):
        with pytest.raises(residuum.UnknownOperation, match="older than the client, and would ignore the gate"):
            await call
    await client.generate("a", max_tokens=1, steer=residuum.Add(JOY, layer=1))
    assert peer.calls.count("GetModelInfo") == 2
    assert peer.calls.count("Generate") == 1
    peer.script.is_old = False
    for _ in range(2):
        await client.generate("a", max_tokens=1, steer=gated)
    assert peer.calls.count("GetModelInfo") == 3, "it is asked once"
    assert peer.requests[-1].spec.steering.operations[0].gate.digest == REFUSAL.digest


def test_a_server_says_what_its_gates_measure():
    proto = inference_pb2.GetModelInfoResponse(dtype=tensor_pb2.DATA_TYPE_FLOAT32)
    assert residuum.ModelInfo.from_proto(proto).gate_measures == (), "an older server"
    proto.gate_measures.extend([steering_pb2.GATE_MEASURE_PROJECTION, 77, steering_pb2.GATE_MEASURE_COSINE])
    assert residuum.ModelInfo.from_proto(proto).gate_measures == ("projection", "cosine")
