"""Readers that follow a capture while it is written."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from residuum.rpc.errors import Reason
from residuum.v1 import store_pb2
from tests.store.support import (
    ABORTED,
    COMPLETE,
    Client,
    Rows,
    describe,
    failing_with,
    grid,
    loss_message,
    make_chunk,
    serving,
)

LAYERS = [0, 1, 2]


def follow(client: Client, **fields: object) -> grpc.Call:
    return client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="a", follow=True, **fields), timeout=30)


def test_rows_are_sent_as_they_are_committed(client: Client) -> None:
    client.open()
    answers = follow(client)
    assert next(answers).manifest.num_rows == 0
    rows = Rows()
    for position in range(5):
        client.append([make_chunk(LAYERS, [position])])
        rows.take(next(answers).chunk)
        assert rows.cells == grid(LAYERS, range(position + 1))
    client.seal(generated=[2])
    rest = list(answers)
    assert [answer.manifest.state for answer in rest] == [COMPLETE]


def test_each_row_comes_once_while_several_write(client: Client) -> None:
    """Writers repeat each other's rows in other groupings. Readers start at any time, with and without a filter."""
    length = 60
    client.open(describe(prompt=length))
    started = threading.Barrier(6)

    def write(step: int) -> None:
        started.wait()
        for first in range(0, length, step):
            client.append([make_chunk(LAYERS, range(first, min(first + step, length)))])

    def read(layers: list[int]) -> None:
        rows = Rows()
        started.wait()
        *middle, last = list(follow(client, layers=layers))[1:]
        for answer in middle:
            rows.take(answer.chunk)
        assert rows.cells == grid(layers or LAYERS, range(length))
        assert last.manifest.state == COMPLETE

    with ThreadPoolExecutor(6) as pool:
        writers = [pool.submit(write, step) for step in (2, 3, 7)]
        readers = [pool.submit(read, layers) for layers in ([], [1], [0, 2])]
        for writer in writers:
            writer.result()
        client.seal(generated=[1])
        for reader in readers:
            reader.result()


@pytest.mark.parametrize("end", ["abort", "loss", "time-out"])
def test_following_ends_with_the_capture(tmp_path: Path, end: str) -> None:
    waits = {"seal_timeout_seconds" if end == "time-out" else "ending_timeout_seconds": 0.2}
    with serving(tmp_path / "store", **waits) as (_, client):
        client.open()
        answers = follow(client)
        next(answers)
        client.append([make_chunk(LAYERS, range(4))])
        if end == "abort":
            client.seal(generated=[2], outcome=ABORTED)
        else:
            client.seal(generated=[2])
        if end == "loss":
            loss = store_pb2.RowLoss(sites=[1], layers=LAYERS, positions=[4], reason=1)
            client.send([loss_message(1, "a", loss)])
        *chunks, last = answers
        assert len(chunks) == 1
        assert last.manifest == client.get()
        assert last.manifest.HasField("end_time")


def test_following_ends_when_the_capture_is_deleted(client: Client) -> None:
    client.open()
    answers = follow(client)
    next(answers)
    client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
    client.open()  # a new capture with the same name is a different one
    with failing_with(Reason.ERROR_REASON_UNKNOWN_CAPTURE):
        list(answers)


def test_following_ends_when_the_store_stops(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (store, client):
        client.open()
        answers = follow(client)
        next(answers)
        store.stop()
        with failing_with(Reason.ERROR_REASON_NOT_SERVING):
            list(answers)


def test_disconnected_readers_free_their_slots(tmp_path: Path) -> None:
    with serving(tmp_path / "store", max_streams=1) as (_, client):
        client.open()
        for _ in range(3):
            until_accepted(client).cancel()


def until_accepted(client: Client) -> grpc.Call:
    """Follow, retrying while the previous reader still holds the only slot."""
    for _ in range(500):
        answers = follow(client)
        with suppress(grpc.RpcError):
            next(answers)
            return answers
        assert answers.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    return pytest.fail("the disconnected reader still holds its stream")


def test_following_an_aborted_capture_waits_for_what_is_under_way(client: Client) -> None:
    client.open()
    client.append([make_chunk(LAYERS, range(4))])
    client.seal(generated=[2], outcome=ABORTED)
    answers = follow(client)
    rows = Rows()
    assert next(answers).manifest.num_rows == 12
    rows.take(next(answers).chunk)
    client.append([make_chunk(LAYERS, [4])])
    *chunks, last = answers
    for answer in chunks:
        rows.take(answer.chunk)
    assert rows.cells == grid(LAYERS, range(5))
    assert (last.manifest.state, last.manifest.num_rows) == (ABORTED, 15)
