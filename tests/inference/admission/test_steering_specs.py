"""Steering from message to plan: Replace, one vector per layer, and which changes are allowed later."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from inference_svc.admission.steering import (
    check_demand,
    demand_of_steering,
    digests_of,
    directions_of,
    resolve_steering,
    uses_of,
)
from inference_svc.requests.plans import make_operations, make_plan
from inference_svc.requests.registry import Running
from inference_svc.taps.plan import Gate, Kind, Measure, Operation, RequestPlan
from inference_svc.taps.steps.demand import MAX_ENTRIES, Demand
from residuum.rpc.errors import Failure
from residuum.v1 import capture_pb2, inference_pb2, selection_pb2, steering_pb2
from tests.inference.spec_support import resolve_spec
from tests.inference.taps_support import GENERATED, select

FACTS = SimpleNamespace(
    name="tiny",
    num_layers=4,
    max_model_len=32,
    sites=(capture_pb2.SITE_RESID_POST,),
    steering_sites=(capture_pb2.SITE_RESID_POST, capture_pb2.SITE_Z),
    layers_at=lambda site: range(4),
)
A, B, C = (name * 32 for name in (b"a", b"b", b"c"))
ALL = selection_pb2.LayerSelection(all=True)
PROJECTION, COSINE = steering_pb2.GATE_MEASURE_PROJECTION, steering_pb2.GATE_MEASURE_COSINE


def layer_list(*layers):
    return selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=layers))


def operation(kind="add", digest=A, layers=ALL, layer_digests=(), positions=None, keep_norm=False, **fields):
    what = getattr(steering_pb2, kind.capitalize())(digest=digest, **fields)
    return steering_pb2.SteeringOperation(
        layers=layers, positions=positions, keep_norm=keep_norm, layer_digests=layer_digests, **{kind: what}
    )


def by_layer(kind="add", digests=(A, B), layers=None, **fields):
    layers = layer_list(*range(len(digests))) if layers is None else layers
    return operation(kind, b"", layers, digests, **fields)


def steering(*operations, updatable=False):
    return steering_pb2.SteeringSpec(operations=operations, updatable=updatable)


def gated(layers=ALL, digest=C, made=None, **fields):
    what = made or operation(layers=layers)
    what.gate.CopyFrom(steering_pb2.Gate(digest=digest, **fields))
    return what


def spec(*operations, updatable=False, capture=None):
    return inference_pb2.RequestSpec(steering=steering(*operations, updatable=updatable), capture=capture)


BAD = {
    "value": (operation("replace", value=math.nan), "replace.value"),
    "infinite value": (operation("replace", value=-math.inf), "replace.value"),
    "replace digest": (operation("replace", b"x", value=1.0), "replace.digest"),
    "no digest": (operation(digest=b""), "add.digest"),
    "long digest": (by_layer(digests=(A, B + b"!")), "layer_digests"),
    "empty digest": (by_layer(digests=(A, b"")), "layer_digests"),
    "too few": (by_layer(layers=layer_list(0, 1, 2)), "layer_digests"),
    "too many": (by_layer(layers=layer_list(0)), "layer_digests"),
    "all layers": (by_layer(digests=(A, A, B, B), layers=ALL), "layer_digests"),
    "both": (operation("ablate", A, layer_list(0, 1), (A, B)), "layer_digests"),
    "descending": (by_layer(layers=layer_list(1, 0)), "layers"),
    "gate without a vector": (gated(digest=b""), "gate.digest"),
    "gate with a long digest": (gated(digest=A + b"!"), "gate.digest"),
    "gate with two ways to name vectors": (gated(layer_list(0), layer_digests=[A]), "gate.layer_digests"),
    "gate with too few vectors": (gated(layer_list(0, 1), b"", layer_digests=[A]), "gate.layer_digests"),
    "gate with vectors for all layers": (gated(ALL, b"", layer_digests=[A, A, A, A]), "gate.layer_digests"),
    "gate with a wrong digest": (
        gated(layer_list(0, 1), b"", layer_digests=[A, b"x"]),
        "gate.layer_digests",
    ),
    "gate that measures something else": (gated(measure=77), "gate.measure"),
    "gate without a threshold": (gated(threshold=math.nan), "gate.threshold"),
    "gate with an infinite threshold": (gated(threshold=-math.inf), "gate.threshold"),
    "gate with an infinite bias": (gated(bias=math.inf), "gate.bias"),
    "gate beyond float32": (gated(threshold=3e38, bias=-3e38), "gate.threshold"),
    "gate of no sharpness": (gated(sharpness=0.0), "gate.sharpness"),
    "gate of negative sharpness": (gated(sharpness=-1.0), "gate.sharpness"),
    "gate of infinite sharpness": (gated(sharpness=math.inf), "gate.sharpness"),
    "gate of a sharpness that is not a number": (gated(sharpness=math.nan), "gate.sharpness"),
    "cosine of 1": (gated(measure=COSINE, threshold=1.0), "gate.threshold"),
    "cosine below -1": (gated(measure=COSINE, threshold=-2.0, bias=-1.0, below=True), "gate.threshold"),
    "cosine that a bias keeps closed": (gated(measure=COSINE, threshold=0.5, bias=-0.5), "gate.threshold"),
}


@pytest.mark.parametrize(("bad", "field"), BAD.values(), ids=BAD)
def test_invalid_steering_is_refused(bad, field):
    for call in (lambda: resolve_spec(spec(operation(), bad), FACTS), lambda: resolve_steering(steering(bad), FACTS)):
        with pytest.raises(Failure) as caught:
            call()
        assert caught.value.reason_name == "INVALID_FIELD"
        assert caught.value.metadata["field"].endswith(f"].{field}")


def test_an_unknown_layer_is_reported_before_wrong_digests():
    with pytest.raises(Failure) as caught:
        resolve_spec(spec(by_layer(layers=layer_list(3, 4))), FACTS)
    assert (caught.value.reason_name, caught.value.metadata["layer"]) == ("UNKNOWN_LAYER", "4")


@pytest.mark.parametrize("kind", ["add", "ablate", "cap", "replace", "set", "multiply"])
def test_every_operation_accepts_a_vector_for_each_layer(kind):
    bounds = {"max": 1.0} if kind == "cap" else {}
    resolved = resolve_spec(spec(by_layer(kind, keep_norm=True, **bounds)), FACTS).steering
    assert digests_of(resolved) == [A, B]
    assert directions_of(resolved) == (set() if kind in ("add", "set", "multiply") else {A, B})
    assert resolved.operations[0].keep_norm


def at(site, **fields):
    made = operation(**fields)
    made.site = site
    return made


def test_the_default_site_is_left_out_so_that_equal_steering_is_equal():
    plain = resolve_steering(steering(operation()), FACTS)
    assert resolve_steering(steering(at(capture_pb2.SITE_RESID_POST)), FACTS) == plain
    assert resolve_steering(steering(at(capture_pb2.SITE_Z)), FACTS).operations[0].site == capture_pb2.SITE_Z


@pytest.mark.parametrize(
    ("site", "advice"),
    [
        (capture_pb2.SITE_RESID_PRE, "Steer SITE_RESID_POST of the layer before"),
        (capture_pb2.SITE_MLP_ACT, "with --capture-sites"),
        (capture_pb2.SITE_Q, "this server steers at: SITE_RESID_POST, SITE_Z. No server"),
        (77, "the site 77 cannot be steered"),
    ],
)
def test_a_site_that_cannot_be_steered_is_refused_by_name(site, advice):
    with pytest.raises(Failure, match=advice) as caught:
        resolve_steering(steering(operation(), at(site)), FACTS)
    assert caught.value.reason_name == "UNKNOWN_SITE"
    assert caught.value.metadata["armed"] == "SITE_RESID_POST,SITE_Z"


def test_operations_at_two_sites_of_a_layer_share_no_entry():
    twice = demand_of_steering(resolve_steering(steering(operation(), operation()), FACTS), None)
    apart = demand_of_steering(resolve_steering(steering(operation(), at(capture_pb2.SITE_Z)), FACTS), None)
    assert (twice.entries, apart.entries) == (2, 2)
    three = steering(operation(), operation(), at(capture_pb2.SITE_Z))
    assert demand_of_steering(resolve_steering(three, FACTS), None).entries == 3


def test_vectors_of_all_layers_and_operations_are_needed_once_and_in_order():
    resolved = resolve_spec(spec(by_layer(digests=(C, A)), operation("replace", B, value=0.0), by_layer()), FACTS)
    assert resolved.shared.digests == [C, A, B]
    assert directions_of(resolved.steering) == {B}


def test_the_vector_of_a_gate_is_needed_as_any_other_and_must_have_a_direction():
    resolved = resolve_spec(spec(gated(), gated(layer_list(0, 1), b"", layer_digests=[B, A])), FACTS)
    assert resolved.shared.digests == [A, C, B]
    assert directions_of(resolved.steering) == {A, B, C}
    facts = SimpleNamespace(width=lambda site: {capture_pb2.SITE_RESID_POST: 8, capture_pb2.SITE_Z: 12}[site])
    inside = gated(made=at(capture_pb2.SITE_Z))
    first, second = "steering.operations[0]", "steering.operations[1]"
    expected = [(A, 8, first), (C, 8, first), (A, 12, second), (C, 12, second)]
    assert uses_of(steering(gated(), inside, gated()), facts) == expected


def test_the_default_measure_of_a_gate_is_filled_in_so_that_equal_steering_is_equal():
    named = resolve_steering(steering(gated(measure=PROJECTION)), FACTS)
    assert named == resolve_steering(steering(gated()), FACTS)
    assert named.operations[0].gate.measure == PROJECTION


@pytest.mark.parametrize(
    "gate",
    [
        {"threshold": 0.99},
        {"threshold": -5.0},
        {"threshold": 1.0, "sharpness": 3.0},
        {"threshold": 1.5, "bias": 1.0},
        {"threshold": -0.99, "below": True},
    ],
)
def test_a_gate_that_a_cosine_can_open_is_accepted(gate):
    assert resolve_steering(steering(gated(measure=COSINE, **gate)), FACTS).operations[0].HasField("gate")


def test_steering_can_be_updatable_without_operations():
    resolved = resolve_spec(spec(updatable=True), FACTS)
    assert resolved.steering == steering(updatable=True)
    assert resolved.shared.digests == []
    assert resolve_spec(spec(), FACTS).steering is None


def test_sequences_of_an_updatable_request_share_no_cache():
    resolved = resolve_spec(spec(operation(), updatable=True), FACTS)
    salts = {resolved.shared.cache_salt(5) for _ in range(10)}
    assert len(salts) == 10
    assert None not in salts


def test_steering_that_differs_in_anything_has_another_cache():
    steered = [
        [operation("replace", value=1.0)],
        [operation("replace", value=2.0)],
        [operation("cap", min=1.0, max=1.0)],
        [operation("replace", value=1.0, keep_norm=True)],
        [by_layer(digests=(A, B, A, B))],
        [by_layer(digests=(B, A, B, A))],
        [operation()],
        [gated()],
        [gated(digest=B)],
        [gated(threshold=1.0)],
        [gated(measure=COSINE)],
        [gated(sharpness=1.0)],
        [gated(below=True)],
    ]
    salts = [resolve_spec(spec(*operations), FACTS).shared.cache_salt(5) for operations in steered]
    assert len(set(salts)) == len(salts)
    assert salts == [resolve_spec(spec(*operations), FACTS).shared.cache_salt(5) for operations in steered]


def test_a_vector_for_each_layer_demands_an_operation_for_each():
    resolved = resolve_spec(spec(by_layer(digests=(A, B, C, A), positions=select(phases=[GENERATED]))), FACTS).steering
    assert demand_of_steering(resolved, None) == Demand(2, 8)
    assert demand_of_steering(resolve_spec(spec(operation()), FACTS).steering, None) == Demand(1, 1)
    assert demand_of_steering(None, None) == Demand(1, 0)


def test_steering_that_takes_more_than_the_tables_hold_is_refused():
    check_demand(Demand(256, MAX_ENTRIES))
    for demand in (Demand(257, 1), Demand(1, MAX_ENTRIES + 1)):
        with pytest.raises(Failure) as caught:
            check_demand(demand)
        assert caught.value.metadata == {"field": "steering.operations"}


# ---------------------------------------------------------------------------------------------------------------- plans


ROWS = {A: 3, B: 1, C: 7}


def made(*operations):
    return make_operations(resolve_steering(steering(*operations), FACTS), ROWS)


def test_replace_is_a_cap_with_equal_bounds():
    (replaced,) = made(operation("replace", B, layer_list(1, 2), value=-2.5, keep_norm=True))
    assert replaced == Operation(Kind.CAP, 1, (1, 2), select(), 1.0, -2.5, -2.5, keep_norm=True)
    (capped,) = made(operation("cap", B, layer_list(1, 2), min=-2.5, max=-2.5))
    assert replaced == replace(capped, keep_norm=True)


def test_replace_without_a_value_sets_zero():
    (operation_,) = made(operation("replace", value=0.0))
    assert (operation_.low, operation_.high) == (0.0, 0.0)


def test_a_vector_for_each_layer_becomes_an_operation_for_each():
    positions = select((-1, None))
    first, *others = made(
        operation(digest=C, scale=1.0),
        by_layer("ablate", (A, B, A), layer_list(0, 2, 3), scale=0.5, positions=positions, keep_norm=True),
        by_layer("add", (B,), layer_list(3), scale=2.0),
    )
    assert first.row == 7
    assert others == [
        Operation(Kind.ABLATE, 3, (0,), positions, 0.5, keep_norm=True),
        Operation(Kind.ABLATE, 1, (2,), positions, 0.5, keep_norm=True),
        Operation(Kind.ABLATE, 3, (3,), positions, 0.5, keep_norm=True),
        Operation(Kind.ADD, 1, (3,), select(), 2.0),
    ]


def test_the_numbers_of_a_gate_reach_the_worker():
    fields = {"threshold": 2.0, "bias": 0.5}
    hard, soft, below, inner = (
        made(gated(layer_list(1), **fields, **more))[0].gate
        for more in ({}, {"sharpness": 4.0}, {"below": True}, {"measure": steering_pb2.GATE_MEASURE_INNER_PRODUCT})
    )
    assert hard == Gate(7, 1.5, math.inf, Measure.PROJECTION)
    assert soft == hard._replace(sharpness=4.0)
    assert below == hard._replace(sharpness=-math.inf)
    assert inner == hard._replace(measure=Measure.INNER_PRODUCT)
    assert made(gated(measure=COSINE, sharpness=4.0, below=True))[0].gate == Gate(7, 0.0, -4.0, Measure.COSINE)


def test_a_gate_with_a_vector_for_each_layer_becomes_an_operation_for_each():
    of_one, of_each = operation(layers=layer_list(0, 2)), by_layer("add", (A, B), layer_list(0, 2))
    gates = {"digest": b"", "layer_digests": [B, C]}
    assert [(item.row, item.layers, item.gate.row) for item in made(gated(made=of_one, **gates))] == [
        (3, (0,), 1),
        (3, (2,), 7),
    ]
    assert [(item.row, item.gate.row) for item in made(gated(made=of_each, **gates))] == [(3, 1), (1, 7)]
    assert [(item.row, item.gate.row) for item in made(gated(made=of_each, digest=C))] == [(3, 7), (1, 7)]
    resolved = resolve_steering(steering(gated(made=of_one, **gates)), FACTS)
    assert demand_of_steering(resolved, None) == Demand(1, 4), "gates take as many entries again"


@pytest.mark.parametrize("updatable", [False, True])
def test_only_steering_that_may_be_changed_has_a_name_in_the_worker(updatable):
    resolved = resolve_spec(spec(operation(), updatable=updatable), FACTS)
    plan = make_plan(Running("r", resolved, was_registered=False), 2, 5, ROWS)
    assert plan.name == ("r#2" if updatable else "")
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(plan.to_extra_args()))
    assert RequestPlan.from_extra_args(carried) == plan


def test_an_updatable_request_without_operations_has_a_plan():
    plan = make_plan(Running("r", resolve_spec(spec(updatable=True), FACTS), was_registered=False), 0, 5, {})
    assert plan == RequestPlan(5, None, (), "r#0")


def test_an_operation_of_steering_survives_the_way_to_the_worker():
    gate = steering_pb2.Gate(digest=B, sharpness=2.0)
    replaced = operation("replace", value=1.5, keep_norm=True, positions=select((1, 3), every=2))
    replaced.gate.CopyFrom(gate)
    (operation_,) = made(replaced)
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(operation_.to_data()))
    assert Operation.from_data(carried) == operation_


# Features of sparse autoencoders


def clamping(**fields):
    feature = {"digest": A, "encoder_digest": B, "bias": 0.5, "threshold": 0.25, "min": 2.0, "max": 2.0, **fields}
    return steering_pb2.SteeringOperation(layers=ALL, clamp_feature=steering_pb2.ClampFeature(**feature))


def test_a_clamped_feature_is_a_gate_for_the_worker():
    spec = resolve_steering(steering(clamping()), FACTS)
    assert digests_of(spec) == [A, B]
    assert directions_of(spec) == set()
    (made,) = make_operations(spec, {A: 3, B: 7})
    assert (made.kind, made.row, made.layers, made.low, made.high) == (Kind.CLAMP, 3, (0, 1, 2, 3), 2.0, 2.0)
    assert made.gate == Gate(7, 0.25, 0.5, Measure.FEATURE)
    assert Operation.from_data(made.to_data()) == made
    assert demand_of_steering(spec, None) == Demand(1, 2)
    for threshold in (0.0, -3.0):  # a ReLU's output is above 0 anyway
        spec = resolve_steering(steering(clamping(threshold=threshold, min=None)), FACTS)
        (made,) = make_operations(spec, {A: 3, B: 7})
        assert (made.gate.threshold, made.low, made.high) == (0.0, -math.inf, 2.0)


def _with(item, **fields):
    changed = steering_pb2.SteeringOperation()
    changed.CopyFrom(item)
    changed.MergeFrom(steering_pb2.SteeringOperation(**fields))
    return changed


@pytest.mark.parametrize(
    ("item", "field", "message"),
    [
        (clamping(digest=b"a"), "clamp_feature.digest", "32 bytes"),
        (clamping(encoder_digest=b""), "clamp_feature.encoder_digest", "32 bytes"),
        (clamping(bias=math.nan), "clamp_feature.bias", "must be finite"),
        (clamping(threshold=math.inf), "clamp_feature.threshold", "must be finite"),
        (clamping(min=None, max=None), "clamp_feature", "Set min, max or both"),
        (clamping(min=3.0), "clamp_feature", r"max \(2.0\) is below min \(3.0\)"),
        (clamping(max=math.nan), "clamp_feature", "must be finite"),
        (_with(clamping(), gate=steering_pb2.Gate(digest=C)), "gate", "takes no gate"),
        (
            _with(clamping(digest=b""), layer_digests=[A, B, C, A]),
            "layer_digests",
            "(one feature for all its layers|listed layers)",
        ),
    ],
)
def test_features_that_cannot_be_clamped_are_refused(item, field, message):
    with pytest.raises(Failure, match=message) as caught:
        resolve_steering(steering(item), FACTS)
    assert caught.value.metadata["field"] == f"steering.operations[0].{field}"
