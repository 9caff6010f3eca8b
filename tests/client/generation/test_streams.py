"""Streams: their tokens, and their ends."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

import residuum


def test_stream_sync(endpoint, peer):
    with residuum.Client(endpoint) as client:
        with client.stream("a bb", max_tokens=3, n=2) as stream:
            assert stream.request_id
            with pytest.raises(residuum.ResiduumError, match="no reply yet"):
                _ = stream.reply
            deltas = list(stream)
        assert [str(delta) for delta in deltas if delta.sequence == 0] == [" 3", " 4", " 5"]
        assert stream.reply.sequences[1].text == " 103 104 105"


async def test_stream_async(endpoint, peer):
    async with residuum.AsyncClient(endpoint) as client:
        stream = client.stream("a bb", max_tokens=3)
        for name in ("request_id", "started", "reply"):
            with pytest.raises(residuum.ResiduumError, match="Enter it first"):
                getattr(stream, name)
        deltas = [delta async for delta in stream]
        assert [delta.token_ids for delta in deltas] == [(3,), (4,), (5,)]
        assert stream.reply.text == " 3 4 5"


@pytest.mark.parametrize("how", ["leave", "close", "forget"])
def test_dropping_a_stream_stops_the_request_sync(endpoint, peer, how):
    peer.script.hold = threading.Event()
    with residuum.Client(endpoint) as client:
        stream = client.stream("a", max_tokens=100)
        next(stream)
        if how == "leave":
            with stream:
                pass
        elif how == "close":
            stream.close()
        else:
            del stream
            gc.collect()
        assert peer.cancelled.wait(10)


@pytest.mark.parametrize("how", ["leave", "close", "forget", "cancel"])
async def test_dropping_a_stream_stops_the_request_async(endpoint, peer, how):
    peer.script.hold = threading.Event()
    async with residuum.AsyncClient(endpoint) as client:
        if how == "cancel":
            task = asyncio.ensure_future(client.generate("a", max_tokens=100))
            await asyncio.to_thread(peer.generating.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream = client.stream("a", max_tokens=100)
            await stream.__anext__()
            if how == "leave":
                async with stream:
                    pass
            elif how == "close":
                await stream.aclose()
                with pytest.raises(residuum.RequestAborted, match="closed"):
                    await stream.__anext__()
            else:
                del stream
                gc.collect()
        assert await asyncio.to_thread(peer.cancelled.wait, 10)


def test_reading_a_closed_stream_raises(endpoint, peer):
    peer.script.hold = threading.Event()
    with residuum.Client(endpoint) as client:
        stream = client.stream("a", max_tokens=100)
        next(stream)
        stream.close()
        with pytest.raises(residuum.RequestAborted, match="closed"):
            list(stream)


async def test_abort_stops_the_request(client, peer, endpoint):
    peer.script.hold = threading.Event()
    with residuum.Client(endpoint) as other:
        stream = other.stream("a", max_tokens=100)
        await client.abort(stream.request_id)
        peer.script.hold.set()
        with pytest.raises(residuum.RequestAborted) as caught:
            list(stream)
    assert caught.value.reason == "ABORTED"
    assert caught.value.request_id == stream.request_id
    with pytest.raises(residuum.UnknownRequest):
        await client.abort("never-was")


async def test_an_async_stream_reports_an_abort(endpoint, peer):
    peer.script.hold = threading.Event()
    async with residuum.AsyncClient(endpoint) as client, client.stream("a", max_tokens=100) as stream:
        await client.abort(stream.request_id)
        peer.script.hold.set()
        with pytest.raises(residuum.RequestAborted) as caught:
            [delta async for delta in stream]
    assert caught.value.reason == "ABORTED"
