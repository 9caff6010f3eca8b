"""Callers that send nothing or do not read, and limits on memory."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from residuum.rpc.errors import Reason
from residuum.v1 import store_pb2
from store_svc import servicer
from svc_common.rpc.alarms import Alarm
from svc_common.rpc.stall_timeouts import MAX_WATCHES
from tests.store.support import (
    OPEN,
    Client,
    OpenStream,
    describe,
    failing_with,
    make_chunk,
    rejections,
    serving,
)
from tests.waiting import wait_for

LIMIT = Reason.ERROR_REASON_LIMIT_REACHED
HASTY = {"first_message_seconds": 1.5, "stall_seconds": 1.5}
"""Long enough for callers that do not stall, even on a busy machine."""


class Silence(Iterator[bytes]):
    """An iterator of messages that blocks until `end`."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def __next__(self) -> bytes:
        self._ended.wait()
        raise StopIteration

    def end(self) -> None:
        self._ended.set()


def call_and_say_nothing(client: Client, method: str) -> grpc.StatusCode:
    silence = Silence()
    call = client.channel.stream_stream(f"/residuum.v1.StoreService/{method}")(silence, timeout=30)
    try:
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    finally:
        silence.end()
    return caught.value.code()


@pytest.mark.parametrize("method", ["GetStats", "AppendChunks", "ReadChunks"])
def test_a_call_that_sends_nothing_is_cancelled(tmp_path: Path, method: str) -> None:
    with capture_logs() as logs, serving(tmp_path / "store", **HASTY) as (store, client):
        assert call_and_say_nothing(client, method) is grpc.StatusCode.CANCELLED
        client.open()
        registry = store._metrics.registry
        wait_for(lambda: registry.get_sample_value("residuum_call_seconds_count", {"method": method}))
    assert "call failed" not in {line["event"] for line in logs}, "a caller that stalls is no bug of the store"


def test_waiting_calls_are_not_cancelled(tmp_path: Path) -> None:
    with serving(tmp_path / "store", **HASTY) as (_, client):
        client.open()
        writer = OpenStream(client)
        writer.until_acked(writer.send(make_chunk([0], [0])))
        follower = client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="a", follow=True), timeout=30)
        assert [next(follower).WhichOneof("content") for _ in range(2)] == ["manifest", "chunk"]
        for _ in range(3):  # each pause is longer than the first-message timeout
            call_and_say_nothing(client, "GetStats")
        writer.until_acked(writer.send(make_chunk([0], [1])))
        assert list(next(follower).chunk.header.positions) == [1]
        writer.half_close()


def test_a_reader_that_does_not_read_is_cancelled(tmp_path: Path) -> None:
    width = 1 << 18  # one row is 1 MiB
    with serving(tmp_path / "store", **HASTY) as (store, client):
        client.open(describe(width=width, layers=[0], prompt=8))
        client.append(make_chunk([0], [position], width=width) for position in range(8))
        request = store_pb2.ReadChunksRequest(capture_id="a")
        reader = client.stub.ReadChunks(request, timeout=30)
        next(reader)
        wait_for(lambda: store._servicer.calls.num_reading == 0)
        with pytest.raises(grpc.RpcError) as caught:
            list(reader)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        reader = client.stub.ReadChunks(request, timeout=30)
        assert sum(answer.HasField("chunk") for answer in reader) == 8


def test_an_alarm_rings_only_after_its_timeout() -> None:
    alarm, rung = Alarm(0.2), threading.Event()
    has_ended, early = True, []

    def ring() -> None:
        if has_ended:  # on a busy machine, even the quick ones may last until the alarm rings
            early.append("quick")

    try:
        for _ in range(100):
            has_ended = False
            with alarm.over(ring):
                pass
            has_ended = True
        start = time.monotonic()
        with alarm.over(rung.set):
            assert rung.wait(30)
        assert time.monotonic() - start >= 0.2
        assert not early
    finally:
        alarm.close()


def test_an_alarm_continues_after_a_failed_callback() -> None:
    alarm, rung = Alarm(0.05), threading.Event()

    def fail() -> None:
        raise RuntimeError("scripted")

    try:
        with alarm.over(fail), alarm.over(rung.set):
            assert rung.wait(30)
    finally:
        alarm.close()


