"""The services' descriptions and addresses, and errors if they are unreachable."""

from __future__ import annotations

import asyncio
import math
import threading

import numpy as np
import pytest

import residuum
from tests.client.support.peer import HIDDEN, LAYERS
from tests.client.support.running_store import RunningStore


async def test_info(client):
    info = await client.info()
    assert (info.model, info.num_layers, info.hidden_size, info.dtype) == ("peer", LAYERS, HIDDEN, "bfloat16")
    assert info.sites == ("resid_post", "resid_pre")
    assert info.limits["max_model_len"] == info.max_model_len == 4096


async def test_health(client, running_peer, store):
    health = await client.health()
    assert health.ok
    assert health.stores == {store.endpoint: "SERVING"}
    running_peer.health.set("", 2)
    try:
        assert not (await client.health()).ok
    finally:
        running_peer.health.set("", 1)


async def test_nothing_listens(make):
    lonely = make("127.0.0.1:1")
    with pytest.raises(residuum.Unreachable, match=r"127\.0\.0\.1:1") as caught:
        await lonely.generate("a")
    assert caught.value.endpoint == "127.0.0.1:1"
    assert isinstance(caught.value, ConnectionError)
    assert (await lonely.health()).inference == "UNREACHABLE"
    with pytest.raises(residuum.Unreachable):
        await lonely.info()


async def test_the_store_can_have_its_own_address(make, store, endpoint, client):
    reply = await client.generate("a", max_tokens=2, capture=residuum.Capture())
    apart = make("127.0.0.1:1", store=store.endpoint)
    assert (await apart.activations(reply.request_id)).manifest.is_complete
    lost = make(endpoint, store="127.0.0.1:1", timeout=1)
    with pytest.raises(residuum.Unreachable, match=r"127\.0\.0\.1:1"):
        await lost.activations(reply.request_id)


async def test_no_store(client, peer):
    peer.script.store_endpoints = []
    with pytest.raises(residuum.NoStore, match="--store"):
        await client.activations("x")


async def test_a_capture_is_searched_in_several_stores(client, make, endpoint, peer, store, tmp_path):
    reply = await client.generate("a", max_tokens=2, capture=residuum.Capture())
    other = RunningStore(tmp_path)
    try:
        for stores in ([store.endpoint, other.endpoint], [other.endpoint, store.endpoint]):
            peer.script.store_endpoints = stores
            stranger = make(endpoint)  # this client did not make the request, so it does not know the capture's store
            assert (await stranger.activations(reply.request_id)).manifest.is_complete
            assert reply.request_id in {summary.capture_id for summary in await stranger.captures()}
    finally:
        other.stop()


@pytest.mark.parametrize("bad", ["localhost", "http://localhost:50051", ":1", "host:port", "host:0", "host:99999"])
def test_invalid_endpoints_are_refused(kind, bad):
    with pytest.raises(residuum.InvalidRequest, match="host:port"):
        kind(bad)
    with pytest.raises(residuum.InvalidRequest, match="host:port"):
        kind("localhost:1", store=bad)


async def test_a_closed_client_cannot_be_used(make, endpoint):
    closed = make(endpoint)
    await closed.info()
    await closed.close()
    with pytest.raises(residuum.ClientClosed):
        await closed.info()


def test_a_client_of_another_event_loop_is_refused(endpoint, captured):
    client = residuum.AsyncClient(endpoint)
    asyncio.run(client.info())
    told = r"^This AsyncClient was used in another event loop before\..* create the client inside of the coroutine"

    async def read():
        return [summary async for summary in client.captures()]

    async def stream():
        async with client.stream("a") as tokens:
            return [token async for token in tokens]

    async def use():
        async with client:
            await client.health()

    calls = (
        client.info, read, stream, lambda: client.activations(captured), lambda: client.generate_many(["a", "b"]), use
    )  # fmt: skip
    for call in calls:
        with pytest.raises(RuntimeError, match=told):
            asyncio.run(call())
    with pytest.raises(residuum.ClientClosed):
        asyncio.run(client.info())


@pytest.mark.parametrize("seconds", [1e10, 1e300, float("inf")])
async def test_a_timeout_beyond_all_clocks_is_no_limit(make, endpoint, captured, seconds):
    client = make(endpoint, timeout=seconds)
    assert (await client.info()).num_layers
    assert (await client.generate("a", max_tokens=2, timeout=seconds)).token_ids
    assert (await client.activations(captured, timeout=seconds)).layers
    assert (await client.manifest(captured, wait=seconds)).state == "complete"


WRONG_TIMEOUTS = [
    ("5", TypeError, r"^timeout must be a number of seconds, or None for no limit, not '5'\.$"),
    (True, TypeError, "^timeout must be .* not True"),
    ([1], TypeError, "^timeout must be "),
    (math.nan, residuum.InvalidRequest, "^timeout must be .* not NaN"),
]


@pytest.mark.parametrize(("timeout", "error", "told"), WRONG_TIMEOUTS)
async def test_a_timeout_that_is_no_number_is_refused_by_name(
    client, peer, kind, endpoint, tmp_path, timeout, error, told
):
    with pytest.raises(error, match=told):
        kind(endpoint, timeout=timeout)
    steer = residuum.Add(residuum.Vector(np.ones(8)), layer=1)  # it would be sent first
    capture = residuum.Capture(layers=[1])
    for call in (
        client.generate("a", steer=steer, timeout=timeout),
        client.generate_many(["a"], timeout=timeout),
        client.activations("a", timeout=timeout),
        client.activations(["a", "b"], timeout=timeout),
        client.follow("a", timeout=timeout),
        client.rows(where="y = 1", layer=1, timeout=timeout),
        client.search(np.ones(8), layer=1, timeout=timeout),
        client.patch_sweep("a", "b", timeout=timeout),
        client.extract(["a"], tmp_path / "job", capture=capture, timeout=timeout),
    ):
        with pytest.raises(error, match=told):
            await call
    assert peer.calls == []


@pytest.mark.parametrize(("wait", "error"), [("5", TypeError), (None, TypeError), (math.nan, residuum.InvalidRequest)])
async def test_a_wait_that_is_no_number_is_refused_by_name(client, wait, error):
    with pytest.raises(error, match=r"^wait must be True, False or a number"):
        await client.manifest("a", wait=wait)


@pytest.mark.parametrize("seconds", [20, np.float32(20), np.int64(20)])
async def test_numbers_of_numpy_are_timeouts(make, endpoint, captured, seconds):
    client = make(endpoint, timeout=seconds)
    assert (await client.generate("a", max_tokens=2, timeout=seconds)).token_ids
    assert (await client.activations(captured, timeout=seconds)).layers
    assert (await client.manifest(captured, wait=seconds)).state == "complete"


async def test_a_timeout_ends_a_call(client, peer):
    for timeout in (0.3, 3, 30):  # on a busy machine, a call may not arrive within the shorter ones
        peer.script.hold = threading.Event()
        with pytest.raises(residuum.DeadlineExceeded):
            await client.generate("a", max_tokens=3, timeout=timeout)
        if peer.cancelled.wait(10):
            break
    assert peer.cancelled.is_set()
