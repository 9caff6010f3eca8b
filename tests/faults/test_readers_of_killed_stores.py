"""Readers survive a store that is killed. When it is back, they continue, or begin."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import residuum
from residuum.protocol.captures.reading import Piece
from residuum.transport.connections import ReadRetries
from residuum.v1 import store_pb2
from residuum.wire.rows.frames import append_prefix, checksum, chunk_prefix
from tests.faults.support import BLOCK, COMPLETE, DEADLINE, LAYERS, Capture, Store
from tests.waiting import wait_for

OUTAGE_SECONDS = 2.0
CAPTURE = Capture("read", 4 * BLOCK)


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry twenty times as often. So an outage of 2 s takes as many attempts as one of 40 s."""
    monkeypatch.setattr(ReadRetries, "_FIRST_SECONDS", ReadRetries._FIRST_SECONDS / 20)
    monkeypatch.setattr(ReadRetries, "_LONGEST_SECONDS", ReadRetries._LONGEST_SECONDS / 20)


@pytest.fixture
def store(start_store: Callable[..., Store]) -> Store:
    store = start_store()
    store.open(CAPTURE)
    return store


def write(store: Store, block: range) -> None:
    """Store one block of the capture."""
    payload = CAPTURE.values(LAYERS, block).tobytes()
    chunk = chunk_prefix(CAPTURE.header(block), checksum(payload), len(payload)) + payload
    append = store.channel.stream_stream(
        "/residuum.v1.StoreService/AppendChunks", None, store_pb2.AppendChunksResponse.FromString
    )
    messages = iter([append_prefix(1, CAPTURE.name, len(chunk)) + chunk])
    list(append(messages, timeout=DEADLINE, wait_for_ready=True))


def away_for_a_while(store: Store) -> None:
    store.kill()
    time.sleep(OUTAGE_SECONDS)
    store.start()


def seal(store: Store) -> None:
    request = store_pb2.SealCaptureRequest(capture_id=CAPTURE.name, outcome=COMPLETE)
    request.sequences.add(generated_token_ids=[1], finish_reason="stop")
    store.call("SealCapture", request)


class Followed:
    """Counts the rows of pieces, and compares them with what was written."""

    def __init__(self) -> None:
        self.times: Counter[tuple[int, int]] = Counter()

    def take(self, piece: Piece) -> None:
        expected = CAPTURE.values([piece.layer], piece.positions.tolist())[0].view(np.float32)
        np.testing.assert_array_equal(piece.rows, expected)
        self.times.update((piece.layer, position) for position in piece.positions.tolist())

    def is_whole(self) -> bool:
        return set(self.times) == CAPTURE.rows() and set(self.times.values()) == {1}


async def _consume(pieces: AsyncIterator[Piece], followed: Followed) -> None:
    async for piece in pieces:
        followed.take(piece)


def follow(kind: type[Any], store: Store, followed: Followed, **arguments: Any) -> None:
    """Follow with either client, until the capture has ended."""
    if kind is residuum.Client:
        with residuum.Client("127.0.0.1:1", store=store.endpoint) as client:
            for piece in client.follow(CAPTURE.name, **arguments):
                followed.take(piece)
        return

    async def run() -> None:
        async with residuum.AsyncClient("127.0.0.1:1", store=store.endpoint) as client:
            await _consume(client.follow(CAPTURE.name, **arguments), followed)

    asyncio.run(run())


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.mark.parametrize("kind", [residuum.Client, residuum.AsyncClient])
@pytest.mark.parametrize("arguments", [{}, {"timeout": DEADLINE}])
def test_follow_continues_after_an_outage(
    store: Store, background: ThreadPoolExecutor, kind: type[Any], arguments: dict[str, float]
) -> None:
    blocks = list(CAPTURE.blocks())
    followed = Followed()
    write(store, blocks[0])
    following = background.submit(follow, kind, store, followed, **arguments)
    wait_for(lambda: len(followed.times) == len(LAYERS) * BLOCK or following.done(), "the first block")
    away_for_a_while(store)
    for block in blocks[1:]:
        write(store, block)
    seal(store)
    following.result(DEADLINE)
    assert followed.is_whole()


@pytest.mark.parametrize("read", ["activations", "follow", "manifest", "wait"])
def test_readers_that_begin_during_an_outage_continue_after_it(
    store: Store, background: ThreadPoolExecutor, read: str
) -> None:
    for block in CAPTURE.blocks():
        write(store, block)
    seal(store)
    store.kill()
    with residuum.Client("127.0.0.1:1", store=store.endpoint) as client:
        asked = {
            "activations": lambda: client.activations(CAPTURE.name).manifest,
            "follow": lambda: len(list(client.follow(CAPTURE.name))),
            "manifest": lambda: client.manifest(CAPTURE.name),
            "wait": lambda: client.manifest(CAPTURE.name, wait=DEADLINE),
        }
        reading = background.submit(asked[read])
        time.sleep(OUTAGE_SECONDS)
        assert not reading.done()
        store.start()
        assert reading.result(DEADLINE)


def test_a_wrong_address_is_reported_after_the_clients_timeout(store: Store) -> None:
    with residuum.Client("127.0.0.1:1", store="127.0.0.1:1", timeout=2.0) as client:
        for ask in (client.activations, client.manifest, lambda name: list(client.follow(name))):
            with pytest.raises(residuum.Unreachable, match=r"Nothing answers at 127\.0\.0\.1:1.*tried again for"):
                ask(CAPTURE.name)


def test_a_definite_refusal_ends_a_read_at_once(store: Store) -> None:
    began = time.monotonic()
    with residuum.Client("127.0.0.1:1", store=store.endpoint) as client:
        for ask in (client.activations, client.manifest):
            with pytest.raises(residuum.UnknownCapture):
                ask("nobody")
    assert time.monotonic() - began < DEADLINE, "it did not retry, which takes up to 5 minutes"
