"""Captures of a dead inference service end when its lease has run out and no rows are in flight."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.tokens import ANY_TENANT
from store_svc.captures import leases as leases_module
from store_svc.captures.leases import Leases
from store_svc.captures.lifecycle import Wait
from store_svc.server import Store
from tests.store.support import (
    COMPLETE,
    INCOMPLETE,
    OPEN,
    Client,
    describe,
    failing_with,
    grid,
    make_chunk,
    message,
    rejections,
    serving,
    set_wait,
)
from tests.waiting import wait_for

GONE = capture_pb2.INCOMPLETE_REASON_SERVICE_GONE
LAYERS = [0, 1, 2]
LEASE, DRAIN = 0.6, 0.4


def open_of(client: Client, service: str, capture_id: str = "a") -> store_pb2.OpenCaptureResponse:
    description = describe(capture_id)
    description.service_instance = service
    return client.stub.OpenCapture(store_pb2.OpenCaptureRequest(description=description))


def renew(client: Client, service: str = "s") -> float:
    answer = client.stub.RenewLease(store_pb2.RenewLeaseRequest(service_instance=service))
    return answer.lease.ToNanoseconds() / 1e9


def store(folder: Path, **settings: float):
    return serving(folder / "store", **{"lease_seconds": LEASE, "ending_timeout_seconds": DRAIN, **settings})


def test_captures_of_a_dead_service_end_with_the_reason(tmp_path: Path) -> None:
    with store(tmp_path) as (_, client):
        lease = open_of(client, "s").lease
        assert lease.ToNanoseconds() / 1e9 == pytest.approx(LEASE)
        client.append([make_chunk(LAYERS, range(3))])
        start = time.monotonic()
        manifest = client.get(wait=30)
        assert time.monotonic() - start >= LEASE
        assert (manifest.state, manifest.incomplete_reason) == (INCOMPLETE, GONE)
        assert "the inference service was killed" in manifest.incomplete_detail
        assert client.read()[0] == grid(LAYERS, range(3)), "acknowledged rows stay"


def test_a_service_that_lives_keeps_its_captures_open(tmp_path: Path) -> None:
    with store(tmp_path) as (_, client):
        open_of(client, "lives")
        open_of(client, "dies", "b")
        until = time.monotonic() + 3 * (LEASE + DRAIN)
        while time.monotonic() < until:
            assert renew(client, "lives") == pytest.approx(LEASE)
            time.sleep(LEASE / 4)
        assert client.get("a").state == OPEN
        assert client.get("b", wait=30).incomplete_reason == GONE


def until_abandoned(store: Store) -> None:
    number = store._catalog.number_of(("", "a"))
    end = time.monotonic() + 30
    while not store._catalog.feed_of(number).capture.is_abandoned:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_rows_that_arrive_after_the_lease_has_run_out_are_waited_for(tmp_path: Path) -> None:
    """Shippers outlive their service for a while."""
    wait = 2.0
    with store(tmp_path, ending_timeout_seconds=60.0) as (running, client):
        open_of(client, "s")
        until_abandoned(running)
        time.sleep(wait / 4)
        start = time.monotonic()
        client.append([make_chunk(LAYERS, [0])])
        set_wait(running, Wait.REMNANTS, wait)
        assert client.get(wait=30).incomplete_reason == GONE
        assert time.monotonic() - start >= wait
        assert client.read()[0] == grid(LAYERS, [0])


def test_a_seal_that_comes_after_the_lease_has_run_out_counts(tmp_path: Path) -> None:
    with store(tmp_path, ending_timeout_seconds=30.0) as (running, client):
        open_of(client, "s")
        client.append([make_chunk(LAYERS, range(5))])
        until_abandoned(running)
        assert client.seal().state == COMPLETE


def test_a_service_that_was_out_of_reach_for_a_moment_keeps_its_captures(tmp_path: Path) -> None:
    with store(tmp_path, ending_timeout_seconds=60.0) as (running, client):
        open_of(client, "s")
        until_abandoned(running)
        leases = running._catalog.leases
        feed = running._catalog.feed_of(running._catalog.number_of(("", "a")))
        leases.seconds = 60.0
        renew(client)
        set_wait(running, Wait.REMNANTS, DRAIN)
        wait_for(lambda: not feed.capture.is_abandoned)
        assert client.get().state == OPEN
        leases.seconds = LEASE
        renew(client)
        set_wait(running, Wait.REMNANTS, DRAIN)  # the lease ends sooner than the writer knows
        assert client.get(wait=30).incomplete_reason == GONE, "its next absence is noticed"


def test_a_restart_of_the_store_restarts_the_leases(tmp_path: Path) -> None:
    with store(tmp_path) as (_, client):
        open_of(client, "s")
    time.sleep(LEASE)
    with store(tmp_path) as (_, client):
        assert client.get().state == OPEN
        assert client.get(wait=30).incomplete_reason == GONE


def test_a_service_without_leases_is_waited_for_as_before(tmp_path: Path) -> None:
    with store(tmp_path, lease_seconds=0.05, ending_timeout_seconds=0.05, open_timeout_seconds=1.0) as (_, client):
        assert not client.stub.OpenCapture(store_pb2.OpenCaptureRequest(description=describe())).HasField("lease")
        manifest = client.get(wait=30)
        assert manifest.incomplete_reason == capture_pb2.INCOMPLETE_REASON_TIMED_OUT


def test_a_capture_of_a_dead_service_can_be_replaced_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with store(tmp_path, ending_timeout_seconds=60.0) as (running, client):
        monkeypatch.setattr(running._catalog.leases, "_clock", clock)
        open_of(client, "dead")
        description = describe()
        description.service_instance, description.attempt = "new", 1
        request = store_pb2.OpenCaptureRequest(description=description, if_exists=capture_pb2.IF_EXISTS_REPLACE)
        with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS):
            client.stub.OpenCapture(request)
        clock.now += LEASE
        client.stub.OpenCapture(request)
        assert client.get().description.service_instance == "new"


def test_late_rows_of_a_capture_that_ended_are_refused(tmp_path: Path) -> None:
    with store(tmp_path) as (_, client):
        open_of(client, "s")
        assert client.get(wait=30).incomplete_reason == GONE
        answers = client.send([message(1, "a", make_chunk(LAYERS, [0]))])
        assert rejections(answers) == {1: Reason.ERROR_REASON_CAPTURE_ENDED}


def test_a_bad_id_is_refused(client: Client) -> None:
    with failing_with(Reason.ERROR_REASON_INVALID_FIELD):
        renew(client, "a/b")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_leases_lapse_in_the_order_of_their_last_renewal() -> None:
    clock = Clock()
    leases = Leases(10.0, clock)
    for name in "abc":
        leases.renew(name, ANY_TENANT)
        clock.now += 1
    leases.renew("a", ANY_TENANT)
    assert leases.next_end() == 111
    clock.now = 111.5
    assert leases.take_lapsed() == {"b"}
    assert [leases.is_held(name, "") for name in "abc"] == [True, False, True]
    clock.now = 113
    assert leases.take_lapsed() == {"c", "a"}
    assert leases.next_end() is None


def test_leases_restart_if_the_store_did_not_run() -> None:
    clock = Clock()
    leases = Leases(10.0, clock)
    leases.renew("a", ANY_TENANT)
    clock.now += 3600  # the machine was suspended
    assert leases.take_lapsed() == set()
    assert leases.is_held("a", "")
    clock.now += 10
    assert leases.take_lapsed() == {"a"}


def test_the_number_of_leases_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "_MAX_LEASES", 2)
    leases = Leases()
    assert [leases.renew(name, ANY_TENANT) for name in "aba c".replace(" ", "")] == [True, True, True, False]
