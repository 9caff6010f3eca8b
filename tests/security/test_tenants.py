"""Captures belong to tenants. For other tenants they do not exist, in any method of the store."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pool

from residuum.rpc.errors import Reason, failure_from_rpc_error
from residuum.v1 import capture_pb2, store_pb2
from store_svc.server import Store
from store_svc.settings import StoreSettings
from tests.security.callers import Caller
from tests.store.support import failing_with

DENIED, UNKNOWN = Reason.ERROR_REASON_PERMISSION_DENIED, Reason.ERROR_REASON_UNKNOWN_CAPTURE


@pytest.fixture
def writer(call):
    """An inference service that writes for all tenants."""
    return call("*", "write")


@pytest.fixture
def alice(call):
    return call("alice", "generate", "read")


@pytest.fixture
def bob(call):
    return call("bob", "generate", "read")


@pytest.fixture
def admin(call):
    return call("*", "admin")


def test_captures_of_two_tenants_with_the_same_id_are_separate(writer, alice, bob):
    writer.write(tenant="alice")
    with failing_with(UNKNOWN):
        bob.get()
    writer.open(tenant="bob")
    assert alice.get().state == capture_pb2.CAPTURE_STATE_COMPLETE
    assert (alice.get().description.tenant, bob.get().description.tenant) == ("alice", "bob")
    assert bob.get().state == capture_pb2.CAPTURE_STATE_OPEN
    assert bob.delete() == 0
    assert len(alice.read()) == 3
    assert alice.delete() > 0
    with failing_with(UNKNOWN):
        alice.get()


def calls_about_a_capture():
    """All methods whose request names a capture, each with a call about alice's capture."""
    calls = {
        "SealCapture": lambda caller, tenant: caller.seal(**tenant),
        "GetCapture": lambda caller, tenant: caller.get(**tenant),
        "ReadChunks": lambda caller, tenant: caller.read(**tenant),
        "LabelCapture": lambda caller, tenant: caller.label(**tenant),
        "DeleteCapture": lambda caller, tenant: caller.delete(**tenant),
        "AppendChunks": lambda caller, tenant: caller.append(**tenant),
    }
    methods = descriptor_pool.Default().FindServiceByName("residuum.v1.StoreService").methods
    naming = {method.name for method in methods if "capture_id" in method.input_type.fields_by_name}
    assert naming == calls.keys()
    return calls


@pytest.mark.parametrize("method", calls_about_a_capture())
@pytest.mark.parametrize("state", ["open", "complete"])
@pytest.mark.parametrize("named", [{}, {"tenant": "alice"}, {"tenant": ""}, {"tenant": "nobody"}])
def test_the_capture_of_another_tenant_does_not_exist(call, writer, alice, method, state, named):
    """Bob gets exactly the same answers for alice's capture as for one that never existed."""
    bob = call("bob", "generate", "read", "write")
    heard = []
    for there in (False, True):
        if there:
            (writer.open if state == "open" else writer.write)(tenant="alice")
        if method == "AppendChunks":
            heard.append(calls_about_a_capture()[method](bob, named))
            assert heard[-1] == {1: UNKNOWN}
        else:
            with failing_with(UNKNOWN) as caught:
                calls_about_a_capture()[method](bob, named)
            assert caught[0].code is grpc.StatusCode.NOT_FOUND
            heard.append((caught[0].message, caught[0].metadata))
    assert heard[0] == heard[1]
    assert (alice.get().num_bytes > 0) == (state == "complete")


def test_captures_of_another_tenant_are_neither_opened_nor_sealed_among_others(call, writer, alice):
    """Bob's own captures of the same call are. Of alice's capture he hears as of one that never existed."""
    bob = call("bob", "generate", "read", "write")
    writer.open("a", tenant="alice")
    assert bob.open_many(("mine", ""), ("new", "alice"), ("also", "bob")) == [0, DENIED, 0]
    assert alice.list() == [("alice", "a")]
    assert sorted(bob.list()) == [("bob", "also"), ("bob", "mine")]
    assert bob.seal_many(("mine", ""), ("a", "alice"), ("a", ""), ("gone", "alice")) == [0, UNKNOWN, UNKNOWN, UNKNOWN]
    assert alice.get().state == capture_pb2.CAPTURE_STATE_OPEN
    assert not alice.get().HasField("seal_time")
    assert bob.get("mine").HasField("seal_time")


@pytest.mark.parametrize("named", [{}, {"tenant": "alice"}, {"tenant": "nobody"}])
def test_a_list_of_captures_shows_none_of_another_tenant(writer, alice, bob, named):
    """Bob gets the same answer for alice's capture as for one that never existed."""
    writer.write(tenant="alice")
    request = store_pb2.ReadCapturesRequest(capture_ids=["a", "b"], follow=True, **named)
    (answer,) = bob.stub.ReadCaptures(request, timeout=20)
    errors = [(part.index, part.error.reason, len(part.chunks)) for part in answer.captures]
    assert errors == [(0, UNKNOWN, 0), (1, UNKNOWN, 0)]
    texts = [part.error.message.replace(repr(name), "") for part, name in zip(answer.captures, "ab", strict=True)]
    assert texts[0] == texts[1]
    (answer,) = alice.stub.ReadCaptures(store_pb2.ReadCapturesRequest(capture_ids=["a"]), timeout=20)
    assert answer.captures[0].manifest.description.tenant == "alice"
    assert answer.captures[0].chunks


