"""UpdateSteering: its calls of the engine, its records, and every way in which it fails."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest

from inference_svc.engine.streams import Delta
from inference_svc.session import steering_changes
from inference_svc.taps.plan import Kind
from inference_svc.taps.vllm.worker import TappedWorker
from residuum.rpc.errors import Failure, Reason, failure_from_rpc_error
from residuum.v1 import capture_pb2, inference_pb2, rule_pb2, selection_pb2, steering_pb2
from residuum.wire.limits import MAX_STEERING_CHANGES_BYTES
from tests.inference.service_support import (
    ADD_JOY,
    CAPTURE,
    DEADLINE,
    FACTS,
    JOY,
    ask,
    failure_of,
    running_service,
    spec,
    until,
    vector,
)

ABORTED, COMPLETE = capture_pb2.CAPTURE_STATE_ABORTED, capture_pb2.CAPTURE_STATE_COMPLETE
WOE, AWE = vector(4, 3, 2, 1), vector(1, 1, 2, 2)


def layers(*numbers):
    return selection_pb2.LayerSelection(list=selection_pb2.LayerList(layers=numbers))


def add(of=JOY, scale=1.0):
    return steering_pb2.SteeringOperation(layers=layers(0), add=steering_pb2.Add(digest=of.digest, scale=scale))


class Hand:
    """Lets a test generate the tokens of the service's engine one by one."""

    def __init__(self, engine):
        self.engine = engine
        self.queues = {}
        engine.script = self.script

    async def script(self, call):
        queue = self.queues.setdefault(call.engine_id, asyncio.Queue())
        while True:
            delta = await queue.get()
            yield delta
            if delta.finish_reason:
                return

    def token(self, name="r#0", *, last=False):
        """Generate a token. The position from which a change would apply advances."""
        self.queues.setdefault(name, asyncio.Queue()).put_nowait(Delta("x", [1], "stop" if last else None))
        self.engine.positions[name] = None if last else (self.engine.positions.get(name) or 2) + 1


@asynccontextmanager
async def generating(service, request_spec=None, **sampling):
    """A request that has started, and the hand that produces its tokens: (stream, hand)."""
    hand = Hand(service.engine)
    stream = service.stub.Generate(ask(request_spec or spec("r", CAPTURE, updatable=True), **sampling))
    assert (await stream.read()).HasField("started")
    try:
        yield stream, hand
    finally:
        stream.cancel()


