"""Interrupted or damaged reads are resumed or fail with the right error. They never return part of a capture."""

from __future__ import annotations

import asyncio
import threading
import uuid
from functools import partial

import grpc
import numpy as np
import pytest

import residuum
from residuum._async import captures
from residuum.protocol.deadlines import list_request
from residuum.rpc.errors import Failure, Reason
from tests.client.support.flaky_store import Unknown, parsed
from tests.client.support.peer import POST, rows


@pytest.fixture
async def capture_id(endpoint):
    with residuum.Client(endpoint) as client:
        reply = client.generate("a bb ccc", max_tokens=30, capture=residuum.Capture(layers=[0, 3]))
        assert client.manifest(reply.request_id, wait=True).is_complete
        return reply.request_id


@pytest.fixture
def reader(make, endpoint, flaky):
    return make(endpoint, store=flaky.endpoint, timeout=10)


def is_whole(acts):
    return acts.manifest.is_complete and np.array_equal(acts[3], rows(0, POST, 3, range(32)).astype(np.float32))


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, "stopping"])
async def test_an_interrupted_read_is_resumed(reader, flaky, capture_id, code):
    def change(number, messages):
        yield from messages[: 2 + number]
        if number < 4:
            raise Failure(Reason.ERROR_REASON_NOT_SERVING, "Stopping.") if code == "stopping" else Unknown(code)
        yield from messages[2 + number :]

    flaky.change = change
    assert is_whole(await reader.activations(capture_id))
    assert flaky.reads == 5


async def test_an_interrupted_follow_yields_each_row_once(reader, flaky, capture_id):
    def change(number, messages):
        yield from messages[:4]
        if number < 2:
            raise Unknown(grpc.StatusCode.UNAVAILABLE)
        yield from messages[4:]

    flaky.change = change
    pieces = await reader.follow(capture_id, layers=3)
    assert sorted(np.concatenate([piece.positions for piece in pieces]).tolist()) == list(range(32))


@pytest.fixture
def holding(flaky):
    """Makes the store hold the first read after so many of its messages; other reads are whole."""
    going_on = threading.Event()

    def hold(count):
        def change(number, messages):
            yield from messages[:count]
            if not number:
                going_on.wait(60)
            yield from messages[count:]

        flaky.change = change

    yield hold
    going_on.set()


@pytest.mark.filterwarnings("error::residuum.EmptyCaptureWarning")
@pytest.mark.parametrize("count", [0, 1, -1])
async def test_a_follow_goes_on_after_waits_that_were_cancelled(endpoint, flaky, capture_id, holding, count):
    holding(count)
    found, cancelled = [], 0
    async with residuum.AsyncClient(endpoint, store=flaky.endpoint) as client:
        pieces = client.follow(capture_id, layers=3)
        while True:
            try:
                found.append(await asyncio.wait_for(anext(pieces), 0.5))
            except asyncio.TimeoutError:
                cancelled += 1
            except StopAsyncIteration:
                break
    assert cancelled >= 1
    assert sorted(np.concatenate([piece.positions for piece in found]).tolist()) == list(range(32))


async def test_the_timeout_of_a_follow_counts_through_cancelled_waits(endpoint, flaky, capture_id, holding, clock):
    holding(0)
    async with residuum.AsyncClient(endpoint, store=flaky.endpoint) as client:
        pieces = client.follow(capture_id, timeout=60)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(pieces), 0.1)
        clock.seconds += 61
        with pytest.raises(residuum.DeadlineExceeded):
            await anext(pieces)
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)


async def test_a_follow_that_was_closed_does_not_begin_again(endpoint, flaky, capture_id, holding):
    holding(0)
    async with residuum.AsyncClient(endpoint, store=flaky.endpoint) as client:
        pieces = client.follow(capture_id)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(pieces), 0.1)
        await pieces.aclose()
        assert [piece async for piece in pieces] == []


@pytest.mark.parametrize("held", [0, 1, 2])
async def test_a_list_goes_on_after_waits_that_were_cancelled(endpoint, flaky, monkeypatch, held):
    prefix = f"list-{uuid.uuid4().hex}-"
    names = [f"{prefix}{number}" for number in range(5)]
    async with residuum.AsyncClient(endpoint) as client:
        for name in names:
            await client.generate("a", capture=residuum.Capture(layers=[0]), request_id=name, max_tokens=1)
    going_on, pages = threading.Event(), 0

    def hold(name):
        nonlocal pages
        if name == "ListCaptures":
            pages += 1
            if pages == held + 1:
                going_on.wait(60)

    flaky.before = hold
    monkeypatch.setattr(captures, "list_request", partial(list_request, page_size=2))
    found, cancelled = [], 0
    async with residuum.AsyncClient(endpoint, store=flaky.endpoint) as client:
        summaries = client.captures(prefix=prefix)
        while True:
            try:
                found.append((await asyncio.wait_for(anext(summaries), 0.5)).capture_id)
            except asyncio.TimeoutError:
                cancelled += 1
            except StopAsyncIteration:
                break
        going_on.set()
    assert cancelled >= 1
    assert found == names[::-1]


