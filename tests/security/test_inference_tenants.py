"""Requests and vectors of the inference service belong to tenants."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from inference_svc.captures.keeper import CaptureKeeper
from residuum.rpc.channels import open_aio_channel
from residuum.rpc.credentials import Credentials
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2, inference_pb2_grpc, steering_pb2, store_pb2_grpc
from residuum.wire.digests import vector_message
from residuum.wire.placement import StoreAddress
from tests.inference.service_support import (
    FakeEngine,
    FakeStore,
    failure_of,
    listening,
    running_service,
    stuck_after,
    three_tokens,
)
from tests.store.support import describe

UNKNOWN = Reason.ERROR_REASON_UNKNOWN_REQUEST


class Tenant:
    """A client of the service with one token."""

    def __init__(self, channel):
        self.stub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def put(self, *vectors):
        messages = [inference_pb2.PutVectorsRequest(vector=item) for item in vectors]
        return (await self.stub.PutVectors(iter(messages))).results

    async def missing(self, *vectors):
        request = inference_pb2.FindMissingVectorsRequest(digests=[item.digest for item in vectors])
        return list((await self.stub.FindMissingVectors(request)).missing_digests)

    async def register(self, spec):
        return await self.stub.RegisterRequest(inference_pb2.RegisterRequestRequest(spec=spec))

    def generate(self, request_id="", spec=None):
        target = {"request_id": request_id} if request_id else {"spec": spec}
        tokens = inference_pb2.TokenIds(ids=[1, 2, 3])
        return self.stub.Generate(inference_pb2.GenerateRequest(token_ids=tokens, **target))

    async def abort(self, request_id):
        await self.stub.Abort(inference_pb2.AbortRequest(request_id=request_id))

    async def update(self, request_id, steering=None):
        request = inference_pb2.UpdateSteeringRequest(
            request_id=request_id, steering=steering or steering_pb2.SteeringSpec()
        )
        return await self.stub.UpdateSteering(request)


@pytest.fixture
async def tenants(tokens):
    """Clients of Alice and Bob for one service with a store."""
    servicer = FakeStore()
    given = {name: tokens.add(name, "generate") for name in ("alice", "bob")}
    tokens.limit("alice", max_vector_bytes=2 * 16, max_requests=2)

    @asynccontextmanager
    async def connected(endpoint, token):
        async with open_aio_channel(endpoint, credentials=Credentials(token=token)) as channel:
            yield Tenant(channel)

    async with (
        listening(store_pb2_grpc.add_StoreServiceServicer_to_server, servicer) as store,
        running_service(store, engine=FakeEngine(), tokens=tokens.path) as service,
        connected(service.endpoint, given["alice"]) as alice,
        connected(service.endpoint, given["bob"]) as bob,
    ):
        service.store = servicer
        yield service, alice, bob


def vector(number):
    return vector_message(np.full(4, number, np.float32))


async def test_a_tenant_cannot_tell_whether_another_has_a_vector(tenants):
    _, alice, bob = tenants
    joy = vector(1)
    assert not (await alice.put(joy))[0].HasField("error")
    assert await alice.missing(joy) == []
    assert await bob.missing(joy) == [joy.digest]
    spec = steered(joy)
    assert (await alice.register(spec)).missing_digests == []
    assert (await bob.register(spec)).missing_digests == [joy.digest]
    failure = await failure_of(drain(bob.generate(spec=spec)))
    assert failure.reason == Reason.ERROR_REASON_MISSING_VECTORS
    assert failure.metadata["digests"] == joy.digest.hex()


def steered(item, **fields):
    operation = steering_pb2.SteeringOperation(add=steering_pb2.Add(digest=item.digest, scale=1.0))
    operation.layers.list.layers.append(0)
    return inference_pb2.RequestSpec(steering=steering_pb2.SteeringSpec(operations=[operation], **fields))


def captured(request_id):
    spec = inference_pb2.RequestSpec(request_id=request_id)
    spec.capture.layers.list.layers.append(0)
    return spec


async def drain(call):
    return [event async for event in call]


async def test_equal_vectors_of_two_tenants_have_separate_rows(tenants):
    service, alice, bob = tenants
    service.engine.script = stuck_after()
    running = []
    for tenant in (alice, bob):
        await tenant.put(vector(1))
        call = tenant.generate(spec=steered(vector(1)))
        await anext(aiter(call))
        running.append(call)
    await service.engine.until(lambda: len(service.engine.calls) == 2)
    rows = [call.plan.operations[0].row for call in service.engine.calls]
    assert rows[0] != rows[1]
    for call in running:
        call.cancel()


async def test_limits_of_vectors(tenants):
    _, alice, bob = tenants
    vectors = [vector(number) for number in (1, 2, 3)]
    await alice.put(*vectors)
    assert await alice.missing(*vectors) == [vectors[0].digest]  # the least recently used vector was evicted
    await bob.put(*vectors)
    assert await bob.missing(*vectors) == []


async def test_a_request_with_more_vectors_than_the_limit_is_refused_as_such(tenants):
    """Sending its vectors again could not help, because they push each other out of the cache."""
    service, alice, bob = tenants
    vectors = [vector(number) for number in (1, 2, 3)]
    spec = inference_pb2.RequestSpec(steering=steering_pb2.SteeringSpec(updatable=True))
    for item in vectors:
        spec.steering.operations.extend(steered(item).steering.operations)
    for tenant in (alice, bob):
        await tenant.put(*vectors)
    quota = {"limit": "max_vector_bytes", "needed": "48", "allowed": "32"}
    failure = await failure_of(drain(alice.generate(spec=spec)))
    assert (failure.reason, failure.metadata) == (Reason.ERROR_REASON_QUOTA_EXCEEDED, quota)
    assert (await drain(bob.generate(spec=spec)))[-1].HasField("finished")
    service.engine.script = stuck_after()
    running = alice.generate(spec=inference_pb2.RequestSpec(request_id="hers", steering={"updatable": True}))
    await anext(aiter(running))
    failure = await failure_of(alice.update("hers", spec.steering))
    assert (failure.reason, failure.metadata) == (Reason.ERROR_REASON_QUOTA_EXCEEDED, quota)
    running.cancel()


async def test_limits_of_requests(tenants):
    """A tenant cannot use another tenant's slots, nor more of the engine than its limit."""
    service, alice, bob = tenants
    service.engine.script = stuck_after()
    plain = inference_pb2.RequestSpec()
    running = [alice.generate(spec=plain) for _ in range(2)]
    for call in running:
        await anext(aiter(call))
    await alice.register(captured("later"))
    failure = await failure_of(drain(alice.generate("later")))
    assert failure.reason == Reason.ERROR_REASON_QUOTA_EXCEEDED
    assert failure.metadata == {"limit": "max_requests", "allowed": "2"}
    others = [bob.generate(spec=plain) for _ in range(3)]
    for call in others:
        await anext(aiter(call))
    running[0].cancel()
    await service.engine.until(lambda: len(service.engine.closed) == 1)
    while service.places.num_taken > 4:  # noqa: ASYNC110 - nothing else tells of it
        await asyncio.sleep(0)
    service.engine.script = three_tokens
    assert (await drain(alice.generate("later")))[-1].HasField("finished")  # the refused request is still registered
    for call in (running[1], *others):
        call.cancel()