@pytest.mark.parametrize("named", [{}, {"tenant": "alice"}, {"tenant": ""}, {"tenant": "nobody"}])
@pytest.mark.parametrize("state", ["open", "complete"])
def test_deleting_many_captures_spares_those_of_another_tenant(writer, alice, bob, state, named):
    """Bob gets the same answer for alice's capture as for one that never existed."""
    heard = []
    for there in (False, True):
        if there:
            (writer.open if state == "open" else writer.write)(tenant="alice")
        heard.append(bob.delete_many("a", "a", **named))
        assert [(freed, error.reason) for freed, error in heard[-1]] == [(0, UNKNOWN)] * 2
    assert heard[0] == heard[1]
    assert alice.get().description.tenant == "alice"


def test_each_tenant_deletes_its_own_of_the_same_ids(call, writer, alice, bob, admin):
    for tenant in ("alice", "bob", ""):
        for name in ("a", "b"):
            writer.write(name, tenant)
    assert all(freed > 0 for freed, _ in bob.delete_many("a", "b"))
    assert admin.list() == [(tenant, name) for tenant in ("", "alice") for name in ("b", "a")]
    assert all(freed > 0 for freed, _ in admin.delete_many("a", "b", tenant="alice"))
    assert all(freed > 0 for freed, _ in admin.delete_many("a"))
    assert admin.list() == [("", "b")]
    for caller in (writer, call("bob", "read")):
        with failing_with(DENIED):
            caller.delete_many("b")


def test_searches_find_only_the_callers_rows(writer, alice, bob, admin):
    """Bob gets the same answer for alice's captures as for none."""

    def search(caller, **named):
        request = store_pb2.SearchRequest(vector=np.ones(4, "<f4").tobytes(), layer=0, max_hits=100, **named)
        *_, answer = caller.stub.Search(request, timeout=20)
        return {hit.tenant for hit in answer.hits}, answer.progress.num_captures, list(answer.unknown_capture_ids)

    assert search(bob, capture_ids=["a"]) == (set(), 0, ["a"])
    writer.write(tenant="alice")
    assert search(bob) == (set(), 0, [])
    assert search(bob, capture_ids=["a"]) == (set(), 0, ["a"])
    assert search(alice) == search(alice, capture_ids=["a"]) == ({"alice"}, 1, [])
    assert search(admin) == search(admin, tenant="alice") == ({"alice"}, 1, [])
    assert search(admin, tenant="bob") == (set(), 0, [])
    for tenant in ("alice", "", "nobody"):
        with failing_with(DENIED):
            search(bob, tenant=tenant)


def test_an_id_with_another_tenants_name_in_it_is_unknown(writer, bob):
    writer.write(tenant="alice")
    for name in ("alice/a", "alice\0a", "../alice/a"):
        with failing_with(UNKNOWN):
            bob.get(name)


def test_lists_have_only_the_callers_captures(writer, alice, bob, admin):
    for number in range(5):
        writer.open(f"c{number}", "alice")
        writer.open(f"c{number}", "bob")
    writer.open("of-nobody")
    assert alice.list(size=2) == [("alice", f"c{number}") for number in range(4, -1, -1)]
    assert bob.list(tenant="bob", size=3) == [("bob", f"c{number}") for number in range(4, -1, -1)]
    for tenant in ("alice", "", "nobody"):
        with failing_with(DENIED):
            bob.list(tenant=tenant)
    assert len(admin.list(size=3)) == 11
    assert admin.list(tenant="") == [("", "of-nobody")]
    assert admin.list(tenant="nobody") == []


def test_a_page_token_belongs_to_its_tenant(writer, alice, bob, admin):
    for number in range(3):
        writer.open(f"c{number}", "alice")
        writer.open(f"c{number}", "bob")
    first = store_pb2.ListCapturesRequest(page_size=1)
    token = alice.stub.ListCaptures(first).next_page_token
    for caller in (bob, admin):
        with failing_with(Reason.ERROR_REASON_INVALID_FIELD):
            caller.stub.ListCaptures(store_pb2.ListCapturesRequest(page_token=token))


def test_page_tokens_do_not_reveal_the_number_of_captures(call, writer, alice):
    """Internal numbers ascend over all tenants, so alice's page tokens must not reveal them."""
    raw = []
    for _ in range(2):
        writer.open(f"x{len(raw)}", "alice")
        writer.open(f"y{len(raw)}", "alice")
        page = alice.stub.ListCaptures(store_pb2.ListCapturesRequest(page_size=1))
        raw.append(page.next_page_token)
        for number in range(3):
            writer.open(f"b{len(raw)}-{number}", "bob")
    assert all(a[:6] != b[:6] for a, b in pairwise(raw))  # high bytes of small numbers would be equal if visible


