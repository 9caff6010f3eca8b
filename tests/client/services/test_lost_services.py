"""Lists and reads while the inference service is gone, and lists while the store is away."""

from __future__ import annotations

import threading
import uuid
from functools import partial
from types import SimpleNamespace

import pytest

import residuum
from tests.client.support.peer import RunningPeer

LAYER = residuum.Capture(layers=[1])


@pytest.fixture
def dying(store):
    """An inference service that a test may stop."""
    running = RunningPeer(store.endpoint)
    yield running
    running.stop()


async def made(client):
    """Generate one capture, and return its ID."""
    reply = await client.generate("a bb", capture=LAYER, request_id=f"lost-{uuid.uuid4().hex}", max_tokens=2)
    return reply.request_id


async def test_a_list_needs_no_inference_service_if_the_stores_are_known(make, dying):
    client = make(dying.endpoint, timeout=30)
    name = await made(client)
    assert [item.capture_id for item in await client.captures(prefix=name)] == [name]
    dying.stop()
    assert [item.capture_id for item in await client.captures(prefix=name)] == [name]
    assert (await client.rows(prefix=name, layer=1)).captures == (name,)
    assert len(await client.stats()) == 1


async def test_a_client_that_only_generated_knows_the_stores_of_its_captures(make, dying):
    """It never asked for the list of stores, so there may be others. The warning says so."""
    client = make(dying.endpoint, timeout=30)
    name = await made(client)
    dying.stop()
    assert (await client.activations(name)).manifest.is_complete
    for call in (client.captures, partial(client.rows, layer=1), client.delete):
        with pytest.warns(residuum.SilentStoreWarning, match="list of stores is unknown") as caught:
            await call(prefix=name)
        assert {item.filename.rpartition("/")[2] for item in caught} == {"conftest.py"}  # the caller, not the client


async def test_a_timeout_too_short_to_find_out_says_that_nothing_may_run_there(make):
    with pytest.raises(residuum.DeadlineExceeded, match=r"If no service runs there.*`residuum doctor`"):
        await make("127.0.0.1:1", timeout=0.05).info()


async def test_without_any_known_store_the_error_says_how_to_read_from_one(make):
    client = make("127.0.0.1:1", timeout=1)
    with pytest.raises(
        (residuum.Unreachable, residuum.DeadlineExceeded),
        match=r"from the store alone, name it: Client\(\.\.\., store='host:port'",
    ):
        await client.captures()


def test_the_command_line_says_how_to_read_from_a_store(cli, store, endpoint):
    code, _, err = cli("ls", at="127.0.0.1:1")
    assert code == 1
    assert "To read captures from the store alone, name it: --store HOST:PORT" in err
    code, _, _ = cli("ls", "--store", store.endpoint, "--prefix", "lost-", at="127.0.0.1:1")
    assert code == 0


@pytest.fixture
def outage(flaky, monkeypatch):
    """The first 10 lists fail, or as many as a test says: more than gRPC itself repeats.

    `lists` counts all of them, and `during` is called for each failure.
    """
    import grpc

    from tests.client.support.flaky_store import FlakyStore

    service, made = FlakyStore.service, SimpleNamespace(lists=0, failures=10, during=lambda: None)

    def fail(self, details):
        if not details.method.endswith("ListCaptures"):
            return service(self, details)
        made.lists += 1
        if made.lists > made.failures:
            return service(self, details)
        made.during()
        return grpc.unary_unary_rpc_method_handler(
            lambda _, context: context.abort(grpc.StatusCode.UNAVAILABLE, "as the test says")
        )

    monkeypatch.setattr(FlakyStore, "service", fail)
    return made


async def test_the_list_of_rows_waits_for_the_store(make, endpoint, flaky, outage):
    client = make(endpoint, store=flaky.endpoint, timeout=30)
    name = await made(client)
    found = await client.rows(prefix=name, layer=1, timeout=60)
    assert found.captures == (name,)
    assert outage.lists == outage.failures + 1


def test_a_dataset_without_time_does_not_wait_for_an_open_capture(endpoint, peer):
    pytest.importorskip("torch")
    from residuum.torch import ActivationDataset

    peer.script.delay_seal = threading.Event()
    ends = threading.Timer(20, peer.script.delay_seal.set)  # a dataset that waits would then have the capture
    ends.start()
    name = f"open-{uuid.uuid4().hex}"
    with residuum.Client(endpoint) as client:
        client.generate("a bb", capture=LAYER, request_id=name, max_tokens=2)
    try:
        # The store may answer at once, or too late for a timeout of 0.
        with pytest.raises((residuum.CaptureNotComplete, residuum.DeadlineExceeded, residuum.Unreachable)):
            ActivationDataset(endpoint, prefix=name, timeout=0, allow_partial=True)
        assert ends.is_alive()
    finally:
        ends.cancel()
        peer.script.delay_seal.set()


async def test_the_list_of_rows_gives_up_after_the_timeout(make, endpoint, flaky, outage, clock):
    def pass_time():
        clock.seconds += 10

    outage.failures, outage.during = 1000, pass_time
    client = make(endpoint, store=flaky.endpoint, timeout=1000)
    with pytest.raises(residuum.Unreachable, match=r"does not answer.*tried again for [1-9][0-9]\.0 s"):
        await client.rows(prefix="lost-", layer=1, timeout=100)
    assert outage.lists >= 10


def test_a_dataset_waits_for_the_store(endpoint, flaky, outage):
    pytest.importorskip("torch")
    from residuum.torch import ActivationDataset

    with residuum.Client(endpoint) as client:
        name = f"lost-{uuid.uuid4().hex}"
        client.generate("a bb", capture=LAYER, request_id=name, max_tokens=2)
        client.manifest(name, wait=True)
    data = ActivationDataset(endpoint, prefix=name, store=flaky.endpoint)
    assert data.captures == (name,)
    assert outage.lists == outage.failures + 1
