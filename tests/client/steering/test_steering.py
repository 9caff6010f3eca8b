"""Steering: sent with a request, changed while it runs, and read from the manifest."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import threading
import uuid

import numpy as np
import pytest

import residuum
from residuum.directions.values import Origin
from residuum.protocol.requests import plan_generation, plan_spec, plan_steering
from residuum.rpc.channels import open_channel
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2, inference_pb2_grpc, selection_pb2, steering_pb2, tensor_pb2
from tests.client.support.peer import HIDDEN


def vector(seed=0):
    return residuum.Vector.from_array(np.random.default_rng(seed).normal(size=HIDDEN))


JOY, WOE = vector(1), vector(2)
ZERO = residuum.Vector.from_array(np.zeros(HIDDEN))
TINY, HUGE = (residuum.Vector.from_array(np.full(HIDDEN, size)) for size in (1e-32, 1e30))


# -------------------------------------------------------------------------------------------------------------- values


def test_replace_steering_is_sent_as_the_contract_says():
    message = residuum.Replace(JOY, layers=[3, 1], value=-2.5, positions="prompt", keep_norm=True).to_proto()
    assert (message.replace.digest, message.replace.value) == (JOY.digest, -2.5)
    assert list(message.layers.list.layers) == [1, 3]
    assert message.keep_norm
    assert not message.layer_digests
    assert len(message.positions.phases) == 1


def test_a_row_can_be_set_to_any_vector():
    for vector in (JOY, ZERO, TINY):
        message = residuum.Set(vector, layer=3, positions=[4]).to_proto()
        assert (message.WhichOneof("operation"), message.set.digest) == ("set", vector.digest)
        assert [(item.first, item.last) for item in message.positions.ranges] == [(4, 4)]


async def captured(client, **options):
    reply = await client.generate("a bb ccc", max_tokens=1, capture=residuum.Capture(layers=[1, 3], **options))
    return await client.activations(reply)


async def test_captured_rows_can_be_set(client, peer):
    acts = await captured(client, sites=["resid_post", "resid_pre"])
    one, two = residuum.Set.from_activations(acts, positions=[0, 2], at=[5, 1])
    assert [list(item.vector) for item in (one, two)] == [[1, 3], [1, 3]]
    for operation, source, target in ((one, 0, 5), (two, 2, 1)):
        np.testing.assert_array_equal(operation.vector[3].values, acts[3][source])
        assert operation.positions == residuum.Positions.of([target])
    before = residuum.Set.from_activations(acts.select(site="resid_pre"), layers=[3])
    assert [list(item.vector) for item in before] == [[2]] * 3, "the stream before layer 3 is that after layer 2"
    await client.generate("d", max_tokens=1, steer=before)
    assert [item.set.digest for item in peer.requests[-1].spec.steering.operations] == [b""] * 3
    assert [list(item.layer_digests) for item in peer.requests[-1].spec.steering.operations] == [
        [item.vector[2].digest] for item in before
    ]


@pytest.mark.parametrize(
    ("captures", "arguments", "told"),
    [
        ({"encoding": "rp", "dimensions": 4}, {}, "encoding rp keeps 4 other numbers"),
        ({}, {"positions": [3]}, "no row of layer 1 at position 3"),
        ({}, {"layers": [2]}, "no row of layer 2 at position 0"),
        ({}, {"positions": [0, 1], "at": [2]}, "there are 2 positions, and at= has 1"),
    ],
)
async def test_rows_that_cannot_be_set_are_named(client, captures, arguments, told):
    acts = await captured(client, **captures)
    with pytest.raises(residuum.InvalidRequest, match=told):
        residuum.Set.from_activations(acts, **arguments)


MAKE = {
    "add": lambda vectors, **where: residuum.Add(vectors, scale=0.5, **where),
    "ablate": lambda vectors, **where: residuum.Ablate(vectors, scale=0.5, **where),
    "cap": lambda vectors, **where: residuum.Cap(vectors, max=0.5, **where),
    "replace": lambda vectors, **where: residuum.Replace(vectors, value=0.5, **where),
    "set": residuum.Set,
    "multiply": residuum.Multiply,
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_vector_for_each_layer_is_sent_as_the_contract_says(kind):
    operation = MAKE[kind]({np.int64(9): WOE, 2: JOY})
    message = operation.to_proto()
    assert message.WhichOneof("operation") == kind
    assert list(message.layers.list.layers) == [2, 9]
    assert list(message.layer_digests) == [JOY.digest, WOE.digest]
    assert not getattr(message, kind).digest
    assert not message.keep_norm
    assert operation.vectors == (JOY, WOE)
    assert MAKE[kind](JOY, layer=1).vectors == (JOY,)


@pytest.mark.parametrize("kind", MAKE)
def test_the_site_is_sent_unless_it_is_the_default(kind):
    for site in ("resid_post", None):
        assert MAKE[kind](JOY, layer=1, site=site) == MAKE[kind](JOY, layer=1)
        assert not MAKE[kind](JOY, layer=1, site=site).to_proto().site
    operation = MAKE[kind](JOY, layer=1, site="z")
    assert operation.to_proto().site == capture_pb2.SITE_Z
    assert operation != MAKE[kind](JOY, layer=1)
    with pytest.raises(residuum.UnknownSite, match="'zz' is not a site"):
        MAKE[kind](JOY, layer=1, site="zz")


def test_directions_apply_at_the_site_where_they_move_the_stream():
    def site_and_layers(made, site=None):
        operation = residuum.Add(residuum.Directions({2: JOY}, origin=Origin(site=made)), site=site)
        return operation.site, list(operation.vector)

    assert site_and_layers("resid_post") == ("resid_post", [2])
    assert site_and_layers("resid_pre") == ("resid_post", [1])
    assert site_and_layers("attn_out") == ("resid_post", [2])
    assert site_and_layers("attn_out", "attn_out") == ("attn_out", [2])
    assert site_and_layers("resid_pre", "mlp_out") == ("mlp_out", [2]), "only the stream is that after the layer before"
    for own in ("z", "mlp_act"):
        assert site_and_layers(own) == (own, [2])
        neurons = residuum.Directions({2: JOY}, origin=Origin(site=own))
        for (operation,) in (neurons.add(2.0), neurons.ablate(), neurons.cap(max=1.0), neurons.replace(1.0)):
            assert operation.site == own
    for other in ("q", "attn_in"):
        with pytest.raises(residuum.UnknownSite, match=f"Directions of {other} cannot be applied"):
            site_and_layers(other)


async def test_rows_are_set_at_the_site_where_they_were_captured(client):
    acts = await captured(client, sites=["attn_out", "resid_post"])
    assert {item.site for item in residuum.Set.from_activations(acts.select(site="attn_out"))} == {"attn_out"}
    assert {item.site for item in residuum.Set.from_activations(acts.select(site="resid_post"))} == {"resid_post"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"capture": residuum.Capture(labels={"split": "test"})}, "would keep neither labels"),
        ({"capture": residuum.Capture(keep_prompt=True)}, "would keep neither labels"),
        ({"json_schema": {"type": "object"}}, "would ignore some of the sampling parameters"),
        ({"bad_words": ["no"]}, "would ignore some of the sampling parameters"),
        ({"logprobs": 0}, "would ignore some of the sampling parameters"),
    ],
)
async def test_a_server_that_would_ignore_a_part_is_not_asked(client, peer, given, told):
    peer.script.is_old = True
    with pytest.raises(residuum.InvalidRequest, match=f"older than the client, and {told}"):
        await client.generate("a", max_tokens=1, **given)
    if "capture" in given:
        with pytest.raises(residuum.InvalidRequest, match=told):
            await client.register(**given)
    assert not peer.used
    await client.generate("a", max_tokens=1, capture=residuum.Capture(), temperature=0.5, stop=["x"])
    peer.script.is_old = False
    for _ in range(2):
        await client.generate("a", max_tokens=1, **given)
    assert peer.calls.count("GetModelInfo") == 2 + ("capture" in given)


async def test_a_server_without_rules_is_not_asked(client, peer):
    peer.script.has_rules = False
    rule = residuum.Rule(residuum.Probe(JOY, layer=1, name="joy"), above=1)
    with pytest.raises(residuum.InvalidRequest, match="This server has no rules"):
        await client.generate("a", max_tokens=1, rules=[rule])
    assert not peer.used


async def test_a_server_that_would_ignore_the_site_is_not_asked(client, peer):
    operation = residuum.Add(JOY, layer=1, site="mlp_out")
    peer.script.is_old = True
    with pytest.raises(residuum.UnknownSite, match="older than the client, and steers only at resid_post"):
        await client.generate("a", steer=operation)
    with pytest.raises(residuum.UnknownSite, match="older than the client"):
        await client.register(steer=operation)
    await client.generate("a", max_tokens=1, steer=residuum.Add(JOY, layer=1, site="resid_post"))
    assert peer.calls.count("GetModelInfo") == 2
    peer.script.is_old = False
    for _ in range(2):
        await client.generate("a", max_tokens=1, steer=operation)
    assert peer.calls.count("GetModelInfo") == 3, "it is asked once"


def test_the_layers_of_each_site_are_known():
    sites = [capture_pb2.SITE_RESID_POST, capture_pb2.SITE_Q]
    proto = inference_pb2.GetModelInfoResponse(dtype=tensor_pb2.DATA_TYPE_FLOAT32, num_layers=3, sites=sites)
    every = (0, 1, 2)
    assert residuum.ModelInfo.from_proto(proto).site_layers == {"resid_post": every, "q": every}
    proto.site_layers.add(layers=every)
    proto.site_layers.add(layers=[2])
    assert residuum.ModelInfo.from_proto(proto).site_layers == {"resid_post": every, "q": (2,)}


def test_masks_remove_heads_and_neurons():
    sites = [capture_pb2.SITE_RESID_POST, capture_pb2.SITE_Q, capture_pb2.SITE_Z, capture_pb2.SITE_MLP_ACT]
    proto = inference_pb2.GetModelInfoResponse(
        dtype=tensor_pb2.DATA_TYPE_FLOAT32, hidden_size=4, sites=sites, site_widths=[4, 8, 8, 8]
    )
    proto.attention.add(num_heads=4)
    proto.attention.add()  # a layer without attention
    proto.attention.add(num_heads=4)
    assert residuum.ModelInfo.from_proto(proto).steering_sites == (), "an older server"
    proto.steering_sites.extend([sites[0], *sites[2:]])
    info = residuum.ModelInfo.from_proto(proto)
    assert info.steering_sites == ("resid_post", "z", "mlp_act")
    assert info.mask("z", [1, np.int64(3)]).values.tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert info.mask("mlp_act", range(2), factor=2.5).values.tolist() == [2.5, 2.5, 1, 1, 1, 1, 1, 1]
    for site in ("attn_out", "resid_post", "q"):
        with pytest.raises(residuum.UnknownSite, match="for z and mlp_act only"):
            info.mask(site, [0])
    with pytest.raises(residuum.InvalidRequest, match="no head 4: the model has 4, 0 to 3"):
        info.mask("z", [0, 4])
    with pytest.raises(residuum.InvalidRequest, match="no neuron -1: the model has 8"):
        info.mask("mlp_act", [-1])
    with pytest.raises(residuum.InvalidRequest, match="does not say how many heads"):
        dataclasses.replace(info, attention=()).mask("z", [0])


def test_directions_steer_with_a_vector_for_each_layer():
    joy = residuum.Directions({4: JOY, 1: WOE})
    assert residuum.Add(joy, scale=2.0) == residuum.Add({1: WOE, 4: JOY}, scale=2.0) == joy.add(2.0)[0]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: residuum.Replace(JOY, layer=1), TypeError, "value"),
        (lambda: residuum.Replace(JOY, layer=1, value=None), TypeError, "value must be a number"),
        (lambda: residuum.Replace(JOY, layer=1, value=True), TypeError, "value must be a number"),
        (lambda: residuum.Replace(JOY, layer=1, value=np.True_), TypeError, "value must be a number"),
        (lambda: residuum.Replace(JOY, layer=1, value=np.ones(2)), TypeError, "must be one number, not ndarray"),
        (lambda: residuum.Add(JOY, layer=1, scale=10**400), residuum.InvalidRequest, "scale must be a finite float32"),
        (lambda: residuum.Add(JOY, layer=1, keep_norm="no"), TypeError, "keep_norm must be True or False, not 'no'"),
        (lambda: residuum.Add(JOY, layer=1, keep_norm=None), TypeError, "keep_norm must be True or False"),
        (lambda: residuum.Add(JOY, layer=[]), residuum.InvalidRequest, "at least one layer, or use 'all'"),
        (lambda: residuum.Add(JOY, layer=2**40), residuum.UnknownLayer, "Layer 1099511627776 does not exist"),
        (lambda: residuum.Add({2**40: JOY}), residuum.UnknownLayer, "Layer 1099511627776 does not exist"),
        (lambda: residuum.Add({1: np.ones(500)}), TypeError, r"not \{1: ndarray\}"),
        (lambda: residuum.Replace(JOY, layer=1, value=float("nan")), residuum.InvalidRequest, "finite"),
        (lambda: residuum.Replace(JOY, layer=1, value=1e39), residuum.InvalidRequest, "finite"),
        (lambda: residuum.Replace(ZERO, layer=1, value=1.0), residuum.BadVector, "this vector is zero"),
        (lambda: residuum.Replace(TINY, layer=1, value=1.0), residuum.BadVector, "has the norm"),
        (lambda: residuum.Ablate(HUGE, layer=1), residuum.BadVector, "has the norm"),
        (lambda: residuum.Ablate({1: JOY, 5: ZERO}), residuum.BadVector, "the vector of layer 5 is zero"),
        (lambda: residuum.Replace(JOY, value=1.0), residuum.InvalidRequest, "exactly one of layer= and layers="),
        (lambda: residuum.Add({1: JOY}, layer=1), residuum.InvalidRequest, r"leave out layer\(s\)="),
        (lambda: residuum.Add({1: JOY}, layers="all"), residuum.InvalidRequest, r"leave out layer\(s\)="),
        (lambda: residuum.Add({}), residuum.InvalidRequest, "at least one layer"),
        (lambda: residuum.Add({-1: JOY}), residuum.UnknownLayer, "Layer -1 does not exist: layers count from 0"),
        (lambda: residuum.Add({"1": JOY}), TypeError, "layer number: residuum.Vector"),
        (lambda: residuum.Add({True: JOY}), TypeError, "layer number: residuum.Vector"),
        (lambda: residuum.Add({1: [1.0]}), TypeError, "layer number: residuum.Vector"),
        (lambda: residuum.Replace(JOY, 12, 6.0), TypeError, r"Replace\(vector, layer=12, value=4\.0\)"),
    ],
)
def test_invalid_steering_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("steer", "told"),
    [
        (JOY, r"not Vector\(.*\)\. Name the operation and the layer"),
        ({1: JOY}, r"not a dict\. .*Add\(\{layer: vector\}\)"),
        (residuum.Directions({1: JOY}), r"not a Directions\. Name the operation"),
        ([residuum.Directions({1: JOY})], r"not a Directions\. Name the operation"),
        ([[residuum.Add(JOY, layer=1)]], r"a nested list\. Write \[\*joy\.add"),
        ("joy", "not 'joy'"),
        (5, "not 5"),
    ],
)
def test_a_non_operation_is_refused_with_advice(steer, told):
    with pytest.raises(TypeError, match=told):
        plan_spec(None, steer, None, None)


@pytest.mark.parametrize("number", [np.float32(0.5), np.array([0.5]), np.array(0.5)])
def test_a_number_is_kept_as_a_float(number):
    operation = residuum.Replace(JOY, layer=1, value=number)
    assert operation == residuum.Replace(JOY, layer=1, value=0.5)
    assert type(operation.value) is float
    hash(operation)


def test_a_zero_vector_may_be_added_at_a_layer():
    assert residuum.Add({1: ZERO, 2: JOY}).vectors == (ZERO, JOY)


@pytest.mark.parametrize("kind", MAKE)
def test_steering_with_a_vector_for_each_layer_compares_by_value(kind):
    operation = MAKE[kind]({1: JOY, 2: WOE}, keep_norm=True)
    assert pickle.loads(pickle.dumps(operation)) == copy.deepcopy(operation) == operation
    assert len({operation, MAKE[kind]({2: WOE, 1: JOY}, keep_norm=True)}) == 1
    assert operation != MAKE[kind]({1: JOY, 2: WOE})
    assert "{1: Vector(" in repr(operation)


def test_changing_the_callers_arguments_later_has_no_effect():
    given = {1: JOY}
    operation = residuum.Add(given)
    given[2] = WOE
    assert operation.vectors == (JOY,)


def test_vectors_of_steering_are_sent_once_and_in_order():
    plan = plan_spec(None, [residuum.Add({1: WOE, 2: JOY}), residuum.Replace(JOY, layer=1, value=1.0)], None, None)
    assert plan.vectors == (WOE, JOY)


@pytest.mark.parametrize("updatable", [False, True])
def test_updatable_steering_is_sent_as_the_contract_says(updatable):
    plan = plan_spec(None, None, None, None, updatable=updatable)
    assert plan.spec.HasField("steering") == updatable
    assert plan.spec.steering.updatable == updatable
    options = {"capture": None, "steer": None, "request_id": None, "model": None, "sampling": {}}
    assert plan_generation("a", registration=None, updatable=updatable, **options).request.spec == plan.spec
    if updatable:
        with pytest.raises(residuum.InvalidRequest, match="register"):
            plan_generation("a", registration="r", updatable=True, **options)


def test_a_steering_change_is_sent_as_the_contract_says():
    plan = plan_steering("r", residuum.Add({1: WOE, 2: JOY}))
    assert plan.request.request_id == "r"
    assert len(plan.request.steering.operations) == 1
    assert not plan.request.steering.updatable
    assert plan.vectors == (WOE, JOY)
    for nothing in (None, []):
        off = plan_steering("r", nothing)
        assert off.request.HasField("steering")
        assert (len(off.request.steering.operations), off.vectors) == (0, ())
    with pytest.raises(TypeError, match="steer="):
        plan_steering("r", JOY)


# ------------------------------------------------------------------------------------------------- changes of a request


class Held:
    """A request that generates one token, and the rest when the test releases it."""

    def __init__(self, peer, endpoint, **options):
        self.peer = peer
        peer.script.hold = threading.Event()
        self.client = residuum.Client(endpoint)
        self.stream = self.client.stream("a bb", max_tokens=3, **{"updatable": True, **options})
        next(self.stream)

    def let_go(self):
        self.peer.script.hold.set()
        list(self.stream)
        return self.stream.reply

    def close(self):
        self.peer.script.hold.set()
        self.client.close()


@pytest.fixture
def held(peer, endpoint):
    made = Held(peer, endpoint, capture=residuum.Capture(layers=[1]), request_id=f"held-{uuid.uuid4().hex}")
    yield made
    made.close()


async def test_steering_of_a_running_request_is_changed(client, held, peer):
    name = held.stream.request_id
    assert await client.update_steering(held.stream, [residuum.Add({1: JOY, 3: WOE}, scale=2.0)]) == (3,)
    assert await client.update_steering(name, residuum.Replace(JOY, layer=1, value=4.0, keep_norm=True)) == (3,)
    assert await client.update_steering(name, None) == (3,)
    assert peer.vectors_received == 2
    reply = held.let_go()
    manifest = await client.manifest(reply, wait=True)
    assert manifest.steered
    assert manifest.steering == ()
    assert [change.first_positions for change in manifest.steering_changes] == [(3,)] * 3
    (first,), (second,), nothing = (change.steering for change in manifest.steering_changes)
    assert (first.operation, first.scale, first.digests) == ("add", 2.0, (JOY.hexdigest, WOE.hexdigest))
    assert (second.operation, second.value, second.keep_norm) == ("replace", 4.0, True)
    assert nothing == ()
    assert residuum.Manifest.from_json(manifest.to_json()) == manifest


async def test_evicted_vectors_of_a_steering_change_are_sent_again(client, held, peer):
    await client.put_vectors([JOY])
    peer.script.drop_vectors = True
    assert await client.update_steering(held.stream, residuum.Add(JOY, layer=1)) == (3,)
    assert peer.vectors_received == 2
    assert peer.calls[-4:] == ["UpdateSteering", "FindMissingVectors", "PutVectors", "UpdateSteering"]


async def test_vectors_of_a_steering_change_that_stay_missing_are_an_error(client, held, peer):
    missing = Failure(Reason.ERROR_REASON_MISSING_VECTORS, "Send them.", digests="aa,bb")
    peer.script.failures = [None, None, missing, None, missing]
    with pytest.raises(residuum.MissingVectors) as caught:
        await client.update_steering(held.stream, residuum.Add(JOY, layer=1))
    assert caught.value.digests == ("aa", "bb")
    assert not peer.changes


async def test_a_registered_request_can_be_updatable(client, peer, endpoint):
    registration = await client.register(steer=residuum.Add(JOY, layer=1), updatable=True)
    spec = peer.requests[-2].spec if peer.calls[-1] == "PutVectors" else peer.requests[-1].spec
    assert spec.steering.updatable
    held = Held(peer, endpoint, registration=registration, updatable=False)
    assert await client.update_steering(held.stream, None) == (3,)
    held.close()


async def test_all_sequences_have_the_first_position_of_a_change(client, peer, endpoint):
    held = Held(peer, endpoint, n=3)
    for _ in range(2):
        next(held.stream)
    assert await client.update_steering(held.stream, None) == (3, 3, 3)
    held.close()


def test_a_stream_changes_its_own_steering(held, peer):
    assert held.stream.update_steering(residuum.Add(JOY, layer=1)) == (3,)
    assert [len(change.steering.operations) for change in peer.changes[held.stream.request_id]] == [1]


async def test_an_async_stream_changes_its_own_steering(peer, endpoint):
    peer.script.hold = threading.Event()
    async with residuum.AsyncClient(endpoint) as client:
        stream = client.stream("a bb", max_tokens=2, updatable=True)
        with pytest.raises(residuum.ResiduumError, match="Enter it first"):
            await stream.update_steering(None)
        async with stream:
            await stream.__anext__()
            assert await stream.update_steering(residuum.Add(JOY, layer=1)) == (3,)
            assert len(peer.changes[stream.request_id]) == 1
            peer.script.hold.set()
            assert len([delta async for delta in stream]) == 1


def test_a_stream_without_a_client_explains_how_to_change_steering(peer, endpoint):
    request = inference_pb2.GenerateRequest(text="a", spec=inference_pb2.RequestSpec())
    with open_channel(endpoint) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        with residuum.Stream(call, endpoint) as stream, pytest.raises(residuum.ResiduumError, match="client's update"):
            stream.update_steering(None)


FAILURES = {
    Reason.ERROR_REASON_UNKNOWN_REQUEST: residuum.UnknownRequest,
    Reason.ERROR_REASON_NOT_UPDATABLE: residuum.NotUpdatable,
    Reason.ERROR_REASON_LIMIT_REACHED: residuum.LimitReached,
    Reason.ERROR_REASON_INVALID_FIELD: residuum.InvalidRequest,
    Reason.ERROR_REASON_UNKNOWN_LAYER: residuum.UnknownLayer,
    Reason.ERROR_REASON_BAD_VALUES: residuum.BadVector,
    Reason.ERROR_REASON_ENGINE_DEAD: residuum.EngineDead,
}


@pytest.mark.parametrize(("reason", "error"), FAILURES.items())
async def test_a_refused_steering_change_raises_the_exception_of_its_reason(client, peer, reason, error):
    peer.script.failures = [Failure(reason, "No.", request_id="r")]
    with pytest.raises(error, match=r"No\."):
        await client.update_steering("r", None)
    assert peer.calls == ["UpdateSteering"], "no retry, because the change may have taken effect"


async def test_steering_of_a_request_that_is_not_running_cannot_change(client):
    with pytest.raises(residuum.UnknownRequest) as caught:
        await client.update_steering("never-was", None)
    assert caught.value.request_id == "never-was"


async def test_steering_of_a_request_that_is_not_updatable_cannot_change(client, peer, endpoint):
    held = Held(peer, endpoint, updatable=False)
    with pytest.raises(residuum.NotUpdatable) as caught:
        await client.update_steering(held.stream, None)
    assert caught.value.request_id == held.stream.request_id
    held.close()


@pytest.mark.parametrize("method", ["generate", "stream", "register", "update_steering"])
def test_both_clients_have_the_same_steering_parameters(method):
    sync, other = (inspect.signature(getattr(kind, method)) for kind in (residuum.Client, residuum.AsyncClient))
    assert [str(parameter) for parameter in sync.parameters.values()] == [
        str(parameter) for parameter in other.parameters.values()
    ]


# ------------------------------------------------------------------------------------------------------------ manifest


def operation(kind=None, layers=(0,), keep_norm=False, digests=(), **fields):
    message = steering_pb2.SteeringOperation(keep_norm=keep_norm, layer_digests=digests)
    message.layers.list.layers.extend(layers)
    if kind:
        getattr(message, kind).CopyFrom(getattr(steering_pb2, kind.capitalize())(**fields))
    return message


RECORDS = {
    "add": (operation("add", digest=b"\1" * 32, scale=2.0), {"scale": 2.0}),
    "ablate": (operation("ablate", digest=b"\1" * 32), {"scale": 1.0}),
    "ablate nothing": (operation("ablate", digest=b"\1" * 32, scale=0.0), {"scale": 0.0}),
    "cap above": (operation("cap", digest=b"\1" * 32, max=0.0), {"max": 0.0}),
    "cap below": (operation("cap", digest=b"\1" * 32, min=-1.5), {"min": -1.5}),
    "replace": (operation("replace", digest=b"\1" * 32, value=0.0), {"value": 0.0}),
    "set": (operation("set", digest=b"\1" * 32), {}),
    "keep norm": (
        operation("replace", keep_norm=True, digest=b"\1" * 32, value=3.0),
        {"value": 3.0, "keep_norm": True},
    ),
}


@pytest.mark.parametrize(("message", "numbers"), RECORDS.values(), ids=RECORDS)
def test_a_steering_record_has_only_the_fields_of_its_kind(message, numbers):
    record = residuum.SteeringRecord.from_proto(message)
    assert record == residuum.SteeringRecord(
        message.WhichOneof("operation"), (0,), ("01" * 32,), residuum.Positions(), **numbers
    )


def test_a_steering_record_has_a_digest_for_each_layer():
    message = operation("add", (2, 5), digests=(JOY.digest, WOE.digest), scale=1.0)
    record = residuum.SteeringRecord.from_proto(message)
    assert (record.layers, record.digests) == ((2, 5), (JOY.hexdigest, WOE.hexdigest))


def test_a_steering_record_of_a_newer_server_is_readable():
    record = residuum.SteeringRecord.from_proto(operation(None, (3,)))
    assert record == residuum.SteeringRecord("unknown", (3,), (), residuum.Positions())


def manifest(start=(), *changes):
    proto = capture_pb2.CaptureManifest(state=capture_pb2.CAPTURE_STATE_COMPLETE)
    proto.description.steering.operations.extend(start)
    for firsts, operations in changes:
        change = proto.steering_changes.add(first_positions=firsts)
        change.steering.operations.extend(operations)
    return residuum.Manifest.from_proto(proto)


def test_a_manifest_has_its_steering_and_its_changes():
    positions = selection_pb2.PositionSelection(phases=[selection_pb2.PHASE_GENERATED])
    first = operation("add", digest=JOY.digest, scale=1.0)
    first.positions.CopyFrom(positions)
    made = manifest([first], ([5, 7], []), ([9, 9], [operation("ablate", digest=WOE.digest)]))
    assert made.steered
    assert made.steering[0].positions == residuum.Positions.of("generated")
    assert [change.first_positions for change in made.steering_changes] == [(5, 7), (9, 9)]
    assert [len(change.steering) for change in made.steering_changes] == [0, 1]
    assert residuum.Manifest.from_json(made.to_json()) == made


def test_steering_that_began_later_counts_as_steering():
    some = operation("add", digest=JOY.digest, scale=1.0)
    assert not manifest().steered
    assert not manifest((), ([3], [])).steered, "the change removed steering from a request without steering"
    assert manifest((), ([3], [some])).steered
    assert manifest([some]).steered
