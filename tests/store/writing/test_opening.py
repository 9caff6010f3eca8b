"""A caller may send rows as soon as an open is queued: they are written after the capture."""

from __future__ import annotations

from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from residuum.rpc.errors import Reason
from residuum.rpc.methods import OPEN_CAPTURE, QUEUED
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.rows.frames import append_prefix
from tests.store.support import Client, busy_writer, describe, failing_with, grid, make_chunk, rejections, serving

LAYERS = [0, 1, 2]
WAIT_SECONDS = 30


def attempt_of(number: int, **fields: object) -> capture_pb2.CaptureDescription:
    description = describe(**fields)
    description.attempt = number
    return description


def open_early(client: Client, request: store_pb2.OpenCaptureRequest) -> Any:
    """Call OpenCapture. gRPC's class for calls with one answer gives initial metadata only with the answer."""
    call = client.channel.unary_stream(
        OPEN_CAPTURE, store_pb2.OpenCaptureRequest.SerializeToString, store_pb2.OpenCaptureResponse.FromString
    )
    return call(request, timeout=WAIT_SECONDS)


def message(number: int, positions: range, attempt: int) -> bytes:
    chunk = make_chunk(LAYERS, positions)
    return append_prefix(number, "a", len(chunk), attempt=attempt) + chunk


def test_rows_that_follow_the_initial_metadata_are_written_after_the_capture(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (store, client), ThreadPoolExecutor(1) as pool:
        with busy_writer(store):
            request = store_pb2.OpenCaptureRequest(description=attempt_of(7))
            opening = open_early(client, request)
            assert QUEUED in dict(opening.initial_metadata())
            assert not opening.done(), "the writer is busy, so the capture is not committed"
            answers = pool.submit(client.send, [message(1, range(2), attempt=7), message(2, range(2, 4), attempt=7)])
        assert list(opening) == [store_pb2.OpenCaptureResponse()]
        assert rejections(answers.result()) == {}
        assert client.read()[0] == grid(LAYERS, range(4))


def test_rows_of_a_capture_that_is_then_refused_are_rejected(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (store, client), ThreadPoolExecutor(1) as pool:
        with busy_writer(store):
            openings = []
            for number in (1, 2):  # with the same ID
                openings.append(open_early(client, store_pb2.OpenCaptureRequest(description=attempt_of(number))))
                assert QUEUED in dict(openings[-1].initial_metadata())
            answers = pool.submit(client.send, [message(1, range(1), attempt=1), message(2, range(4), attempt=2)])
        assert list(openings[0]) == [store_pb2.OpenCaptureResponse()]
        with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS):
            list(openings[1])
        assert rejections(answers.result()) == {2: Reason.ERROR_REASON_UNKNOWN_CAPTURE}
        assert client.read()[0] == grid(LAYERS, range(1)), "the first capture has its own rows alone"


def test_a_caller_waits_for_the_answer_if_the_id_is_taken(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (store, client), ThreadPoolExecutor(1) as pool:
        client.open(attempt_of(1))
        with busy_writer(store):
            opening = open_early(client, store_pb2.OpenCaptureRequest(description=attempt_of(2)))
            metadata = pool.submit(opening.initial_metadata)
            with pytest.raises(futures.TimeoutError):
                metadata.result(0.3)
        with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS):
            list(opening)
