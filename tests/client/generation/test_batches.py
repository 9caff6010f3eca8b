"""`generate_many`: many prompts in one call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import sys
import threading
import time
import uuid

import numpy as np
import pytest

import residuum
from residuum._async import io
from residuum.transport.batches import BatchResults
from residuum.v1 import capture_pb2
from tests.client.support.peer import HIDDEN
from tests.waiting import wait_for


def vector(seed=0):
    return residuum.Vector.from_array(np.random.default_rng(seed).normal(size=HIDDEN))


async def test_a_batch_returns_replies_in_order(client):
    prompts = ["a " * n for n in range(1, 30)]
    replies = await client.generate_many(prompts, max_tokens=2, max_concurrency=8, capture=residuum.Capture(layers=[0]))
    assert [len(reply.prompt_token_ids) for reply in replies] == list(range(1, 30))
    assert all(reply.captured for reply in replies)


async def test_one_bad_prompt_does_not_affect_others(client):
    with pytest.raises(residuum.BatchFailed, match=r"2 of 4 prompts failed\. The first failed .* number 1") as caught:
        await client.generate_many(["a", "", "bb", [1] * 5000], max_tokens=1)
    assert [reply and reply.text for reply in caught.value.replies] == [" 2", None, " 3", None]
    assert {index: type(error) for index, error in caught.value.errors.items()} == {
        1: residuum.EmptyPrompt,
        3: residuum.PromptTooLong,
    }


async def test_half_of_a_character_fails_only_its_prompt(client):
    prompts = ["a", "b \ud800", [{"role": "user", "content": "\udfff"}], "bb"]
    with pytest.raises(residuum.BatchFailed, match=r"2 of 4 .* number 1: 'b .ud800' has half of a character") as caught:
        await client.generate_many(prompts, max_tokens=1)
    assert [reply and reply.text for reply in caught.value.replies] == [" 2", None, None, " 3"]
    with pytest.raises(residuum.InvalidRequest, match="half of a character"):
        await client.register(model="\ud800")


@pytest.mark.parametrize("wrong", [None, float("nan"), 5, b"b", {"role": "user", "content": "b"}])
async def test_a_prompt_that_is_none_is_named_before_the_first_call(client, peer, wrong):
    with pytest.raises(TypeError, match=r"but prompt 1 is "):
        await client.generate_many(["a", wrong], max_tokens=1)
    assert "Generate" not in peer.calls


async def test_an_empty_batch_has_no_replies(client):
    assert await client.generate_many([]) == []


async def test_a_batch_with_zero_concurrency_is_refused(client):
    with pytest.raises(residuum.InvalidRequest, match="max_concurrency"):
        await client.generate_many(["a"], max_concurrency=0)


async def test_invalid_arguments_end_the_batch(client):
    with pytest.raises(TypeError, match="max_token"):
        await client.generate_many(["a"] * 50, max_token=1)


async def test_a_batch_steers_all_requests(client, peer):
    steer = iter([residuum.Add(vector(10), layer=1)])
    await client.generate_many(["a", "b", "c"], max_tokens=1, steer=steer)
    generations = [item for item, name in zip(peer.requests, peer.calls, strict=True) if name == "Generate"]
    assert [len(item.spec.steering.operations) for item in generations] == [1, 1, 1]
    assert peer.vectors_received <= 3


async def test_each_prompt_has_its_own_capture_and_steering(client, peer):
    captures = [residuum.Capture(layers=[layer]) if layer else None for layer in range(4)]
    one, two = residuum.Add(vector(1), layer=1), residuum.Ablate(vector(2), layer=2)
    steer = [[one], None, [], (one, two)]
    replies = await client.generate_many(["a", "bb", "ccc", "dddd"], max_tokens=1, capture=captures, steer=iter(steer))
    sent = {
        request.text: request.spec
        for request, name in zip(peer.requests, peer.calls, strict=True)
        if name == "Generate"
    }
    assert [list(sent[text].capture.layers.list.layers) for text in ("a", "bb", "ccc", "dddd")] == [[], [1], [2], [3]]
    kinds = [[item.WhichOneof("operation") for item in sent[text].steering.operations] for text in sent]
    assert dict(zip(sent, kinds, strict=True)) == {"a": ["add"], "bb": [], "ccc": [], "dddd": ["add", "ablate"]}
    assert [reply.captured for reply in replies] == [False, True, True, True]


@pytest.mark.parametrize(
    ("arguments", "field", "told"),
    [
        ({"capture": [residuum.Capture()]}, "capture", "capture= has 1 items, but there are 2 prompts"),
        ({"steer": [None]}, "steer", "steer= has 1 items, but there are 2 prompts"),
        ({"steer": [[], None, []]}, "steer", "steer= has 3 items, but there are 2 prompts"),
    ],
)
async def test_captures_and_steering_must_be_as_many_as_prompts(client, peer, arguments, field, told):
    with pytest.raises(residuum.InvalidRequest, match=told) as caught:
        await client.generate_many(["a", "b"], **arguments)
    assert caught.value.metadata == {"field": field}
    assert peer.calls == []


@pytest.mark.parametrize(
    "arguments", [{"capture": 5}, {"capture": ["all", None]}, {"steer": [["x"], None]}, {"steer": 5}]
)
async def test_captures_and_steering_of_the_wrong_type_are_refused(client, peer, arguments):
    with pytest.raises(TypeError, match="takes"):
        await client.generate_many(["a", "b"], **arguments)
    assert peer.calls == []


def finish_all_but(peer, prompt):
    """Let the peer hold the generation of one prompt, until the returned event is set."""
    hold, deltas = threading.Event(), peer._deltas

    def wait(name, tokens, *arguments):
        if tokens[-1] == prompt:
            assert hold.wait(60)
        return deltas(name, tokens, *arguments)

    return hold, wait


def test_replies_come_as_they_complete_sync(endpoint, peer, monkeypatch):
    hold, wait = finish_all_but(peer, 1)
    monkeypatch.setattr(peer, "_deltas", wait)
    with residuum.Client(endpoint) as client:
        replies = client.generate_as_completed([[1], [2], [3], []], max_tokens=1)
        assert {index: reply.token_ids for index, reply in itertools.islice(replies, 2)} == {1: (3,), 2: (4,)}
        hold.set()
        assert next(replies)[0] == 0, "the slow reply is the last"
        with pytest.raises(residuum.BatchFailed, match="1 of 4 prompts failed") as caught:
            next(replies)
        assert [reply and reply.token_ids for reply in caught.value.replies] == [(2,), (3,), (4,), None]


async def test_replies_come_as_they_complete_async(endpoint, peer, monkeypatch):
    hold, wait = finish_all_but(peer, 1)
    monkeypatch.setattr(peer, "_deltas", wait)
    async with residuum.AsyncClient(endpoint) as client:
        replies = client.generate_as_completed([[1], [2], []], max_tokens=1)
        index, reply = await anext(replies)
        assert (index, reply.token_ids) == (1, (3,))
        hold.set()
        assert (await anext(replies))[0] == 0, "the slow reply is the last"
        with pytest.raises(residuum.BatchFailed, match="1 of 3 prompts failed"):
            await anext(replies)


async def test_a_cancelled_wait_for_a_reply_loses_no_reply_in_silence(endpoint, peer, monkeypatch):
    hold, wait = finish_all_but(peer, 1)
    monkeypatch.setattr(peer, "_deltas", wait)
    add = BatchResults.add
    async with residuum.AsyncClient(endpoint) as client:
        replies = client.generate_as_completed([[1], [2]], max_tokens=1)
        waiting = asyncio.ensure_future(anext(replies))
        monkeypatch.setattr(BatchResults, "add", lambda *arguments: (add(*arguments), waiting.cancel()))
        with pytest.raises(asyncio.CancelledError):  # just when a reply came
            await waiting
        index, reply = await anext(replies)
        assert (index, reply.token_ids) == (1, (3,))
        told = r"^1 of 2 .* The wait for a reply was cancelled.* asyncio\.wait "
        with pytest.raises(residuum.BatchFailed, match=told) as caught:
            await anext(replies)
        with pytest.raises(StopAsyncIteration):
            await anext(replies)
        hold.set()
    assert caught.value.replies == [None, reply]
    assert list(caught.value.errors) == [0]


async def test_a_cancelled_wait_for_a_reply_stops_the_prompts(endpoint, peer):
    peer.script.hold = threading.Event()
    async with residuum.AsyncClient(endpoint) as client:
        replies = client.generate_as_completed([[1], [2]], max_tokens=50)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(replies), 0.5)
        assert await asyncio.to_thread(peer.cancelled.wait, 30)
        with pytest.raises(residuum.BatchFailed, match="2 of 2 prompts failed"):
            await anext(replies)


async def test_as_completed_refuses_bad_arguments_at_once(endpoint, peer):
    async with residuum.AsyncClient(endpoint) as client:
        with pytest.raises(residuum.InvalidRequest, match="steer= has 1 items"):
            client.generate_as_completed(["a", "b"], steer=[None])


def test_dropping_the_replies_stops_the_rest_sync(endpoint, peer, monkeypatch):
    running, stopped, deltas = threading.Event(), threading.Event(), peer._deltas

    def stuck(name, tokens, *arguments):
        if tokens[-1] == 1:
            arguments[-1].add_callback(stopped.set)  # the call's context
            running.set()
            stopped.wait(60)
            return iter(())
        return deltas(name, tokens, *arguments)

    monkeypatch.setattr(peer, "_deltas", stuck)
    with residuum.Client(endpoint) as client:
        replies = client.generate_as_completed([[1], [2]], max_tokens=1)
        assert next(replies)[0] == 1
        assert running.wait(60)
        assert not stopped.is_set()
        replies.close()
        assert stopped.wait(30)


def test_an_interrupt_keeps_finished_replies_sync(endpoint, peer, monkeypatch):
    """Ctrl-C comes while one prompt still runs."""
    hold, wait = finish_all_but(peer, 1)
    monkeypatch.setattr(peer, "_deltas", wait)

    def interrupted(futures):
        yield from itertools.islice(concurrent.futures.as_completed(futures), 2)
        hold.set()
        raise KeyboardInterrupt

    monkeypatch.setattr("residuum._sync.batches.as_completed", interrupted)
    with residuum.Client(endpoint) as client, pytest.raises(residuum.BatchInterrupted) as caught:
        client.generate_many([[1], [2], [3]], max_tokens=50)
    assert isinstance(caught.value, KeyboardInterrupt)
    assert [reply and len(reply.token_ids) for reply in caught.value.replies[1:]] == [50, 50]
    assert "of 3 prompts were done" in str(caught.value)


def test_an_interrupt_does_not_wait_until_the_service_accepts_prompts_sync(endpoint, peer, monkeypatch):
    """A service accepts a request late if it waits for room for its vectors, or for its store."""
    accept, claim = threading.Event(), peer._claim
    monkeypatch.setattr(peer, "_claim", lambda request: accept.wait(60) and claim(request))

    def interrupted(futures):
        wait_for(lambda: peer.calls.count("Generate") == 2, "the service has both requests")
        raise KeyboardInterrupt

    monkeypatch.setattr("residuum._sync.batches.as_completed", interrupted)
    began = time.monotonic()
    with residuum.Client(endpoint) as client, pytest.raises(residuum.BatchInterrupted) as caught:
        client.generate_many([[1], [2]], max_tokens=2)
    assert time.monotonic() - began < 50
    assert (caught.value.replies, caught.value.errors) == ([None, None], {})
    accept.set()


async def test_a_cancelled_batch_keeps_finished_replies_async(endpoint, peer, monkeypatch):
    hold, wait = finish_all_but(peer, 1)
    monkeypatch.setattr(peer, "_deltas", wait)
    arrived, add = asyncio.Semaphore(0), BatchResults.add
    monkeypatch.setattr(BatchResults, "add", lambda *arguments: (add(*arguments), arrived.release())[0])
    async with residuum.AsyncClient(endpoint) as client:
        batch = asyncio.ensure_future(client.generate_many([[1], [2], [3]], max_tokens=2))
        for _ in range(2):
            await asyncio.wait_for(arrived.acquire(), 30)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await batch
        hold.set()
    assert batch.cancelled()
    stopped = caught.value.__cause__
    assert isinstance(stopped, residuum.BatchCancelled)
    assert [reply and reply.token_ids for reply in stopped.replies] == [None, (3, 4), (4, 5)]
    assert stopped.errors == {}
    assert "2 of 3 prompts were done" in str(stopped)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has neither")
class TestAsyncioEndsABatch:
    @pytest.fixture
    async def batch(self, endpoint, peer):
        peer.script.hold = threading.Event()
        async with residuum.AsyncClient(endpoint) as client:
            yield client.generate_many([[1], [2]], max_tokens=50, progress=False)

    async def test_in_its_timeout(self, batch):
        async def in_time():
            async with asyncio.timeout(0.1):
                await batch

        with pytest.raises(TimeoutError) as caught:
            await in_time()
        assert isinstance(caught.value.__cause__.__cause__, residuum.BatchCancelled)

    async def test_in_a_task_group_that_failed(self, batch):
        async def fail():
            raise ValueError("too bad")

        async def in_a_group():
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                await batch

        with pytest.raises(Exception, match="unhandled errors in a TaskGroup") as caught:
            await in_a_group()
        assert [str(error) for error in caught.value.exceptions] == ["too bad"]


async def test_a_prompt_that_something_else_cancels_fails_alone(endpoint, peer, monkeypatch):
    read, cancelled = io.read_event, iter([True])

    async def read_event(call):
        if next(cancelled, False):
            raise asyncio.CancelledError
        return await read(call)

    monkeypatch.setattr(io, "read_event", read_event)
    async with residuum.AsyncClient(endpoint) as client:
        with pytest.raises(residuum.BatchFailed) as caught:
            await asyncio.wait_for(client.generate_many([[1], [2]], max_tokens=1, max_concurrency=1), 10)
    assert [reply and reply.token_ids for reply in caught.value.replies] == [None, (3,)]
    assert type(caught.value.errors[0]) is residuum.RequestAborted


def test_many_threads_share_a_client(endpoint, peer):
    from concurrent.futures import ThreadPoolExecutor

    with residuum.Client(endpoint) as client, ThreadPoolExecutor(8) as pool:

        def one(number):
            reply = client.generate("a " * (number + 1), max_tokens=3, capture=residuum.Capture(layers=[2]))
            return client.activations(reply.request_id)[2].shape[0]

        assert list(pool.map(one, range(24))) == [number + 3 for number in range(24)]


@pytest.mark.parametrize(
    "prompts", ["abc", b"abc", 5, None, [1, 2, 3], np.array([1, 2]), {"role": "user"}, [{"role": "u", "content": "a"}]]
)
async def test_a_single_prompt_is_not_a_batch(client, peer, prompts):
    with pytest.raises(TypeError, match=r"generate_many\(\) takes a list of prompts.*\[prompt\]"):
        await client.generate_many(prompts)
    assert peer.calls == []


async def test_a_batch_is_not_updatable(client, peer):
    with pytest.raises(TypeError, match=r"takes no updatable.*stream\(updatable=True\)"):
        await client.generate_many(["a", "b"], updatable=True)
    assert peer.calls == []


async def test_a_batch_names_its_requests(client, peer):
    names = [f"{uuid.uuid4().hex}-{at}" for at in range(2)]
    replies = await client.generate_many(
        ["a", "b"], capture=residuum.Capture(), request_ids=iter(names), if_exists="skip"
    )
    assert [reply.request_id for reply in replies] == names
    sent = {
        item.spec.request_id: item.spec.if_exists for item in peer.requests if item.DESCRIPTOR.name == "GenerateRequest"
    }
    assert sent == dict.fromkeys(names, capture_pb2.IF_EXISTS_SKIP)


async def test_if_exists_is_not_sent_for_prompts_without_a_capture(client, peer):
    names = [uuid.uuid4().hex for _ in range(2)]
    captures = [residuum.Capture(layers=[1]), None]
    steer = [None, [residuum.Add(vector(), layer=0)]]
    replies = await client.generate_as_completed(
        ["a", "b"], capture=captures, steer=steer, request_ids=names, if_exists="skip", max_tokens=1
    )
    assert {index: (reply.request_id, reply.captured) for index, reply in replies} == {
        0: (names[0], True),
        1: (names[1], False),
    }
    sent = {
        item.spec.request_id: (item.spec.if_exists, len(item.spec.steering.operations))
        for item, name in zip(peer.requests, peer.calls, strict=True)
        if name == "Generate"
    }
    assert sent == {
        names[0]: (capture_pb2.IF_EXISTS_SKIP, 0),
        names[1]: (capture_pb2.IF_EXISTS_UNSPECIFIED, 1),
    }


@pytest.mark.parametrize(
    ("names", "error", "told"),
    [
        (["x"], residuum.InvalidRequest, "2 prompts but 1 request_ids"),
        (["x", "x"], residuum.InvalidRequest, "'x' more than once"),
        (["x", "a/b"], residuum.BatchFailed, "'a/b' is not a valid request ID"),
        ("xy", TypeError, "a list with an ID for each prompt"),
    ],
)
async def test_bad_names_of_a_batch_are_refused(client, names, error, told):
    with pytest.raises(error, match=told):
        await client.generate_many(["a", "b"], request_ids=names)


@pytest.mark.parametrize("name", ["request_id", "registration"])
async def test_arguments_of_a_single_request_are_refused_for_a_batch(client, peer, name):
    with pytest.raises(TypeError, match=rf"takes no {name}.*generate\({name}=\.\.\.\)"):
        await client.generate_many(["a", "b"], **{name: "x"})
    assert peer.calls == []


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"if_exists": "resume"}, residuum.InvalidRequest, "if_exists='resume' does not exist"),
        ({"if_exists": "skip"}, residuum.InvalidRequest, "needs request_id= and capture="),
        ({"top_p": 2}, residuum.InvalidRequest, "top_p"),
        ({"temprature": 0}, TypeError, "no sampling parameter 'temprature'"),
    ],
)
async def test_a_wrong_argument_of_all_prompts_is_refused_before_the_first_call(client, peer, arguments, error, told):
    with pytest.raises(error, match=told):
        await client.generate_many(["a"] * 100, **arguments)
    assert peer.calls == []


async def test_a_wrong_layer_of_all_prompts_ends_the_batch_at_once(client, peer):
    with pytest.raises(residuum.UnknownLayer, match="No layer 99"):
        await client.generate_many(["a"] * 500, capture=residuum.Capture(layers=[99]), max_concurrency=4)
    assert peer.calls.count("Generate") < 100
    with pytest.raises(residuum.UnknownLayer, match="No layer 99"):
        await client.generate_as_completed(["a", "b"], capture=residuum.Capture(layers=[99]))
    with pytest.raises(residuum.UnknownModel):
        await client.generate_many(["a", "b"], model="another")


async def test_a_wrong_layer_of_one_prompt_fails_only_that_prompt(client):
    captures = [residuum.Capture(layers=[layer]) for layer in (99, 1)]
    with pytest.raises(residuum.BatchFailed, match="1 of 2 prompts failed") as caught:
        await client.generate_many(["a", "b"], capture=captures, max_tokens=1)
    assert caught.value.replies[1].captured