async def test_two_tenants_can_use_the_same_request_id(tenants):
    service, alice, bob = tenants
    for tenant in (alice, bob):
        assert (await tenant.register(captured("mine"))).request_id == "mine"
        events = await drain(tenant.generate("mine"))
        assert events[0].started.request_id == "mine"
        assert events[0].started.capture.capture_id == "mine"
        failure = await failure_of(drain(tenant.generate("mine")))
        assert failure.reason == UNKNOWN
    store = service.store
    await store.until(lambda: len(store.seals) == 2)
    assert [(item.tenant, item.capture_id) for item in store.opened] == [("alice", "mine"), ("bob", "mine")]
    assert {(item.tenant, item.capture_id) for item in store.seals} == {("alice", "mine"), ("bob", "mine")}
    # The engine, the workers and the shippers use different names for them.
    assert [call.engine_id for call in service.engine.calls] == ["alice/mine#0", "bob/mine#0"]
    assert [call.plan.capture.capture_id for call in service.engine.calls] == ["alice/mine", "bob/mine"]


async def test_requests_of_another_tenant_do_not_exist(tenants):
    service, alice, bob = tenants
    service.engine.script = stuck_after()
    spec = steered(vector(1), updatable=True)
    spec.request_id = "hers"
    await alice.put(vector(1))
    await alice.register(spec)
    for name in ("hers", "alice/hers"):
        for attempt in (drain(bob.generate(name)), bob.abort(name), bob.update(name)):
            assert (await failure_of(attempt)).reason == UNKNOWN
    call = alice.generate("hers")
    await anext(aiter(call))
    for name in ("hers", "alice/hers"):
        for attempt in (bob.abort(name), bob.update(name)):
            assert (await failure_of(attempt)).reason == UNKNOWN
    assert (await alice.update("hers")).first_positions
    await alice.abort("hers")
    assert (await failure_of(drain(call))).reason == Reason.ERROR_REASON_ABORTED


async def test_tenants_share_no_prefix_cache(tenants):
    service, alice, bob = tenants
    plain = inference_pb2.RequestSpec()
    for tenant in (alice, alice, bob):
        await drain(tenant.generate(spec=plain))
    first, second, other = (call.cache_salt for call in service.engine.calls)
    assert first == second  # a tenant shares its own cached prompt
    assert first
    assert first != other


async def test_without_authentication_requests_share_the_prefix_cache():
    async with running_service() as service:
        tokens = inference_pb2.TokenIds(ids=[1])
        await service.events(inference_pb2.GenerateRequest(token_ids=tokens, spec=inference_pb2.RequestSpec()))
        assert service.engine.calls[0].cache_salt is None


@pytest.mark.parametrize(("right", "words"), [(None, "This service does not know the token"), ("read", "'write'")])
async def test_a_store_that_refuses_the_service_is_reported_as_unreachable(tokens, tmp_path, store, right, words):
    """The error must not blame the caller's token, which is valid."""
    own = tmp_path / "own"
    own.write_text(tokens.add("alice", right) if right else "rsd_unknown")
    with store(tokens=tokens.path) as endpoint:
        keeper = CaptureKeeper(StoreAddress(endpoint, endpoint), Credentials(token_file=own))
        with pytest.raises(Failure, match=words) as raised:
            await keeper.open(describe())
        await keeper.close(0)
    assert raised.value.reason == Reason.ERROR_REASON_STORE_UNREACHABLE
    assert "--store-token-file" in raised.value.message