def test_an_admin_sees_and_may_do_everything(writer, admin):
    writer.write(tenant="alice")
    assert admin.get(tenant="alice").description.tenant == "alice"
    assert len(admin.read(tenant="alice")) == 3
    with failing_with(UNKNOWN):
        admin.get()  # the default tenant's
    assert admin.delete(tenant="alice") > 0


def test_an_admin_of_a_tenant_is_one_of_the_store(call, writer):
    carol = call("carol", "admin")
    carol.write()
    writer.write(tenant="alice")
    assert carol.get().description.tenant == "carol"  # a caller that names no tenant gets its own
    assert carol.list() == [("alice", "a"), ("carol", "a")]


def test_a_writer_of_one_tenant(call):
    writer, reader = call("alice", "write"), call("alice", "read")
    writer.write()
    writer.write("b", "alice")
    assert reader.list() == [("alice", "b"), ("alice", "a")]
    with failing_with(DENIED) as caught:
        writer.open("c", "bob")
    assert "may not act for the tenant 'bob'" in caught[0].message


def test_a_writer_cannot_read_and_a_reader_cannot_write(call, writer):
    reader = call("alice", "read")
    writer.write(tenant="alice")
    reads = (writer.list, writer.get, writer.read, writer.delete)
    for attempt in (*reads, reader.open, reader.append, reader.seal, reader.delete):
        with failing_with(DENIED):
            attempt()


@pytest.mark.parametrize("tenant", ["*", "a/b", "-a", "a b", "x" * 129])
def test_bad_names_of_tenants(writer, tenant):
    with failing_with(Reason.ERROR_REASON_INVALID_FIELD):
        writer.open(tenant=tenant)


def test_figures(call, writer, alice, bob, admin):
    writer.write(tenant="alice")
    writer.open("b", tenant="alice")
    writer.write(tenant="bob")
    writer.open("c", tenant="bob")
    bob.delete("a")
    stats = alice.stats()
    assert {item.state: item.count for item in stats.captures} == {1: 1, 2: 1}
    assert stats.num_bytes == alice.get().num_bytes > 0
    assert stats.tenant.tenant == "alice"
    assert not stats.tenant.HasField("max_bytes")
    told = {field.name for field, _ in stats.ListFields()}
    assert told == {"captures", "num_bytes", "tenant", "own_tenant", "start_time", "server_version", "server_time"}
    assert stats.own_tenant == "alice"
    assert bob.stats().num_bytes == 0
    whole = admin.stats()
    assert {item.state: item.count for item in whole.captures} == {1: 2, 2: 1}
    assert whole.num_bytes == alice.get().num_bytes
    assert whole.commits > 0
    assert not whole.HasField("tenant")
    for caller in (writer, call("alice", "generate")):  # any right is enough to see that the store answers
        assert {field.name for field, _ in caller.stats().ListFields()} == told - {"captures", "num_bytes"}


@contextmanager
def anonymous(path, **settings):
    store = Store(StoreSettings(listen="127.0.0.1:0", path=path, grace_seconds=1, **settings))
    caller = Caller(f"127.0.0.1:{store.port}", "")
    try:
        yield caller
    finally:
        caller.channel.close()
        store.stop()


def test_captures_without_authentication_belong_to_the_default_tenant(tmp_path, tokens):
    """Captures without authentication belong to the default tenant, which tokens may name. Names survive restarts."""
    with anonymous(tmp_path / "db") as caller:
        caller.write("old")
        caller.open("live")
        assert caller.list() == [("", "live"), ("", "old")]
    store = Store(StoreSettings(listen="127.0.0.1:0", path=tmp_path / "db", grace_seconds=1, tokens=tokens.path))
    endpoint = f"127.0.0.1:{store.port}"
    everybody = Caller(endpoint, tokens.add("", "read", "write"))
    alice = Caller(endpoint, tokens.add("alice", "read", "write"))
    assert everybody.get("old").state == capture_pb2.CAPTURE_STATE_COMPLETE
    with failing_with(UNKNOWN):
        alice.get("old")
    alice.open("live")
    alice.write("old")
    everybody.append("live")
    everybody.seal("live")
    for caller in (everybody, alice):
        caller.channel.close()
    store.stop()
    with anonymous(tmp_path / "db") as caller:
        assert set(caller.list()) == {("alice", "old"), ("alice", "live"), ("", "old"), ("", "live")}
        assert caller.get("live").state == capture_pb2.CAPTURE_STATE_COMPLETE
        assert caller.get("live", tenant="alice").state == capture_pb2.CAPTURE_STATE_OPEN


def test_without_tokens_no_authentication_is_required(tmp_path):
    with anonymous(tmp_path / "db") as caller:
        caller.write(tenant="alice")
        caller.write()
        assert caller.list() == [("", "a"), ("alice", "a")]
        assert caller.list(tenant="alice") == [("alice", "a")]
        assert caller.get(tenant="alice").description.tenant == "alice"
        assert caller.stats().commits
        with pytest.raises(grpc.RpcError) as raised:
            caller.get("b")
        assert failure_from_rpc_error(raised.value).reason == UNKNOWN
