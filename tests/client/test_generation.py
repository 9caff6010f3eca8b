"""Prompts, replies, streams, registrations and vectors, with both clients."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest
from peer import HIDDEN, LAYERS
from running_store import RunningStore

import residuum
from residuum.rpc.errors import Failure, Reason


def vector(seed=0):
    return residuum.Vector.from_array(np.random.default_rng(seed).normal(size=HIDDEN))


async def test_reply(client):
    reply = await client.generate("a bb ccc", max_tokens=3)
    assert reply.text == " 4 5 6"
    assert str(reply) == reply.text
    assert reply.token_ids == (4, 5, 6)
    assert reply.prompt_token_ids == (1, 2, 3)
    assert reply.finish_reason == "length"
    assert reply.usage == residuum.Usage(prompt_tokens=3, generated_tokens=3)
    assert not reply.captured
    assert reply.request_id


async def test_several_sequences(client):
    reply = await client.generate("a", max_tokens=2, n=3)
    assert [sequence.token_ids for sequence in reply.sequences] == [(2, 3), (102, 103), (202, 203)]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("a bb", (1, 2)),
        ([7, 9], (7, 9)),
        (np.array([7, 9]), (7, 9)),
        ([{"role": "system", "content": "four"}, {"role": "user", "content": "fives"}], (4, 5)),
    ],
)
async def test_prompt_forms(client, prompt, tokens):
    assert (await client.generate(prompt, max_tokens=1)).prompt_token_ids == tokens


@pytest.mark.parametrize("prompt", ["", []])
async def test_empty_prompt(client, prompt, peer):
    with pytest.raises(residuum.EmptyPrompt):
        await client.generate(prompt)
    assert peer.calls == []


@pytest.mark.parametrize("prompt", [["a", "b"], [1, "b"], [True], [1.5], [[1]]])
async def test_prompt_of_the_wrong_kind(client, prompt):
    with pytest.raises(TypeError, match="A prompt is"):
        await client.generate(prompt)


@pytest.mark.parametrize("prompt", [[-1], [1 << 32], [{"role": "user"}], [{"role": "user", "content": 3}]])
async def test_prompt_with_a_bad_part(client, prompt):
    with pytest.raises(residuum.InvalidRequest):
        await client.generate(prompt)


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 0},
        {"max_tokens": -3},
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"seed": -1},
        {"n": 0},
        {"n": 65},
        {"stop": ""},
        {"stop": ["x"] * 17},
        {"min_tokens": 5, "max_tokens": 4},
        {"min_tokens": 17},
    ],
)
async def test_sampling_out_of_range(client, sampling, peer):
    with pytest.raises(residuum.InvalidRequest) as caught:
        await client.generate("a", **sampling)
    assert caught.value.metadata["field"] in sampling
    assert peer.calls == []


@pytest.mark.parametrize("sampling", [{"max_token": 3}, {"max_tokens": 1.5}, {"max_tokens": True}, {"top_p": "1"}])
async def test_sampling_of_the_wrong_kind(client, sampling):
    with pytest.raises(TypeError):
        await client.generate("a", **sampling)


async def test_sampling_arrives(client, peer):
    sampling = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": "x", "min_tokens": 2}
    await client.generate("a", ignore_eos=True, n=2, **sampling)
    sent = peer.requests[-1].sampling
    assert (sent.max_tokens, sent.top_k, sent.seed, list(sent.stop), sent.min_tokens) == (4, 5, 7, ["x"], 2)
    assert (sent.ignore_eos, sent.num_sequences, sent.temperature) == (True, 2, 0.5)


async def test_unset_sampling_stays_unset(client, peer):
    await client.generate("a")
    assert not peer.requests[-1].HasField("sampling")


# -------------------------------------------------------------------------------------------------------------- vectors


async def test_a_vector_travels_once(client, peer):
    given = vector(1)
    first, second = await client.put_vectors([given, given]), await client.put_vectors(given)
    assert (first.sent, first.bytes_sent) == (1, 4 * HIDDEN)
    assert first.digests == (given.hexdigest,) * 2
    assert (second.sent, second.bytes_sent) == (0, 0)
    assert peer.vectors_received == 1


async def test_another_client_sends_nothing_either(client, make, endpoint, peer):
    await client.put_vectors([vector(2)])
    assert (await make(endpoint).put_vectors([vector(2)])).sent == 0
    assert peer.vectors_received == 1
    assert await client.find_missing_vectors([vector(2), vector(3)]) == [vector(3)]


async def test_steering_sends_what_is_missing(client, peer):
    steer = [residuum.Add(vector(4), layer=1, scale=2.0), residuum.Ablate(vector(4), layers="all")]
    await client.generate("a", max_tokens=1, steer=steer)
    await client.generate("a", max_tokens=1, steer=steer)
    assert peer.calls == ["FindMissingVectors", "PutVectors", "Generate", "Generate"]
    assert len(peer.requests[-1].spec.steering.operations) == 2


async def test_vectors_that_the_server_dropped_are_sent_again(client, peer):
    await client.put_vectors([vector(5)])
    peer.script.drop_vectors = True
    reply = await client.generate("a", max_tokens=1, steer=residuum.Add(vector(5), layer=1))
    assert reply.text == " 2"
    assert peer.vectors_received == 2


async def test_vectors_that_stay_missing_are_an_error(client, peer):
    peer.script.failures = [
        None,
        None,
        Failure(Reason.ERROR_REASON_MISSING_VECTORS, "Send them.", digests="aa,bb"),
        None,
        Failure(Reason.ERROR_REASON_MISSING_VECTORS, "Send them.", digests="aa,bb"),
    ]
    with pytest.raises(residuum.MissingVectors) as caught:
        await client.generate("a", steer=residuum.Add(vector(6), layer=1))
    assert caught.value.digests == ("aa", "bb")


async def test_a_vector_of_the_wrong_length(client):
    wrong = residuum.Vector.from_array(np.ones(HIDDEN + 1))
    with pytest.raises(residuum.BadVector, match="9 elements") as caught:
        await client.put_vectors([vector(7), wrong])
    assert caught.value.digest == wrong.hexdigest
    assert caught.value.reason == "WRONG_LENGTH"
    assert isinstance(caught.value, ValueError)
    assert (await client.put_vectors([vector(7)])).sent == 0  # the good one was kept


async def test_what_is_no_vector(client):
    with pytest.raises(TypeError, match="from_array"):
        await client.put_vectors([np.ones(HIDDEN)])


# -------------------------------------------------------------------------------------------------------- registrations


async def test_register_then_generate(client, peer):
    registration = await client.register(
        request_id=f"reg-{id(client)}", capture=residuum.Capture(), steer=residuum.Add(vector(8), layer=0)
    )
    assert registration.request_id == f"reg-{id(client)}"
    assert registration.time_to_live == 600
    assert registration.expire_time.year == 2033
    assert peer.vectors_received == 1
    reply = await client.generate("a bb", registration=registration, max_tokens=2)
    assert reply.request_id == registration.request_id
    assert reply.captured
    assert (await client.activations(reply.request_id)).layers == tuple(range(LAYERS))


async def test_register_again_is_harmless_but_another_spec_is_not(client):
    name = f"again-{id(client)}"
    capture = residuum.Capture(layers=[0])
    assert (await client.register(request_id=name, capture=capture)).request_id == name
    assert (await client.register(request_id=name, capture=capture)).request_id == name
    with pytest.raises(residuum.RequestExists) as caught:
        await client.register(request_id=name, capture=residuum.Capture(layers=[1]))
    assert caught.value.request_id == name
    assert isinstance(caught.value, residuum.AlreadyExists)


async def test_a_registration_by_name(client):
    registration = await client.register()
    assert (await client.generate("a", registration=registration.request_id)).request_id == registration.request_id


async def test_an_unknown_registration(client):
    with pytest.raises(residuum.UnknownRequest) as caught:
        await client.generate("a", registration="never-was")
    assert isinstance(caught.value, LookupError)


async def test_a_registration_brings_its_own_spec(client):
    registration = await client.register()
    with pytest.raises(residuum.InvalidRequest, match="register"):
        await client.generate("a", registration=registration, capture=residuum.Capture())


async def test_registered_vectors_that_were_dropped_are_sent_again(client, peer):
    registration = await client.register(steer=residuum.Add(vector(9), layer=0))
    peer.script.drop_vectors = True
    await client.generate("a", registration=registration)
    assert peer.vectors_received == 2


# ------------------------------------------------------------------------------------------------------ the server's no


async def test_a_layer_that_the_model_lacks(client):
    with pytest.raises(residuum.UnknownLayer) as caught:
        await client.generate("a", capture=residuum.Capture(layers=[LAYERS]))
    assert caught.value.metadata == {"layer": str(LAYERS), "layers": str(LAYERS)}


async def test_another_model(client):
    with pytest.raises(residuum.UnknownModel):
        await client.generate("a", model="gpt-17")
    with pytest.raises(residuum.UnknownModel):
        await client.register(model="gpt-17")


async def test_an_id_that_was_used(client):
    name = f"used-{id(client)}"
    await client.generate("a", max_tokens=1, request_id=name)
    with pytest.raises(residuum.RequestExists):
        await client.generate("a", max_tokens=1, request_id=name)


async def test_a_prompt_that_is_too_long(client):
    with pytest.raises(residuum.PromptTooLong):
        await client.generate([1] * 5000)


async def test_a_message_over_the_limit(client):
    with pytest.raises(residuum.ResourceExhausted):
        await client.generate("a" * (5 << 20))


@pytest.mark.parametrize("name", ["", ".x", "-x", "a/b", "x" * 129, "ü"])
async def test_bad_request_ids(client, name):
    if name:
        with pytest.raises(residuum.InvalidRequest, match="cannot name a request"):
            await client.generate("a", request_id=name)
    with pytest.raises(residuum.InvalidRequest):
        await client.abort(name)


async def test_transport_is_hidden(client, peer):
    peer.script.failures = [Failure(Reason.ERROR_REASON_ENGINE_DEAD, "The engine has died.")]
    with pytest.raises(residuum.EngineDead) as caught:
        await client.generate("a")
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None


async def test_a_fault_of_the_server(client, peer):
    peer.script.failures = [RuntimeError("secret")]
    with pytest.raises(residuum.ServerFault, match="incident") as caught:
        await client.generate("a")
    assert "secret" not in str(caught.value)
    assert caught.value.metadata["incident"]


@pytest.mark.parametrize("flaw", ["bad_order", "truncate"])
async def test_a_server_that_breaks_the_contract(client, peer, flaw):
    setattr(peer.script, flaw, True)
    with pytest.raises(residuum.ServerFault):
        await client.generate("a", max_tokens=2)


# --------------------------------------------------------------------------------------------------- info, health, ends


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


async def test_store_of_its_own(make, store, endpoint, client):
    reply = await client.generate("a", max_tokens=2, capture=residuum.Capture())
    apart = make("127.0.0.1:1", store=store.endpoint)
    assert (await apart.activations(reply.request_id)).manifest.is_complete
    lost = make(endpoint, store="127.0.0.1:1", timeout=5)
    with pytest.raises(residuum.Unreachable, match=r"127\.0\.0\.1:1"):
        await lost.activations(reply.request_id)


async def test_no_store(client, peer):
    peer.script.store_endpoints = []
    with pytest.raises(residuum.NoStore, match="--store"):
        await client.activations("x")


async def test_a_capture_is_looked_for_in_several_stores(client, make, endpoint, peer, store, tmp_path):
    reply = await client.generate("a", max_tokens=2, capture=residuum.Capture())
    other = RunningStore(tmp_path)
    try:
        for stores in ([store.endpoint, other.endpoint], [other.endpoint, store.endpoint]):
            peer.script.store_endpoints = stores
            stranger = make(endpoint)  # it did not make the request, and so was not told where its capture is
            assert (await stranger.activations(reply.request_id)).manifest.is_complete
            assert reply.request_id in {summary.capture_id for summary in await stranger.captures()}
    finally:
        other.stop()


@pytest.mark.parametrize("bad", ["localhost", "http://localhost:50051", ":1", "host:port", "host:0", "host:99999"])
def test_bad_endpoints(kind, bad):
    with pytest.raises(residuum.InvalidRequest, match="host:port"):
        kind(bad)
    with pytest.raises(residuum.InvalidRequest, match="host:port"):
        kind("localhost:1", store=bad)


async def test_a_closed_client(make, endpoint):
    closed = make(endpoint)
    await closed.info()
    await closed.close()
    with pytest.raises(residuum.ClientClosed):
        await closed.info()


async def test_a_deadline(client, peer):
    peer.script.hold = threading.Event()
    with pytest.raises(residuum.DeadlineExceeded):
        await client.generate("a", max_tokens=3, timeout=0.3)
    assert peer.cancelled.wait(10)


# -------------------------------------------------------------------------------------------------------------- streams


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


def test_reading_on_after_closing(endpoint, peer):
    peer.script.hold = threading.Event()
    with residuum.Client(endpoint) as client:
        stream = client.stream("a", max_tokens=100)
        next(stream)
        stream.close()
        with pytest.raises(residuum.RequestAborted, match="closed"):
            list(stream)


async def test_abort(client, peer, endpoint):
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


async def test_abort_seen_by_an_async_stream(endpoint, peer):
    peer.script.hold = threading.Event()
    async with residuum.AsyncClient(endpoint) as client, client.stream("a", max_tokens=100) as stream:
        await client.abort(stream.request_id)
        peer.script.hold.set()
        with pytest.raises(residuum.RequestAborted) as caught:
            [delta async for delta in stream]
    assert caught.value.reason == "ABORTED"


# -------------------------------------------------------------------------------------------------------------- batches


async def test_many_come_back_in_order(client):
    prompts = ["a " * n for n in range(1, 30)]
    replies = await client.generate_many(prompts, max_tokens=2, max_concurrency=8, capture=residuum.Capture(layers=[0]))
    assert [len(reply.prompt_token_ids) for reply in replies] == list(range(1, 30))
    assert all(reply.captured for reply in replies)


async def test_one_bad_prompt_loses_no_other(client):
    with pytest.raises(residuum.BatchFailed, match="2 of 4 prompts failed; the first is number 1") as caught:
        await client.generate_many(["a", "", "bb", [1] * 5000], max_tokens=1)
    assert [reply and reply.text for reply in caught.value.replies] == [" 2", None, " 3", None]
    assert {index: type(error) for index, error in caught.value.errors.items()} == {
        1: residuum.EmptyPrompt,
        3: residuum.PromptTooLong,
    }


async def test_no_prompts(client):
    assert await client.generate_many([]) == []


async def test_a_batch_of_none_at_once(client):
    with pytest.raises(residuum.InvalidRequest, match="max_concurrency"):
        await client.generate_many(["a"], max_concurrency=0)


async def test_a_mistake_in_the_call_ends_the_batch(client):
    with pytest.raises(TypeError, match="max_token"):
        await client.generate_many(["a"] * 50, max_token=1)


async def test_a_batch_steers_all(client, peer):
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
