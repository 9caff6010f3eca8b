"""Streams: their tokens, and their ends."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from functools import partial

import pytest

import residuum
from residuum._async import io


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


class Noted(list):
    """A prompt that notes when it is read, and when the event loop has had a turn since."""

    def __init__(self, name, notes):
        super().__init__([1] * 3000)
        self.name, self.notes = name, notes

    def __iter__(self):
        self.notes.append(("planned", self.name))
        asyncio.get_running_loop().call_soon(self.notes.append, ("turn", self.name))
        return super().__iter__()


@pytest.mark.parametrize("method", ["generate", "stream", "generate_many"])
async def test_the_first_request_may_leave_before_the_last_is_planned(endpoint, peer, method):
    notes = []
    prompts = [Noted(number, notes) for number in range(32)]
    async with residuum.AsyncClient(endpoint) as client:

        async def read(prompt):
            async with client.stream(prompt, max_tokens=1) as stream:
                return [delta async for delta in stream]

        if method == "generate_many":
            await client.generate_many(prompts, max_tokens=1, progress=False)
        else:
            start = read if method == "stream" else partial(client.generate, max_tokens=1)
            await asyncio.gather(*map(start, prompts))
    assert [number for note, number in notes if note == "planned"] == list(range(32))
    assert notes.index(("turn", 0)) < notes.index(("planned", 31))


@pytest.mark.parametrize(
    ("work_ms", "else_ms", "counts"),
    [
        pytest.param(0.1, 0.0, [6], id="little work is done in one turn"),
        pytest.param(0.6, 0.0, [2, 1, 3], id="more work leaves time for all else"),
        pytest.param(0.6, 50.0, [2, 4], id="long turns have room for many tasks"),
    ],
)
async def test_tasks_share_the_turns_of_the_event_loop(monkeypatch, work_ms, else_ms, counts):
    turns, loop, taken, clock = io.Turns(), asyncio.get_running_loop(), [0], [0.0]
    monkeypatch.setattr(loop, "time", lambda: clock[0])

    async def all_else():
        while sum(taken) < 6:
            await asyncio.sleep(0)
            taken.append(0)
            clock[0] += else_ms / 1000

    async def take():
        async with turns:
            taken[-1] += 1
            clock[0] += work_ms / 1000

    await asyncio.gather(all_else(), *(take() for _ in range(6)))
    assert [count for count in taken if count] == counts


async def test_cancelled_tasks_leave_their_turns_to_others(monkeypatch):
    turns, taken, clock = io.Turns(), [], [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock[0])

    async def take(number):
        async with turns:
            taken.append(number)
            clock[0] += 0.01

    for _ in range(2):  # once more: nothing of the first time is left
        tasks = [asyncio.ensure_future(take(number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        clock[0] += 1
    assert taken == [0, 2, 0, 2]


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


async def test_closing_a_stream_stops_a_request_that_is_being_accepted(endpoint, peer, monkeypatch):
    arrived, ended = threading.Event(), threading.Event()

    def never_accept(request, context):
        context.add_callback(ended.set)
        arrived.set()
        ended.wait(30)
        yield from ()

    monkeypatch.setattr(peer, "_generate", never_accept)
    async with residuum.AsyncClient(endpoint) as client:
        stream = client.stream("a", max_tokens=100)
        reader = asyncio.ensure_future(stream.__anext__())
        assert await asyncio.to_thread(arrived.wait, 10)
        await stream.aclose()
        assert await asyncio.to_thread(ended.wait, 10)
        with pytest.raises(residuum.RequestAborted, match="closed"):
            await reader


async def test_a_stream_that_was_closed_first_starts_no_request(endpoint, peer):
    async with residuum.AsyncClient(endpoint) as client:
        stream = client.stream("a", max_tokens=1)
        await stream.aclose()
        with pytest.raises(residuum.RequestAborted, match="closed"):
            await stream.open()
    assert peer.calls == []


async def stream_many(client):
    return [reply async for reply in client.generate_as_completed([[1]], max_tokens=100, progress=False)]


@pytest.mark.parametrize("token", ["", "a-token"])  # with a token, gRPC makes calls of another type
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(lambda client: client.generate("a", max_tokens=100), id="generate"),
        pytest.param(stream_many, id="generate_as_completed"),
    ],
)
async def test_closing_the_client_stops_requests(endpoint, peer, start, token):
    peer.script.hold = threading.Event()
    client = residuum.AsyncClient(endpoint, token=token)
    task = asyncio.ensure_future(start(client))
    assert await asyncio.to_thread(peer.generating.wait, 10)
    await client.close()
    with pytest.raises((residuum.RequestAborted, residuum.BatchFailed), match="closed before its end"):
        await asyncio.wait_for(task, 10)
    assert await asyncio.to_thread(peer.cancelled.wait, 10)


@pytest.mark.parametrize("token", ["", "a-token"])
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(lambda client, name: client.activations(name), id="a read"),
        pytest.param(lambda client, name: client.manifest(name, wait=True), id="a call"),
    ],
)
async def test_closing_the_client_stops_what_waits_for_a_capture(endpoint, peer, start, token):
    peer.script.hold = threading.Event()
    capture = residuum.Capture(layers=[0])
    async with residuum.AsyncClient(endpoint) as other, other.stream("a", max_tokens=9, capture=capture) as stream:
        client = residuum.AsyncClient(endpoint, token=token)
        task = asyncio.ensure_future(start(client, stream.request_id))
        assert await asyncio.wait([task], timeout=0.5) == (set(), {task})
        await client.close()
        with pytest.raises((residuum.RequestAborted, residuum.ClientClosed), match="closed"):
            await asyncio.wait_for(task, 10)


async def test_a_task_cancelled_before_its_client_is_closed_stays_cancelled(endpoint, peer):
    peer.script.hold = threading.Event()
    client = residuum.AsyncClient(endpoint)
    task = asyncio.ensure_future(client.generate("a", max_tokens=100))
    assert await asyncio.to_thread(peer.generating.wait, 10)
    task.cancel()
    await client.close()
    if sys.version_info >= (3, 11):  # Python 3.10 does not know whether a task was cancelled
        with pytest.raises(asyncio.CancelledError):
            await task


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
