"""Shared memory and tenants: rows come only to the memory of a caller that may read them."""

from __future__ import annotations

import mmap
import os

import pytest

from residuum.rpc.errors import Reason
from residuum.rpc.shared_memory import create_memory, give_memory
from residuum.v1 import store_pb2
from residuum.wire.rows.shared_memory import MIN_READ_BYTES, READ
from tests.security.callers import Caller
from tests.store.support import COMPLETE, describe, failing_with, make_chunk, message, seal_request

pytestmark = pytest.mark.usefixtures("shared_memory")

WIDTH, LAYERS, PROMPT = 1024, range(8), 64


class Reader(Caller):
    """A caller with a memory."""

    def __init__(self, endpoint, token):
        super().__init__(endpoint, token)
        answer = self.stub.DescribeStore(store_pb2.DescribeStoreRequest())
        descriptor = create_memory(MIN_READ_BYTES)
        self.given = give_memory(answer.shared_memory_socket, answer.instance, READ, descriptor)
        self.memory = mmap.mmap(descriptor, MIN_READ_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(descriptor)

    def write(self, name):
        self.stub.OpenCapture(
            store_pb2.OpenCaptureRequest(description=describe(name, layers=LAYERS, prompt=PROMPT, width=WIDTH))
        )
        append = self.channel.stream_stream(
            "/residuum.v1.StoreService/AppendChunks", None, store_pb2.AppendChunksResponse.FromString
        )
        list(append(iter([message(1, name, make_chunk(LAYERS, range(PROMPT // 2), width=WIDTH))]), timeout=20))
        list(append(iter([message(1, name, make_chunk(LAYERS, range(32, PROMPT), width=WIDTH))]), timeout=20))
        assert self.stub.SealCapture(seal_request(name, generated=[1])).manifest.state == COMPLETE

    def read(self, name, key=None):
        """Return how many chunks came in messages and in memory."""
        request = store_pb2.ReadChunksRequest(capture_id=name, shared_memory_key=key or self.given.key)
        answers = list(self.stub.ReadChunks(request, timeout=20))
        return sum(item.HasField("chunk") for item in answers), sum(len(item.placed_chunks) for item in answers)

    def is_untouched(self):
        return self.memory[:] == bytes(MIN_READ_BYTES)

    def close(self):
        self.given.close()
        self.channel.close()


@pytest.fixture
def callers(store, tokens):
    with store(tokens=tokens.path) as endpoint:
        made = [Reader(endpoint, tokens.add(tenant, "read", "write")) for tenant in ("alice", "bob")]
        made[0].write("hers")
        made[1].write("his")
        yield made
        for caller in made:
            caller.close()


def test_rows_of_another_tenant_do_not_come(callers):
    alice, bob = callers
    with failing_with(Reason.ERROR_REASON_UNKNOWN_CAPTURE):
        bob.read("hers")
    request = store_pb2.ReadCapturesRequest(capture_ids=["hers"], shared_memory_key=bob.given.key)
    (answer,) = bob.stub.ReadCaptures(request, timeout=20)
    assert answer.captures[0].error.reason == Reason.ERROR_REASON_UNKNOWN_CAPTURE
    assert bob.is_untouched()
    assert alice.read("hers") == (0, 2)
    assert bob.is_untouched()


def test_a_stolen_key_brings_the_thief_nothing_and_its_owner_no_wrong_rows(callers):
    """Whoever names it gives away rows of its own; the owner's reads then avoid the memory."""
    alice, bob = callers
    assert bob.read("his", key=alice.given.key) == (0, 2)
    assert bob.is_untouched()
    assert alice.read("hers") == (2, 0), "the memory holds payloads that she never heard of"


def test_a_caller_that_may_not_read_gets_nothing(store, tokens):
    with store(tokens=tokens.path) as endpoint:
        writer = Reader(endpoint, tokens.add("carol", "write"))
        writer.write("hers")
        with failing_with(Reason.ERROR_REASON_PERMISSION_DENIED):
            writer.read("hers")
        assert writer.is_untouched()
        writer.close()


def test_keys_are_not_logged(callers, capfd):
    alice, _ = callers
    alice.read("hers")
    alice.given.send(b"broken")
    with failing_with(Reason.ERROR_REASON_UNKNOWN_CAPTURE):
        alice.read("nothing")
    out, err = capfd.readouterr()
    assert alice.given.key.hex() not in (out + err)
    assert repr(alice.given.key)[2:-1] not in (out + err)
