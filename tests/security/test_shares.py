"""What all tenants share: a single one cannot take more than its half while the tokens file names others."""

from __future__ import annotations

import threading
import uuid
from contextlib import AsyncExitStack, ExitStack, contextmanager

import grpc
import numpy as np
import pytest

from inference_svc.requests.registry import RequestRegistry
from residuum.rpc.channels import open_aio_channel
from residuum.rpc.credentials import Credentials
from residuum.rpc.errors import Failure, Reason, failure_from_rpc_error
from residuum.v1 import capture_pb2, inference_pb2, steering_pb2, store_pb2
from residuum.wire.rows.frames import append_prefix
from store_svc.searching.search import Searcher
from svc_common.security.tokens_file import Limits
from tests.inference.service_support import failure_of, running_service
from tests.inference.spec_support import spec_of
from tests.security.callers import LAYERS, Caller
from tests.security.test_inference_tenants import Tenant
from tests.store.support import failing_with, make_chunk

LIMIT = Reason.ERROR_REASON_LIMIT_REACHED


@contextmanager
def begun(call):
    """Wait for the first answer of a call, which goes on until the context ends. Yield what ended it, or None."""
    try:
        next(call)
    except grpc.RpcError as error:
        yield failure_from_rpc_error(error)
    else:
        yield None
    finally:
        call.cancel()


@contextmanager
def writing(caller, tenant=""):
    """Open a capture, and keep a stream of its rows open. Yield what ended the stream, or None if it goes on."""
    name = f"w-{uuid.uuid4().hex}"
    caller.open(name, tenant)
    over, chunk = threading.Event(), make_chunk(LAYERS, [0])

    def messages():
        yield append_prefix(1, name, len(chunk), tenant) + chunk
        over.wait(30)

    try:
        with begun(caller.raw_append(messages(), timeout=30)) as failure:
            yield failure
    finally:
        over.set()


def following(caller, name):
    """Follow an open capture. Return a context with what ended the read, or None if it goes on."""
    return begun(caller.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id=name, follow=True), timeout=30))


@pytest.fixture
def callers(store, tokens):
    """Makes a store with settings, and callers with all rights for it, by tenant. Tenants are known once they call."""
    with ExitStack() as stack:

        def make(**settings):
            endpoint = stack.enter_context(store(tokens=tokens.path, **settings))

            def caller(tenant):
                rights = ["write"] if tenant == "*" else ["read", "write", "generate"]
                made = Caller(endpoint, tokens.add(tenant, *rights))
                stack.callback(made.channel.close)
                return made

            return caller

        yield make


def reasons(outcomes):
    return [outcome and outcome.reason for outcome in outcomes]


def test_streams_of_writers(callers):
    caller = callers(max_writers=4)
    alice, service = caller("alice"), caller("*")
    with ExitStack() as stack:
        outcomes = [stack.enter_context(writing(alice)) for _ in range(3)]
        assert reasons(outcomes) == [None] * 3, "no other tenant exists"
        bob = caller("bob")
        assert reasons([stack.enter_context(writing(alice))]) == [LIMIT]
        assert reasons([stack.enter_context(writing(bob))]) == [None]
    with ExitStack() as stack:
        outcomes = [stack.enter_context(writing(service, "alice")) for _ in range(5)]
        assert reasons(outcomes) == [None] * 4 + [LIMIT], "it writes for all tenants"


def test_reads(callers):
    caller = callers(max_streams=4)
    alice, bob = caller("alice"), caller("bob")
    for each in (alice, bob):
        each.open("a")
    with ExitStack() as stack:
        outcomes = [stack.enter_context(following(alice, "a")) for _ in range(3)]
        assert reasons(outcomes) == [None, None, LIMIT]
        assert "of your tenant" in outcomes[-1].message
        outcomes = [stack.enter_context(following(bob, "a")) for _ in range(2)]
        assert reasons(outcomes) == [None, None]


def test_searches_of_the_default_tenant(callers, monkeypatch):
    """With tokens, it is a tenant like others: one search at a time."""
    begun, over = threading.Semaphore(0), threading.Event()

    def search(*_):
        begun.release()
        over.wait(30)
        yield store_pb2.SearchResponse(is_last=True)

    monkeypatch.setattr(Searcher, "search", search)
    caller = callers()
    default, bob = caller(""), caller("bob")
    request = store_pb2.SearchRequest(vector=np.ones(4, "<f4").tobytes(), max_hits=1)
    running = [default.stub.Search(request, timeout=30)]
    assert begun.acquire(timeout=20)
    with failing_with(LIMIT):
        list(default.stub.Search(request, timeout=10))
    running.append(bob.stub.Search(request, timeout=30))
    assert begun.acquire(timeout=20)
    over.set()
    for call in running:
        assert list(call)[-1].is_last


def fill(caller, tenant=""):
    """Open captures until the store refuses one. Return how many it took."""
    for number in range(1000):
        try:
            caller.open(f"c{number}", tenant, prompt=10_000)
        except grpc.RpcError as error:
            failure = failure_from_rpc_error(error)
            assert (failure.reason, failure.metadata) == (LIMIT, {"limit": "max_open_mib"})
            return number
    raise AssertionError("there is no limit")


def test_open_captures(callers):
    caller = callers(max_open_mib=1)
    alice, service = caller("alice"), caller("*")
    alone = fill(alice)
    for number in range(alone):
        alice.delete(f"c{number}")
    bob = caller("bob")
    bob.open("before")
    assert 0 < fill(service, "alice") < 0.7 * alone, "the service opens captures for alice, too"
    assert service.append("c0", "alice", positions=[0]) == {1: LIMIT}
    bob.write("b")
    assert bob.append("before") == {}
    assert bob.get("b").state == capture_pb2.CAPTURE_STATE_COMPLETE


async def test_registrations(tokens):
    given = {"alice": tokens.add("alice", "generate")}
    async with running_service(tokens=tokens.path, max_registrations=4) as service, AsyncExitStack() as stack:

        async def connected(name):
            channel = open_aio_channel(service.endpoint, credentials=Credentials(token=given[name]))
            return Tenant(await stack.enter_async_context(channel))

        alice, plain = await connected("alice"), inference_pb2.RequestSpec()
        ids = [(await alice.register(plain)).request_id for _ in range(3)]  # no other tenant exists
        given["bob"] = tokens.add("bob", "generate")
        bob = await connected("bob")
        failure = await failure_of(alice.register(plain))
        assert (failure.reason, failure.metadata) == (LIMIT, {"limit": "max_registrations"})
        assert "of your tenant" in failure.message
        await bob.register(plain)
        for name in ids[:2]:
            await alice.abort(name)
        await alice.register(plain)
        assert (await failure_of(alice.register(plain))).reason == LIMIT


def test_the_memory_of_registrations():
    shared = Limits(has_neighbours=True)
    steering = steering_pb2.SteeringSpec(operations=[steering_pb2.SteeringOperation(add={"digest": b"d" * 32})])
    size = spec_of("a0", None, steering).num_bytes
    registry = RequestRegistry(60, 100, max_bytes=4 * size, limits_of=lambda _: shared)

    def register(name, tenant):
        registry.register(spec_of(name, None, steering), tenant)

    for name in ("a0", "a1"):
        register(name, "alice")
    with pytest.raises(Failure) as raised:
        register("a2", "alice")
    assert raised.value.metadata == {"limit": "max_registration_mib"}
    for name in ("b0", "b1"):
        register(name, "bob")
    registry.start_registered("a0", "alice")
    register("a2", "alice")
