"""Tenants' limits in a store and in an inference service. One tenant's limits do not affect others."""

from __future__ import annotations

import random
from collections import Counter

import grpc
import numpy as np
import pytest

from residuum.rpc.errors import Reason, failure_from_rpc_error
from residuum.v1 import capture_pb2, errors_pb2
from tests.security.callers import Caller
from tests.store.support import failing_with

EXCEEDED = Reason.ERROR_REASON_QUOTA_EXCEEDED
OPEN, COMPLETE = capture_pb2.CAPTURE_STATE_OPEN, capture_pb2.CAPTURE_STATE_COMPLETE


@pytest.fixture
def alice(call):
    return call("alice", "read", "write", "generate")


@pytest.fixture
def bob(call):
    return call("bob", "read", "write", "generate")


def test_open_captures(tokens, alice, bob):
    tokens.limit("alice", max_open_captures=2)
    alice.open("a")
    alice.open("b")
    alice.open("b")  # a repeated open adds no capture
    with failing_with(EXCEEDED) as caught:
        alice.open("c")
    assert caught[0].metadata == {"limit": "max_open_captures", "allowed": "2"}
    bob.open("c")
    alice.append("a")
    assert alice.seal("a").state == COMPLETE
    alice.open("c")
    with failing_with(EXCEEDED):
        alice.open("d")
    alice.delete("b")
    alice.open("d")
    assert alice.stats().tenant.max_open_captures == 2
    assert not bob.stats().tenant.HasField("max_open_captures")


def test_bytes(tokens, alice, bob):
    alice.open("a")
    assert alice.append("a", positions=[0, 1]) == {}
    used = alice.get("a").num_bytes
    tokens.limit("alice", max_bytes=2 * used)
    assert alice.append("a", positions=[2, 3]) == {}
    assert alice.append("a", positions=[4]) == {1: EXCEEDED}
    assert alice.append("a", positions=[0, 1]) == {}  # repeated rows take no space
    with failing_with(EXCEEDED) as caught:
        alice.open("b")
    assert caught[0].metadata == {"limit": "max_bytes", "allowed": str(2 * used)}
    assert "residuum rm" in caught[0].message
    assert alice.get("a").state == OPEN
    bob.write("a")
    stats = alice.stats()
    assert (stats.num_bytes, stats.tenant.max_bytes) == (2 * used, 2 * used)
    alice.delete("a")
    alice.open("b")
    assert alice.append("b", positions=[0, 1]) == {}


def test_within_one_transaction(tokens, alice):
    """Chunks in one transaction count together."""
    alice.open("a")
    alice.append("a", positions=[0])
    used = alice.get("a").num_bytes
    tokens.limit("alice", max_bytes=3 * used)
    stored = [alice.append("a", positions=[position]) for position in range(1, 5)]
    assert stored == [{}, {}, {1: EXCEEDED}, {1: EXCEEDED}]
    assert alice.get("a").num_bytes <= 3 * used


def test_a_limit_of_zero_open_captures(tokens, alice):
    tokens.limit("alice", max_open_captures=0)
    with failing_with(EXCEEDED):
        alice.open("a")


def test_limits_survive_a_restart(store, tokens):
    token = tokens.add("alice", "read", "write")
    tokens.limit("alice", max_open_captures=1)
    for name in ("a", "b"):
        with store(tokens=tokens.path) as endpoint:
            caller = Caller(endpoint, token)
            if name == "a":
                caller.open(name)
            else:
                with failing_with(EXCEEDED):
                    caller.open(name)
            caller.channel.close()


def test_the_usage_of_a_tenant_is_counted_correctly(store, tokens):
    """Random work of two tenants, compared with their own counts, also after a restart."""
    rng = random.Random(7)
    given = {tenant: tokens.add(tenant, "read", "write", "generate") for tenant in ("alice", "bob")}
    tokens.limit("alice", max_open_captures=3)
    for _ in range(2):
        with store(tokens=tokens.path) as endpoint:
            callers = [Caller(endpoint, token) for token in given.values()]
            for _ in range(150):
                work_at_random(rng, rng.choice(callers))
            for caller in callers:
                manifests = [caller.get(name) for _, name in caller.list()]
                stats = caller.stats()
                assert stats.num_bytes == sum(manifest.num_bytes for manifest in manifests)
                states = Counter(manifest.state for manifest in manifests)
                assert {item.state: item.count for item in stats.captures} == dict(states)
                assert caller is callers[1] or states[OPEN] <= 3
                caller.channel.close()


def work_at_random(rng, caller):
    name = rng.choice("abcdefgh")
    what = rng.choice(["open", "open", "append", "append", "seal", "delete"])
    try:
        if what == "append":
            caller.append(name, positions=sorted(rng.sample(range(5), 2)))
        else:
            getattr(caller, what)(name)
    except grpc.RpcError as error:
        reason = failure_from_rpc_error(error).reason_name
        assert reason in {"UNKNOWN_CAPTURE", "CAPTURE_EXISTS", "CAPTURE_ENDED", "QUOTA_EXCEEDED"}


class TestVectors:
    """A tenant's limits in the vector cache of an inference service."""

    BYTES = 16  # four elements, as the tests' model has them

    @pytest.fixture
    def cache(self):
        from inference_svc.resources.vector_cache import VectorCache

        self.leased = set()
        return VectorCache(100, 1 << 20, (4,), lambda name: name in self.leased)

    def vector(self, number):
        from residuum.wire.digests import vector_message

        return vector_message(np.full(4, number, np.float32))

    def put(self, cache, number, tenant="alice", vectors=2):
        cache.put(self.vector(number), tenant, vectors * self.BYTES)

    def has(self, cache, number, tenant="alice"):
        from inference_svc.resources.vector_cache import vector_name

        return not cache.missing([vector_name(tenant, self.vector(number).digest)])

    def test_a_tenants_least_recently_used_vector_is_evicted_first(self, cache):
        self.put(cache, 9, "bob")
        for number in (1, 2, 3):
            self.put(cache, number)
        assert [self.has(cache, number) for number in (1, 2, 3)] == [False, True, True]
        assert self.has(cache, 9, "bob")
        self.put(cache, 3)
        assert self.has(cache, 2)

    def test_vectors_that_requests_need_are_kept(self, cache):
        from inference_svc.resources.vector_cache import vector_name
        from residuum.rpc.errors import Failure

        for number in (1, 2):
            self.put(cache, number)
            self.leased.add(vector_name("alice", self.vector(number).digest))
        with pytest.raises(Failure) as raised:
            self.put(cache, 3)
        assert raised.value.reason == errors_pb2.ERROR_REASON_QUOTA_EXCEEDED
        assert raised.value.metadata == {"limit": "max_vector_bytes", "allowed": "32"}
        assert [self.has(cache, number) for number in (1, 2, 3)] == [True, True, False]
        self.put(cache, 3, "bob")

    def test_a_limit_below_one_vector_allows_none(self, cache):
        from residuum.rpc.errors import Failure

        with pytest.raises(Failure):
            cache.put(self.vector(1), "alice", 15)
        assert not self.has(cache, 1)
        assert cache.num_vectors == 0
