"""Rows may reach the store before the call that opens their capture. They wait for it, but not for long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from residuum.rpc.errors import Reason
from residuum.v1 import store_pb2
from store_svc.writing import early_rows
from store_svc.writing.early_rows import Attempts, Patience
from tests.store.support import Client, failing_with, grid, rejections, serving
from tests.store.writing.test_opening import LAYERS, attempt_of, message

REJECTED = {1: Reason.ERROR_REASON_UNKNOWN_CAPTURE}
SHORT, LONG = 0.3, 30.0


@contextmanager
def sending(client: Client, *messages: bytes) -> Iterator[Future[list[store_pb2.AppendChunksResponse]]]:
    """Send messages in another thread, and wait until the store has had time to read them."""
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(client.send, messages)
        time.sleep(SHORT)
        yield answers


def never() -> bool:
    return False


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[Patience]:
    monkeypatch.setattr(early_rows, "WAIT_SECONDS", SHORT)
    return Patience(Attempts())


def test_rows_that_come_before_the_open_are_written_after_it(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (_, client):
        rows = [message(1, range(2), attempt=7), message(2, range(2, 4), attempt=7)]
        with sending(client, *rows) as answers:
            assert not answers.done(), "the rows wait"
            client.open(attempt_of(7))
            assert rejections(answers.result(LONG)) == {}
        assert client.read()[0] == grid(LAYERS, range(4))


def test_opens_of_one_call_release_their_rows(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (_, client):
        with sending(client, message(1, range(2), attempt=7)) as answers:
            request = store_pb2.OpenCapturesRequest(
                opens=[
                    store_pb2.OpenCaptureRequest(description=attempt_of(8, capture_id="b")),
                    store_pb2.OpenCaptureRequest(description=attempt_of(7)),
                ]
            )
            first, _ = client.stub.OpenCaptures(request)
            assert first.takes_early_rows
            assert rejections(answers.result(LONG)) == {}
        assert client.read()[0] == grid(LAYERS, range(2))


def test_rows_of_a_refused_open_are_rejected_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_rows, "WAIT_SECONDS", 10 * LONG)
    with serving(tmp_path / "store") as (_, client):
        client.open(attempt_of(1))
        with sending(client, message(1, range(2), attempt=2)) as answers:
            with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS):
                client.open(attempt_of(2))
            assert rejections(answers.result(LONG)) == REJECTED
        with sending(client, message(1, range(2), attempt=3)) as answers:
            with failing_with(Reason.ERROR_REASON_INVALID_FIELD):
                client.open(attempt_of(3, capture_id="no ID!"))
            assert rejections(answers.result(LONG)) == REJECTED


def test_rows_of_a_deleted_capture_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_rows, "WAIT_SECONDS", 10 * LONG)
    with serving(tmp_path / "store") as (_, client):
        client.open(attempt_of(1))
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
        assert rejections(client.send([message(1, range(2), attempt=1)])) == REJECTED


def test_rows_do_not_wait_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path / "store") as (_, client):
        client.open(attempt_of(1))
    monkeypatch.setattr(early_rows, "WAIT_SECONDS", 10 * LONG)
    with serving(tmp_path / "store") as (_, client):
        assert rejections(client.send([message(1, range(2), attempt=1)])) == {}


def test_a_store_that_stops_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_rows, "WAIT_SECONDS", 10 * LONG)
    with serving(tmp_path / "store") as (store, client), sending(client, message(1, range(2), attempt=1)) as answers:
        store.stop()
        with failing_with(Reason.ERROR_REASON_NOT_SERVING):
            answers.result(LONG)


def test_rows_without_an_attempt_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_rows, "WAIT_SECONDS", 10 * LONG)
    with serving(tmp_path / "store") as (_, client):
        assert rejections(client.send([message(1, range(2), attempt=0)])) == REJECTED


def test_captures_that_are_never_opened_delay_a_stream_only_once(patience: Patience) -> None:
    began = time.monotonic()
    patience.wait_for(1, never)
    assert time.monotonic() - began >= SHORT
    began = time.monotonic()
    for attempt in (1, 2, 3, 4):
        patience.wait_for(attempt, never)
    assert time.monotonic() - began < SHORT


def test_a_stream_is_patient_again_later(patience: Patience, monkeypatch: pytest.MonkeyPatch) -> None:
    patience.wait_for(1, never)
    monkeypatch.setattr(early_rows, "_REFILL_SECONDS", 1e-9)
    began = time.monotonic()
    patience.wait_for(2, never)
    assert time.monotonic() - began >= SHORT


def test_the_oldest_attempts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_rows, "_MAX_ATTEMPTS", 3)
    attempts = Attempts()
    attempts.note([1, 2, 3])
    attempts.note([4])
    assert [number in attempts for number in (0, 1, 2, 3, 4)] == [True, False, True, True, True]
