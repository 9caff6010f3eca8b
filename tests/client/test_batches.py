"""`generate_many`: many prompts in one call."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
from peer import HIDDEN

import residuum
from residuum.v1 import capture_pb2


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


@pytest.mark.parametrize(
    ("names", "error", "told"),
    [
        (["x"], residuum.InvalidRequest, "2 prompts and 1 request_ids"),
        (["x", "x"], residuum.InvalidRequest, "'x' more than once"),
        (["x", "a/b"], residuum.BatchFailed, "'a/b' cannot name a request"),
        ("xy", TypeError, "a list with an id for each prompt"),
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