def test_health_watches_leave_room_for_calls(client: Client) -> None:
    health = health_pb2_grpc.HealthStub(client.channel)
    request = health_pb2.HealthCheckRequest()
    watches = [health.Watch(request) for _ in range(MAX_WATCHES)]
    assert all(next(watch).status == health_pb2.HealthCheckResponse.SERVING for watch in watches)
    with failing_with(LIMIT) as caught:
        next(health.Watch(request, timeout=30))
    assert caught[0].metadata == {"limit": "watches"}
    assert health.Check(request, timeout=30).status == health_pb2.HealthCheckResponse.SERVING
    client.open()
    watches.pop().cancel()
    wait_for(lambda: _is_watched(health.Watch(request, timeout=30)))
    for watch in watches:
        watch.cancel()


@pytest.mark.parametrize("method", ["GetStats", "ReadChunks"])
def test_a_call_that_ends_without_its_message_is_an_error(client: Client, method: str) -> None:
    call = client.channel.stream_stream(f"/residuum.v1.StoreService/{method}")(iter(()), timeout=30)
    with failing_with(Reason.ERROR_REASON_INVALID_FIELD):
        next(call)


def _is_watched(watch: Iterator[health_pb2.HealthCheckResponse]) -> bool:
    try:
        return bool(next(watch))
    except grpc.RpcError:
        return False


def pages(client: Client, prefix: str) -> Iterator[list[str]]:
    token = ""
    for _ in itertools.count():
        request = store_pb2.ListCapturesRequest(prefix=prefix, page_token=token, page_size=2)
        page = client.stub.ListCaptures(request)
        yield [item.capture_id for item in page.captures]
        token = page.next_page_token
        if not token:
            return


def test_a_list_examines_a_limited_number_of_captures(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "_SCANNED_FOR_A_PAGE", 3)
    names = ["x1", *(f"y{number}" for number in range(8)), "x2"]
    for name in names:
        client.open(describe(name))
    found = list(pages(client, "x"))
    assert list(itertools.chain(*found)) == ["x2", "x1"]
    assert [] in found
    assert list(itertools.chain(*pages(client, ""))) == names[::-1]
    assert list(pages(client, "z"))[-1] == []


def test_the_number_of_captures_is_limited(tmp_path: Path) -> None:
    with serving(tmp_path / "store", max_captures=2) as (_, client):
        for name in "ab":
            client.open(describe(name))
        with failing_with(LIMIT) as caught:
            client.open(describe("c"))
        assert caught[0].metadata == {"limit": "max_captures"}
        client.open(describe("a"))  # a repeated open adds no capture
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
        client.open(describe("c"))


def test_the_memory_of_open_captures_is_limited(tmp_path: Path) -> None:
    with serving(tmp_path / "store", max_open_mib=1) as (store, client):
        client.open(describe("a", prompt=1))
        opened = 0
        with failing_with(LIMIT) as caught:
            for opened in range(1000):
                client.open(describe(f"b{opened}", prompt=10_000))
        assert caught[0].metadata == {"limit": "max_open_mib"}
        assert 0 < opened < 100
        assert store._catalog.open_bytes < 2 << 20
        assert rejections(client.append([make_chunk([0], [0])])) == {1: LIMIT}
        assert client.get("a").state == OPEN
        for name in range(opened):
            client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=f"b{name}"))
        assert rejections(client.append([make_chunk([0], [0])])) == {}


def test_the_memory_of_sparse_rows_is_counted(tmp_path: Path) -> None:
    """One row per block takes a hundred times the memory of the same rows in one block."""
    with serving(tmp_path / "store", max_open_mib=1) as (store, client):
        client.open(describe("near", layers=range(16)))
        client.open(describe("far", layers=range(16)))
        assert rejections(client.append([make_chunk(range(16), range(128))], "near")) == {}
        near = store._catalog.open_bytes
        assert rejections(client.append([make_chunk(range(16), range(0, 131_072, 1024))], "far")) == {}
        assert store._catalog.open_bytes > near + (700 << 10)
        more = [make_chunk(range(16), range(first, 131_072, 1024)) for first in (1, 2)]
        assert rejections(client.append(more, "near")) == {2: LIMIT}
        assert rejections(client.append(more[:1], "near")) == {}  # repeated rows take no memory
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="far"))
        assert rejections(client.append(more[1:], "near")) == {}
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="near"))
        assert store._catalog.open_bytes == 0