async def read_all(stream):
    events = []
    while (event := await stream.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def another_request(service, hand):
    """Start another request and wait for its end. By then, every earlier call has got as far as it can."""
    hand.token("another#0", last=True)
    assert (await service.events(ask(spec("another"))))[-1].HasField("finished")


async def test_a_change_of_steering_reaches_the_engine_and_the_seal(service, store):
    await service.put(JOY, WOE)
    async with generating(service) as (stream, hand):
        hand.token()
        await stream.read()
        assert await service.update("r", add(scale=2.0)) == [3]
        hand.token()
        await stream.read()
        assert await service.update("r", add(WOE), add(JOY, 0.5)) == [4]
        assert await service.update("r") == [4]
        hand.token(last=True)
        await read_all(stream)
    first, second, off = (change["r#0"] for change in service.engine.changes)
    assert [(item.kind, item.scale, item.layers) for item in first] == [(Kind.ADD, 2.0, (0,))]
    assert service.engine.bank[first[0].row] == JOY.values
    assert [service.engine.bank[item.row] for item in second] == [WOE.values, JOY.values]
    assert off == ()
    seal = await store.seal()
    assert seal.outcome == COMPLETE
    assert [list(change.first_positions) for change in seal.steering_changes] == [[3], [4], [4]]
    assert [len(change.steering.operations) for change in seal.steering_changes] == [1, 2, 0]
    assert seal.steering_changes[0].steering.operations[0] == add(scale=2.0)
    assert not service.engine.forgotten, "every sequence was in the workers, so there is nothing to forget"


async def test_replicas_without_the_request_forget_its_changes(service, store):
    """They keep each change, as if the request were still to come."""
    service.engine.facts = dataclasses.replace(FACTS, data_parallel_size=2)
    await service.put(JOY)
    async with generating(service) as (stream, hand):
        hand.token()
        await stream.read()
        assert await service.update("r", add(scale=2.0)) == [3]
        assert not service.engine.forgotten
        hand.token(last=True)
        await read_all(stream)
    assert service.engine.forgotten == [["r#0"]]


async def test_the_recorded_steering_has_every_default_filled_in(service, store):
    await service.put(JOY)
    async with generating(service) as (stream, hand):
        steering = steering_pb2.SteeringSpec(operations=[ADD_JOY], updatable=True)
        request = inference_pb2.UpdateSteeringRequest(request_id="r", steering=steering)
        await service.stub.UpdateSteering(request)
        hand.token(last=True)
        await read_all(stream)
    (change,) = (await store.seal()).steering_changes
    assert list(change.steering.operations[0].layers.list.layers) == [0, 1, 2]
    assert not change.steering.updatable, "ignored fields are not recorded"


async def test_an_updatable_request_has_a_name_in_the_engine_and_a_salt_of_its_own(service):
    async with generating(service, spec("r", updatable=True), num_sequences=3) as (_, hand):
        await service.engine.until(lambda: len(service.engine.calls) == 3)
        calls = service.engine.calls
        assert sorted(call.plan.name for call in calls) == ["r#0", "r#1", "r#2"]
        assert len({call.cache_salt for call in calls}) == 3
    del hand


async def test_a_request_without_a_capture_can_be_changed_as_well(service_without_store):
    service = service_without_store
    await service.put(JOY)
    async with generating(service, spec("r", updatable=True)) as (stream, hand):
        assert await service.update("r", add()) == [0]
        hand.token(last=True)
        assert (await read_all(stream))[-1].HasField("finished")


async def test_a_change_returns_the_position_of_each_sequence(service, store):
    await service.put(JOY)
    async with generating(service, num_sequences=4) as (stream, hand):
        for _ in range(2):
            hand.token("r#1")
        for last in (False, False, True):
            hand.token("r#2", last=last)
        tokens = 0
        while tokens < 5:
            tokens += len((await stream.read()).delta.token_ids)
        await service.engine.until(lambda: service.engine.closed == ["r#2"])
        # r#0 has not reached the engine; r#3 has computed its prompt; r#2 has ended.
        service.engine.positions["r#3"] = 3
        assert await service.update("r", add()) == [0, 4, 6, 3]
        assert set(service.engine.changes[0]) == {"r#0", "r#1", "r#3"}
        for name in ("r#0", "r#1", "r#3"):
            hand.token(name, last=True)
        await read_all(stream)
    (change,) = (await store.seal()).steering_changes
    assert list(change.first_positions) == [0, 4, 6, 3]
    assert service.engine.forgotten == [["r#0", "r#1", "r#2", "r#3"]]


async def test_a_change_after_the_end_in_the_engine_returns_the_number_of_tokens(service, store):
    """Its last tokens are on their way to the service when the workers report its end."""
    async with generating(service) as (stream, hand):
        hand.token()
        await stream.read()
        service.engine.positions["r#0"] = None
        changing = asyncio.create_task(service.update("r"))
        await service.engine.until(lambda: service.engine.changes)
        hand.token()
        hand.token(last=True)
        assert await changing == [6]
        await read_all(stream)
    assert list((await store.seal()).steering_changes[0].first_positions) == [6]


async def test_changes_of_steering_are_sequential(service, store):
    await service.put(JOY)
    async with generating(service) as (stream, hand):
        service.engine.answers.clear()
        calls = [asyncio.create_task(service.update("r", add(scale=scale))) for scale in (1.0, 2.0, 3.0)]
        await service.engine.until(lambda: service.engine.changes)
        await another_request(service, hand)
        assert len(service.engine.changes) == 1
        service.engine.answers.set()
        await asyncio.gather(*calls)
        hand.token(last=True)
        await read_all(stream)
    told = [change["r#0"][0].scale for change in service.engine.changes]
    assert sorted(told) == [1.0, 2.0, 3.0]
    recorded = [change.steering.operations[0].add.scale for change in (await store.seal()).steering_changes]
    assert recorded == told


# ------------------------------------------------------------------------------------------------- what is refused


async def test_steering_of_a_request_that_is_not_generating_cannot_be_changed(service):
    await service.register(spec("waits", updatable=True))
    async with generating(service, spec("over", updatable=True)) as (stream, hand):
        hand.token("over#0", last=True)
        await read_all(stream)
    for name in ("nobody", "waits", "over", ""):
        failure = await failure_of(service.update(name))
        assert (failure.reason_name, failure.metadata) == ("UNKNOWN_REQUEST", {"request_id": name})
        assert failure.code == grpc.StatusCode.NOT_FOUND


async def test_steering_of_a_request_that_has_not_begun_cannot_be_changed(service, store):
    """Its capture is still being opened."""
    store.gate.clear()
    stream = service.stub.Generate(ask(spec("r", CAPTURE, updatable=True)))
    await store.until(lambda: store.opened)
    failure = await failure_of(service.update("r"))
    assert failure.reason_name == "UNKNOWN_REQUEST"
    assert "is not generating: it has not started" in failure.message
    stream.cancel()


@pytest.mark.parametrize("operations", [(), (ADD_JOY,)], ids=["plain", "steered"])
async def test_steering_that_is_not_updatable_cannot_be_changed(service, operations):
    await service.put(JOY)
    async with generating(service, spec("r", None, operations)):
        failure = await failure_of(service.update("r", add()))
    assert (failure.reason_name, failure.metadata) == ("NOT_UPDATABLE", {"request_id": "r"})
    assert failure.code == grpc.StatusCode.FAILED_PRECONDITION
    assert not service.engine.changes


async def test_vectors_of_a_change_of_steering_that_are_missing_can_be_sent(service):
    async with generating(service):
        failure = await failure_of(service.update("r", add(WOE), add(AWE)))
        digests = ",".join(item.digest.hex() for item in (WOE, AWE))
        assert (failure.reason_name, failure.metadata) == ("MISSING_VECTORS", {"digests": digests})
        await service.put(WOE, AWE)
        assert await service.update("r", add(WOE), add(AWE)) == [0]


BAD_STEERING = {
    "layer": (steering_pb2.SteeringOperation(layers=layers(3), add=ADD_JOY.add), "UNKNOWN_LAYER"),
    "nothing": (steering_pb2.SteeringOperation(layers=layers(0)), "UNKNOWN_OPERATION"),
    "digest": (steering_pb2.SteeringOperation(layers=layers(0), add=steering_pb2.Add(digest=b"x")), "INVALID_FIELD"),
    "value": (
        steering_pb2.SteeringOperation(
            layers=layers(0), replace=steering_pb2.Replace(digest=JOY.digest, value=float("nan"))
        ),
        "INVALID_FIELD",
    ),
    "direction": (
        steering_pb2.SteeringOperation(
            layers=layers(0), replace=steering_pb2.Replace(digest=vector(0, 0, 0, 0).digest, value=1.0)
        ),
        "BAD_VALUES",
    ),
    "ranges": (
        steering_pb2.SteeringOperation(
            layers=layers(0),
            add=ADD_JOY.add,
            positions=selection_pb2.PositionSelection(ranges=[selection_pb2.PositionRange(first=3, last=2)]),
        ),
        "INVALID_FIELD",
    ),
}


async def test_a_gate_is_added_to_a_running_request(service, store):
    await service.put(JOY, WOE, AWE)
    gated = add()
    gated.gate.CopyFrom(steering_pb2.Gate(digest=AWE.digest, threshold=2.0, measure=steering_pb2.GATE_MEASURE_COSINE))
    async with generating(service) as (stream, hand):
        failure = await failure_of(service.update("r", gated))
        assert (failure.reason_name, failure.metadata["field"]) == (
            "INVALID_FIELD",
            "steering.operations[0].gate.threshold",
        )
        gated.gate.threshold = 0.25
        assert await service.update("r", gated) == [0]
        hand.token(last=True)
        await read_all(stream)
    (change,) = (await store.seal()).steering_changes
    assert change.steering.operations[0].gate == gated.gate
    ((operation,),) = (sent["r#0"] for sent in service.engine.changes)
    assert service.engine.bank[operation.gate.row] == AWE.values


@pytest.mark.parametrize(("operation", "reason"), BAD_STEERING.values(), ids=BAD_STEERING)
async def test_bad_steering_is_refused_and_changes_nothing(service, store, operation, reason):
    await service.put(JOY, vector(0, 0, 0, 0))
    async with generating(service) as (stream, hand):
        assert (await failure_of(service.update("r", operation))).reason_name == reason
        hand.token(last=True)
        await read_all(stream)
    assert not service.engine.changes
    assert not (await store.seal()).steering_changes


async def test_the_number_of_steering_changes_is_limited(service, store):
    await service.put(JOY)
    async with generating(service, spec("r", CAPTURE, [ADD_JOY], updatable=True)) as (stream, hand):
        for number in range(256):
            await service.update("r", add(scale=number / 4))
        failure = await failure_of(service.update("r"))
        sizes = {"needed": "257", "allowed": "256"}
        assert (failure.reason_name, failure.metadata) == ("LIMIT_REACHED", {"limit": "steering_changes", **sizes})
        assert failure.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "256 times" in failure.message
        hand.token(last=True)
        await read_all(stream)
    seal = await store.seal()
    assert (len(seal.steering_changes), seal.outcome) == (256, COMPLETE)


async def test_changes_of_steering_fit_the_manifest(service, store):
    """All changes in a seal, including first positions, stay within the store's limits."""
    await service.put(JOY)
    long = steering_pb2.SteeringOperation(
        layers=layers(0),
        add=ADD_JOY.add,
        positions=selection_pb2.PositionSelection(
            ranges=[selection_pb2.PositionRange(first=-(at + 1), last=-1) for at in range(64)]
        ),
    )
    async with generating(service, num_sequences=4) as (stream, hand):
        answers = await asyncio.gather(*[service.update("r", *[long] * 4) for _ in range(256)], return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert 10 < len(refused) < 200
        assert all("manifest" in error.details() for error in refused)
        sizes = [failure_from_rpc_error(error).metadata for error in refused]
        assert {item["allowed"] for item in sizes} == {str(MAX_STEERING_CHANGES_BYTES)}
        assert all(int(item["needed"]) > MAX_STEERING_CHANGES_BYTES for item in sizes)
        for number in range(4):
            hand.token(f"r#{number}", last=True)
        await read_all(stream)
    changes = (await store.seal()).steering_changes
    assert len(changes) == 256 - len(refused)
    size = sum(change.ByteSize() for change in changes)
    assert MAX_STEERING_CHANGES_BYTES * 0.9 < size <= MAX_STEERING_CHANGES_BYTES


async def test_all_the_steering_that_a_request_had_fits_the_taps_tables(service, monkeypatch):
    """A preempted request may be computed again in one step, with each change. Its first steering counts once."""
    monkeypatch.setattr(steering_changes, "MAX_ENTRIES", 5)
    await service.put(JOY)
    async with generating(service, spec("r", CAPTURE, [add(scale=1.0)], updatable=True)):
        for scale in (1.0, 2.0, 1.0, 2.0, 2.0):
            await service.update("r", add(scale=scale))
        await service.update("r", *[add(scale=3.0)] * 3)
        failure = await failure_of(service.update("r", add(scale=4.0)))
        sizes = {"needed": "6", "allowed": "5"}
        assert (failure.reason_name, failure.metadata) == ("LIMIT_REACHED", {"limit": "steering_changes", **sizes})
        assert "6 entries" in failure.message
        await service.update("r", add(scale=2.0))


async def test_no_room_among_the_active_vectors_refuses_a_change_of_steering(store):
    async with running_service(store.endpoint, max_active_vectors=2, vector_wait_seconds=0.05) as service:
        await service.put(JOY, WOE, AWE)
        async with generating(service, spec("r", CAPTURE, [add(JOY)], updatable=True)):
            failure = await failure_of(service.update("r", add(WOE), add(AWE)))
            sizes = {"needed": "3", "allowed": "2"}
            assert (failure.reason_name, failure.metadata) == (
                "LIMIT_REACHED",
                {"limit": "max_active_vectors", **sizes},
            )
            assert "uses 3 vectors" in failure.message, "the request's own row will never be free"
            await service.update("r", add(WOE))
            other = failure_of(service.events(ask(spec("other", None, [add(AWE)]))))
            assert (await other).metadata == {"limit": "max_active_vectors"}
        assert len(service.engine.changes) == 1


async def test_too_many_vectors_are_refused_and_not_reported_as_missing(store):
    """Otherwise clients would send the dropped vectors again, and so cause others to be dropped."""
    async with running_service(store.endpoint, max_vectors=2) as service:
        await service.put(JOY, WOE, AWE)
        request = spec("r", None, [add(JOY), add(WOE), add(AWE)])
        failure = await failure_of(service.events(ask(request)))
        sizes = {"needed": "3", "allowed": "2"}
        assert (failure.reason_name, failure.metadata) == ("LIMIT_REACHED", {"limit": "max_vectors", **sizes})
        async with generating(service, spec("other", None, [add(AWE)], updatable=True)):
            failure = await failure_of(service.update("other", *request.steering.operations))
            assert failure.metadata == {"limit": "max_vectors", **sizes}


async def test_a_change_of_steering_waits_for_room_among_the_active_vectors(store):
    async with running_service(store.endpoint, max_active_vectors=1) as service:
        await service.put(JOY, WOE)
        async with generating(service, spec("holds", None, [add(JOY)])) as (stream, hand):
            changer = service.stub.Generate(ask(spec("r", updatable=True)))
            await changer.read()
            changing = asyncio.create_task(service.update("r", add(WOE)))
            await another_request(service, hand)
            assert not service.engine.changes
            hand.token("holds#0", last=True)
            await read_all(stream)
            assert await asyncio.wait_for(changing, DEADLINE) == [0]
            changer.cancel()


async def test_a_rule_does_not_wait_for_a_change_that_waits_for_room_among_the_active_vectors(store):
    """The sequence goes on while the change waits, and the rule's vectors are active already."""
    async with running_service(store.endpoint, max_active_vectors=2) as service:
        await service.put(JOY, WOE, AWE)
        async with generating(service, spec("holds", None, [add(WOE)])) as (stream, hand):
            changer = service.stub.Generate(ask(spec("r", CAPTURE, [add(JOY)], updatable=True)))
            await changer.read()
            changing = asyncio.create_task(service.update("r", add(AWE)))
            await until(lambda: service.parts.activator.num_waiting)
            (changes,) = service.parts.runner._changes.values()
            rule = rule_pb2.Rule(name="more", steering=steering_pb2.SteeringSpec(operations=[add(JOY)]))
            assert await asyncio.wait_for(changes.add(0, rule), DEADLINE) == 0
            assert not changing.done()
            hand.token("holds#0", last=True)
            await read_all(stream)
            assert await asyncio.wait_for(changing, DEADLINE) == [0]
            hand.token("r#0", last=True)
            await read_all(changer)
        assert [change.rule for change in (await store.seal()).steering_changes] == ["more", ""]


async def test_the_steering_that_is_changed_keeps_its_vectors_until_the_request_ends(store):
    """Positions computed before the change may be computed again."""
    async with running_service(store.endpoint, max_active_vectors=2, vector_wait_seconds=0.05) as service:
        await service.put(JOY, WOE, AWE)
        async with generating(service, spec("r", None, [add(JOY)], updatable=True)) as (stream, hand):
            await service.update("r", add(WOE))
            await service.update("r")
            failure = await failure_of(service.events(ask(spec("other", None, [add(AWE)]))))
            assert failure.metadata == {"limit": "max_active_vectors"}
            hand.token(last=True)
            await read_all(stream)
        service.engine.script = hand.script
        hand.token("other#0", last=True)
        assert (await service.events(ask(spec("other", None, [add(AWE)]))))[-1].HasField("finished")


# ------------------------------------------------------------------------------------------------------- ends midway


async def test_a_dead_engine_refuses_a_change_of_steering(service, store):
    async with generating(service):
        service.engine.change_error = Failure(Reason.ERROR_REASON_ENGINE_DEAD, "dead")
        failure = await failure_of(service.update("r"))
        assert (failure.reason_name, failure.code) == ("ENGINE_DEAD", grpc.StatusCode.UNAVAILABLE)
        service.engine.change_error = None
        await service.update("r")  # the lock is free
    assert len((await store.seal()).steering_changes) == 1


async def test_an_engine_that_fails_at_a_change_of_steering_leaves_the_request_running(service, store):
    async with generating(service) as (stream, hand):
        service.engine.change_error = RuntimeError("the ranks differ")
        assert (await failure_of(service.update("r"))).reason_name == "INTERNAL"
        hand.token(last=True)
        assert (await read_all(stream))[-1].HasField("finished")
    assert (await store.seal()).outcome == COMPLETE
    assert service.engine.forgotten == [["r#0"]], "the workers may remember the change"


async def test_a_change_of_steering_is_recorded_though_its_caller_has_gone(service, store):
    await service.put(JOY)
    async with generating(service) as (stream, hand):
        service.engine.answers.clear()
        call = service.stub.UpdateSteering(
            inference_pb2.UpdateSteeringRequest(request_id="r", steering=steering_pb2.SteeringSpec(operations=[add()]))
        )
        await service.engine.until(lambda: service.engine.changes)
        call.cancel()
        after = asyncio.create_task(service.update("r"))
        await another_request(service, hand)
        assert len(service.engine.changes) == 1, "the next change waits until this one is recorded"
        service.engine.answers.set()
        await after
        hand.token(last=True)
        await read_all(stream)
    assert [len(change.steering.operations) for change in (await store.seal()).steering_changes] == [1, 0]


async def test_a_change_of_steering_that_waits_for_room_goes_with_its_caller(store):
    """It has not reached the engine, so it must not take effect later."""
    async with running_service(store.endpoint, max_active_vectors=1) as service:
        await service.put(JOY, WOE)
        async with generating(service, spec("holds", None, [add(JOY)])) as (stream, hand):
            changer = service.stub.Generate(ask(spec("r", CAPTURE, updatable=True)))
            await changer.read()
            request = inference_pb2.UpdateSteeringRequest(
                request_id="r", steering=steering_pb2.SteeringSpec(operations=[add(WOE)])
            )
            call = service.stub.UpdateSteering(request)
            await until(lambda: service.parts.activator.num_waiting)
            call.cancel()
            await until(lambda: not service.parts.activator.num_waiting)
            hand.token("holds#0", last=True)
            await read_all(stream)
            assert await service.update("r") == [0]
            hand.token("r#0", last=True)
            await read_all(changer)
        assert [change["r#0"] for change in service.engine.changes] == [()]
        assert len((await store.seal()).steering_changes) == 1


@pytest.mark.parametrize("how", ["abort", "leave"])
async def test_a_request_that_is_stopped_records_the_change_that_is_under_way(service, store, how):
    async with generating(service) as (stream, hand):
        hand.token()
        await stream.read()
        service.engine.answers.clear()
        changing = asyncio.create_task(service.update("r"))
        await service.engine.until(lambda: service.engine.changes)
        if how == "abort":
            await service.abort("r")
        else:
            stream.cancel()
        await service.engine.until(lambda: service.engine.closed == ["r#0"])
        service.engine.answers.set()
        assert await asyncio.wait_for(changing, DEADLINE) == [3]
    seal = await store.seal()
    assert (seal.outcome, len(seal.steering_changes)) == (ABORTED, 1)


async def test_a_request_does_not_wait_for_ever_for_an_engine_that_does_not_answer(service, store, monkeypatch):
    """The engine's step waits for a store that does not answer. The change applies after all computed positions."""
    monkeypatch.setattr(steering_changes, "_ANSWER_SECONDS", 0.05)
    async with generating(service) as (stream, _):
        service.engine.answers.clear()
        changing = asyncio.create_task(service.update("r"))
        waiting = asyncio.create_task(service.update("r"))
        await service.engine.until(lambda: service.engine.changes)
        await service.abort("r")
        assert (await failure_of(stream.read())).reason_name == "ABORTED"
        for call in (changing, waiting):
            assert (await failure_of(call)).reason_name == "UNKNOWN_REQUEST"
    seal = await store.seal()
    assert (seal.outcome, len(seal.steering_changes)) == (ABORTED, 0)
    assert len(service.engine.changes) == 1
    assert service.engine.forgotten == [["r#0"]]


async def test_a_change_of_steering_that_waits_for_room_ends_with_its_request(store):
    async with running_service(store.endpoint, max_active_vectors=1) as service:
        await service.put(JOY, WOE)
        async with generating(service, spec("holds", None, [add(JOY)])) as (holder, hand):
            stream = service.stub.Generate(ask(spec("r", CAPTURE, updatable=True)))
            await stream.read()
            changing = asyncio.create_task(service.update("r", add(WOE)))
            await another_request(service, hand)
            await service.abort("r")
            assert (await failure_of(changing)).reason_name == "UNKNOWN_REQUEST"
            assert (await store.seal()).outcome == ABORTED
            holder.cancel()
            await service.engine.until(lambda: "holds#0" in service.engine.closed)
        hand = Hand(service.engine)
        hand.token("after#0", last=True)
        events = await asyncio.wait_for(service.events(ask(spec("after", None, [add(WOE)]))), DEADLINE)
        assert events[-1].HasField("finished"), "an ended request holds no row"


async def test_steering_can_be_changed_when_all_was_generated_and_not_yet_read(service, store):
    """The change has no effect and says so: the first position is the number of tokens."""
    async with generating(service) as (stream, hand):
        hand.token()
        hand.token(last=True)
        await service.engine.until(lambda: service.engine.closed == ["r#0"])
        (answer,) = await asyncio.gather(service.update("r"), return_exceptions=True)
        if isinstance(answer, grpc.aio.AioRpcError):  # the service was faster
            assert answer.code() == grpc.StatusCode.NOT_FOUND
        else:
            assert answer == [5]
        await read_all(stream)
    assert not service.engine.changes
    assert (await store.seal()).outcome == COMPLETE


async def test_a_change_of_steering_after_the_end_holds_no_vectors(service):
    """The last moment: the run is over, but the service has not forgotten the request yet."""
    await service.put(JOY)
    async with generating(service, spec("r", updatable=True)):
        (changes,) = service.parts.runner._changes.values()
    await service.engine.until(lambda: service.engine.closed == ["r#0"])
    with pytest.raises(Failure, match="just ended"):
        await changes.change(steering_pb2.SteeringSpec(operations=[add()]))
    assert not service.engine.changes
    assert not service.engine.bank


async def test_steering_is_changed_while_the_service_drains(service):
    async with generating(service):
        service.servicer.set_serving(serving=False)
        assert await service.update("r") == [0]


async def test_steering_cannot_be_changed_before_the_service_is_up(service):
    service.servicer.load(None)
    assert (await failure_of(service.update("r"))).reason_name == "NOT_SERVING"


# ------------------------------------------------------------------------------------------------------- to the worker


def test_changes_of_steering_travel_as_plain_data():
    class Runtime:
        def __init__(self):
            self.heard = []

        def change_steering(self, name, operations):
            self.heard.append((name, operations))
            return len(self.heard)

        def forget(self, names):
            self.heard.append(names)

    from inference_svc.taps.plan import Operation

    operation = Operation(Kind.CAP, 3, (0, 2), selection_pb2.PositionSelection(every=2), 1.0, 2.0, 2.0, keep_norm=True)
    runtime = Runtime()
    worker = SimpleNamespace(_residuum=SimpleNamespace(runtime=runtime))
    changes = {"r#0": [operation.to_data()], "r#1": []}
    assert TappedWorker.residuum_change_steering(worker, changes) == {"r#0": 1, "r#1": 2}
    TappedWorker.residuum_forget(worker, ["r#1"])
    assert runtime.heard == [("r#0", (operation,)), ("r#1", ()), ["r#1"]]
