"""A tenant's token that may write keeps only its own tenant's captures open, and leaves leases to others."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest

from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, store_pb2
from store_svc.captures import leases as leases_module
from tests.security.callers import Caller
from tests.store.support import describe, failing_with

GONE = capture_pb2.INCOMPLETE_REASON_SERVICE_GONE
OPEN = capture_pb2.CAPTURE_STATE_OPEN
LEASE = 1.0


@pytest.fixture
def store_settings():
    """Return settings with short leases."""
    return {"lease_seconds": LEASE, "ending_timeout_seconds": 0.2}


def open_of(caller, name, tenant="", *, service):
    description = describe(name)
    description.tenant, description.service_instance = tenant, service
    caller.stub.OpenCapture(store_pb2.OpenCaptureRequest(description=description), timeout=20)


def renew(caller, service="s"):
    caller.stub.RenewLease(store_pb2.RenewLeaseRequest(service_instance=service), timeout=20)


@contextmanager
def renewing(caller, *, by_opens=False):
    """Renew the lease of the service all the time."""
    over = threading.Event()

    def run():
        for number in range(10_000):
            if over.wait(LEASE / 5):
                return
            if by_opens:
                open_of(caller, f"b{number}", service="s")
            else:
                renew(caller)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def wait_for_end(caller, name):
    request = store_pb2.GetCaptureRequest(capture_id=name)
    request.wait.FromSeconds(10)
    return caller.stub.GetCapture(request, timeout=20).manifest


@pytest.mark.parametrize("by_opens", [False, True])
def test_a_tenant_keeps_no_capture_of_another_open(call, by_opens):
    """The service of both tenants has died. Bob knows its name from the manifests of his captures."""
    service, alice, bob = call("*", "write"), call("alice", "read"), call("bob", "read", "write")
    open_of(service, "a", "alice", service="s")
    with renewing(bob, by_opens=by_opens):
        assert wait_for_end(alice, "a").incomplete_reason == GONE


def test_who_keeps_captures_open(call):
    """A service that acts for all tenants keeps those of all open, and a tenant's service its own."""
    service, bob = call("*", "write"), call("bob", "read", "write")
    open_of(service, "theirs", "bob", service="s")
    open_of(bob, "own", service="own")
    until = time.monotonic() + 3 * LEASE
    while time.monotonic() < until:
        renew(service)
        renew(bob, "own")
        time.sleep(LEASE / 5)
    assert [bob.get(name).state for name in ("theirs", "own")] == [OPEN, OPEN]
    assert wait_for_end(bob, "own").incomplete_reason == GONE


def test_a_tenant_cannot_take_all_leases(store, tokens, monkeypatch):
    monkeypatch.setattr(leases_module, "_MAX_LEASES", 4)
    with store(tokens=tokens.path, lease_seconds=60) as endpoint:
        alice, service = (Caller(endpoint, tokens.add(name, "write")) for name in ("alice", "*"))
        for name in "abc":
            renew(alice, name)  # there is no other tenant
        bob = Caller(endpoint, tokens.add("bob", "write"))
        with failing_with(Reason.ERROR_REASON_LIMIT_REACHED):
            renew(alice, "d")
        open_of(alice, "x", service="e")  # takes no lease, either
        renew(bob, "a")
        with failing_with(Reason.ERROR_REASON_LIMIT_REACHED):
            renew(service, "a")
        renew(alice, "a")  # it has this one
        for caller in (alice, service, bob):
            caller.channel.close()
