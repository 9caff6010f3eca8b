"""A capture that is replaced while a read of it is interrupted: rows of two captures are never mixed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import residuum
from residuum.captures.row_stream import RowChoice, stream_rows
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.rows.frames import checksum, chunk_prefix, parse_chunk
from tests.client.support.flaky_store import FlakyStore, Unknown
from tests.store.support import Client, describe, make_chunk, serving

LAYERS, WIDTH = (0, 1, 2), 1 << 15
READS = {
    "one": lambda client: client.activations("a"),
    "many": lambda client: client.activations(["a"]),
    "follow": lambda client: client.follow("a"),
}


@pytest.fixture
def plain(tmp_path) -> Iterator[Client]:
    with serving(tmp_path / "store") as (_, plain):
        yield plain


@pytest.fixture
def flaky(plain) -> Iterator[FlakyStore]:
    running = FlakyStore(plain.target)
    yield running
    running.stop()


def put(plain: Client, prompt: int, factor: float) -> None:
    """Store a capture whose rows are those of `make_chunk`, multiplied."""
    plain.open(describe("a", layers=LAYERS, prompt=prompt, width=WIDTH))
    chunks = []
    for at in range(prompt):
        chunk = parse_chunk(make_chunk(LAYERS, [at], width=WIDTH))
        payload = (chunk.rows() * np.float32(factor)).tobytes()
        chunks.append(chunk_prefix(chunk.header, checksum(payload), len(payload)) + payload)
    plain.append(chunks, "a")
    plain.seal("a", generated=(1,))
    assert plain.get("a", wait=10).state == capture_pb2.CAPTURE_STATE_COMPLETE


def replace(plain: Client, prompt: int) -> None:
    plain.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
    put(plain, prompt, factor=-1)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("prompt", [2, 4, 8])
async def test_a_resumed_read_does_not_mix_two_captures(
    make: Any, plain: Client, flaky: FlakyStore, read: str, prompt: int
) -> None:
    put(plain, prompt=4, factor=1)

    def change(number: int, messages: list[bytes]) -> Iterator[bytes]:
        if number:
            yield from messages
            return
        yield from messages[: 1 if read == "many" else 2]  # not all rows
        replace(plain, prompt)
        raise Unknown(grpc.StatusCode.UNAVAILABLE)

    flaky.change = change
    reader = make(store=flaky.endpoint, timeout=10, shared_memory=False)
    with pytest.raises(residuum.UnknownCapture, match="The capture a was replaced while it was read"):
        await READS[read](reader)
    assert flaky.reads == 2
    acts = await reader.activations("a")
    assert acts[2].shape == (prompt, WIDTH)
    assert (acts[2] < 0).all()


def test_a_dataset_does_not_give_rows_the_tokens_of_an_earlier_capture(plain: Client) -> None:
    put(plain, prompt=4, factor=1)
    choice = RowChoice(layers=1, sites=None, sequences=None, positions=None, allow_partial=False)
    with residuum.Client("127.0.0.1:1", store=plain.target) as client:
        # `check` is called between the manifest, which has the tokens, and the rows.
        rows = stream_rows(client, ["a"], [0], choice, 1, check=lambda _: replace(plain, 4))
        with pytest.raises(residuum.UnknownCapture, match="The capture a was replaced while it was read"):
            list(rows)