@pytest.mark.parametrize(("timeout", "reads", "tried"), [(None, 5, 120), (100.0, 4, 90)])
async def test_retries_end_if_the_store_stays_unreachable(
    make, endpoint, flaky, capture_id, clock, timeout, reads, tried
):
    """A client that has never reached the store gives up after its own timeout; a read with a timeout, after that.

    The first limit counts from the first failure, that of a read from its start.
    """

    def change(number, messages):
        clock.seconds += 30
        raise Unknown(grpc.StatusCode.UNAVAILABLE)

    flaky.change = change
    reader = make(endpoint, store=flaky.endpoint, timeout=100 if timeout is None else 1000, shared_memory=False)
    with pytest.raises(residuum.Unreachable, match=rf"{flaky.endpoint}.* tried again for {tried}\.0 s"):
        await reader.activations(capture_id, timeout=timeout)
    assert flaky.reads == reads


async def test_a_known_store_may_be_unreachable_for_longer_than_the_clients_timeout(
    make, endpoint, flaky, capture_id, clock
):
    def change(number, messages):
        if number < 4:
            clock.seconds += 30
            raise Unknown(grpc.StatusCode.UNAVAILABLE)
        yield from messages

    flaky.change = change
    reader = make(endpoint, store=flaky.endpoint, timeout=20)
    assert (await reader.manifest(capture_id)).is_complete
    assert is_whole(await reader.activations(capture_id))
    assert flaky.reads == 5


async def test_a_refused_certificate_is_not_tried_again(make, endpoint, flaky, capture_id):
    def change(number, messages):
        raise Unknown(grpc.StatusCode.UNAVAILABLE)

    flaky.change = change
    flaky.words = "CERTIFICATE_VERIFY_FAILED: self signed"
    with pytest.raises(residuum.Unreachable, match="has signed the certificate") as caught:
        await make(endpoint, store=flaky.endpoint).activations(capture_id)
    assert caught.value.is_refusal
    assert flaky.reads == 1


async def test_a_permanent_error_is_not_retried(reader, flaky, capture_id):
    def change(number, messages):
        yield messages[0]
        raise Failure(Reason.ERROR_REASON_CHECKSUM_MISMATCH, "The stored chunk is damaged.", capture_id=capture_id)

    flaky.change = change
    with pytest.raises(residuum.DamagedCapture):
        await reader.activations(capture_id)
    assert flaky.reads == 1


async def test_a_changed_byte_is_detected(reader, flaky, capture_id):
    def change(number, messages):
        for message in messages:
            yield message[:-1] + bytes([message[-1] ^ 1]) if parsed(message).HasField("chunk") else message

    flaky.change = change
    with pytest.raises(residuum.DamagedCapture, match="checksum"):
        await reader.activations(capture_id)


async def test_an_invalid_message_is_an_error(reader, flaky, capture_id):
    flaky.change = lambda number, messages: iter([messages[0], b"\xff\xff\xff"])
    with pytest.raises(residuum.DamagedCapture, match="damaged message"):
        await reader.activations(capture_id)


async def test_missing_rows_are_detected_even_if_the_manifest_denies_them(reader, flaky, capture_id):
    flaky.change = lambda number, messages: iter(messages[:2] + messages[3:])
    with pytest.raises(residuum.DamagedCapture, match="did not send all"):
        await reader.activations(capture_id)
    with pytest.raises(residuum.DamagedCapture, match="did not send all"):
        await reader.activations(capture_id, allow_partial=True)
    with pytest.raises(residuum.DamagedCapture, match="did not send all"):
        await reader.follow(capture_id)


async def test_a_missing_final_manifest_is_detected(reader, flaky, capture_id):
    flaky.change = lambda number, messages: iter(messages[:-1])
    with pytest.raises(residuum.ServerFault, match="closing manifest"):
        await reader.activations(capture_id)


async def test_rows_before_the_manifest_are_an_error(reader, flaky, capture_id):
    flaky.change = lambda number, messages: iter(messages[1:])
    with pytest.raises(residuum.ServerFault, match="before the manifest"):
        await reader.activations(capture_id)


async def test_rows_of_another_width_are_an_error(reader, flaky, capture_id):
    def change(number, messages):
        first = parsed(messages[0])
        first.manifest.description.hidden_size += 1
        yield first.SerializeToString()
        yield from messages[1:]

    flaky.change = change
    with pytest.raises(residuum.ServerFault, match="raw, 8 elements of bfloat16, not raw, 9 elements"):
        await reader.activations(capture_id)


async def test_chunk_order_and_duplicates_do_not_matter(reader, flaky, capture_id):
    def change(number, messages):
        middle = messages[1:-1]
        yield messages[0]
        yield from middle[::-1]
        yield from middle[:2]
        yield messages[-1]

    flaky.change = change
    assert is_whole(await reader.activations(capture_id))


def test_dropping_a_follow_ends_the_call(endpoint, capture_id, flaky):
    with residuum.Client(endpoint, store=flaky.endpoint) as client:
        pieces = client.follow(capture_id)
        next(pieces)
        pieces.close()
    flaky.stop()  # returns only when no call is left
