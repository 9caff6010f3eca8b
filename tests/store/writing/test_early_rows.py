"""Rows may reach the store before the call that opens their capture. They wait for it, but not for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.rows import frames
from store_svc.captures.capture_names import CaptureName
from store_svc.writing import early_rows
from store_svc.writing.early_rows import ArrivedOpens, OpenWaits
from tests.store.support import Client, failing_with, grid, make_chunk, rejections, serving
from tests.store.writing.test_opening import LAYERS, attempt_of, message

REJECTED = {1: Reason.ERROR_REASON_UNKNOWN_CAPTURE}
SHORT, LONG = 0.3, 30.0
CHUNK = make_chunk(LAYERS, range(2))
NAME = CaptureName("", "a")


@contextmanager
def sending(client: Client, *messages: bytes) -> Iterator[Future[list[store_pb2.AppendChunksResponse]]]:
    """Send messages in another thread, and wait until the store has had time to read them."""
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(client.send, messages)
        time.sleep(SHORT)
        yield answers


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows wait for longer than the machine may stand still."""
    monkeypatch.setattr(early_rows, "WAIT_SECONDS", 10 * LONG)


def never() -> bool:
    return False


class Clock:
    """Its time passes only while a stream waits for an open. It replaces the module `time` and a condition."""

    def __init__(self) -> None:
        self.now = 0.0
        self.arrival: tuple[float, Callable[[], None]] = (float("inf"), lambda: None)
        """What happens during a wait, and when."""

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.arrival[0]:
            self.arrival[1]()

    def notify_all(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(early_rows, "time", made)
    return made


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> ArrivedOpens:
    monkeypatch.setattr(early_rows, "WAIT_SECONDS", SHORT)
    monkeypatch.setattr(early_rows, "_LEAST_SECONDS", 0.01)
    made = ArrivedOpens(lambda _: False)
    monkeypatch.setattr(made, "_condition", clock)
    return made


def seconds_of_wait(clock: Clock, waits: OpenWaits, attempt: int, *, arrives: bool = False) -> float:
    began = clock.now
    assert waits.wait_for(NAME, attempt, never) is arrives
    return clock.now - began


@pytest.mark.usefixtures("patient")
def test_rows_that_come_before_the_open_are_written_after_it(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (_, client):
        rows = [message(1, range(2), attempt=7), message(2, range(2, 4), attempt=7)]
        with sending(client, *rows) as answers:
            assert not answers.done(), "the rows wait"
            client.open(attempt_of(7))
            assert rejections(answers.result(LONG)) == {}
        assert client.read()[0] == grid(LAYERS, range(4))


@pytest.mark.usefixtures("patient")
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


@pytest.mark.usefixtures("patient")
def test_a_stream_that_waits_does_not_hold_up_another_one(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (_, client), sending(client, message(1, range(2), attempt=7)) as answers:
        client.open(attempt_of(8, capture_id="b"))
        other = frames.append_prefix(1, "b", len(CHUNK), attempt=8) + CHUNK
        assert rejections(client.send([other])) == {}
        assert not answers.done()
        client.open(attempt_of(7))
        assert rejections(answers.result(LONG)) == {}


def test_an_open_has_arrived_only_when_it_is_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its rows could be written before it."""
    with serving(tmp_path / "store") as (store, client):
        opens, submit_many = store._servicer._opens, store._writer.submit_many

        def submit(commands: Sequence[Any]) -> list[Future[Any]]:
            assert not opens.has(NAME, 7)
            return submit_many(commands)

        monkeypatch.setattr(store._writer, "submit_many", submit)
        client.open(attempt_of(7))


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


@pytest.mark.parametrize("has_ended", [False, True])
def test_rows_do_not_wait_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_ended: bool) -> None:
    with serving(tmp_path / "store") as (_, client):
        client.open(attempt_of(1))
        if has_ended:
            client.seal(attempt=1, outcome=capture_pb2.CAPTURE_STATE_ABORTED)
            assert client.get(wait=LONG).state == capture_pb2.CAPTURE_STATE_ABORTED
    monkeypatch.setattr(early_rows, "WAIT_SECONDS", 10 * LONG)
    with serving(tmp_path / "store") as (_, client):
        client.send([message(1, range(2), attempt=1)])


def test_messages_that_are_refused_anyway_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_rows, "WAIT_SECONDS", 10 * LONG)
    with serving(tmp_path / "store") as (_, client):
        damaged = message(1, range(2), attempt=1)[:-1] + b"?"
        assert rejections(client.send([damaged])) == {1: Reason.ERROR_REASON_CHECKSUM_MISMATCH}


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


def test_captures_that_are_never_opened_delay_a_stream_only_once(opens: ArrivedOpens, clock: Clock) -> None:
    waits = OpenWaits(opens)
    assert seconds_of_wait(clock, waits, 1) == pytest.approx(SHORT)
    assert waits.wait_for(NAME, 1, never), "it was given up"
    assert sum(seconds_of_wait(clock, waits, attempt) for attempt in range(2, 7)) < SHORT


def test_a_stream_regains_its_time(opens: ArrivedOpens, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = OpenWaits(opens)
    seconds_of_wait(clock, waits, 1)
    monkeypatch.setattr(early_rows, "_REGAIN_SECONDS", 1e-9)
    assert seconds_of_wait(clock, waits, 2) == pytest.approx(SHORT)


def test_a_stream_that_has_waited_in_vain_still_waits_a_little(
    opens: ArrivedOpens, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = OpenWaits(opens)
    seconds_of_wait(clock, waits, 1)
    monkeypatch.setattr(early_rows, "_LEAST_SECONDS", LONG)
    clock.arrival = clock.now + LONG / 2, lambda: opens.note([2])
    assert seconds_of_wait(clock, waits, 2, arrives=True) == pytest.approx(LONG / 2, abs=0.1)


def test_waits_that_succeed_cost_nothing(opens: ArrivedOpens, clock: Clock) -> None:
    waits = OpenWaits(opens)
    for attempt in range(1, 11):
        clock.arrival = clock.now + SHORT / 2, partial(opens.note, [attempt])
        assert seconds_of_wait(clock, waits, attempt, arrives=True) >= SHORT / 3
    assert seconds_of_wait(clock, waits, 99) == pytest.approx(SHORT)


def test_a_stream_that_gives_up_or_ends_leaves_the_others_waiting(opens: ArrivedOpens, clock: Clock) -> None:
    seconds_of_wait(clock, OpenWaits(opens), 1)
    assert OpenWaits(opens).wait_for(NAME, 1, lambda: True), "it has ended"
    assert seconds_of_wait(clock, OpenWaits(opens), 1) == pytest.approx(SHORT)


def test_the_oldest_opens_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_rows, "_MAX_ATTEMPTS", 3)
    opens = ArrivedOpens(lambda name: name.capture_id == "open")
    opens.note([1, 2, 3])
    opens.note([4])
    assert [opens.has(NAME, attempt) for attempt in (1, 2, 3, 4)] == [False, True, True, True]
    assert opens.has(CaptureName("", "open"), 1), "the capture is still open"
