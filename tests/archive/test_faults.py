"""The archive fails in every way that object storage fails in. The store goes on, and catches up when it can."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from residuum.rpc.objects import Objects
from residuum.v1 import capture_pb2, errors_pb2, store_pb2
from residuum.wire.rows.archive import CAPTURES, unpack_capture
from store_svc.archive.restore import main as restore_main
from tests.archive.s3 import BUCKET, Call, Proxy
from tests.archive.support import (
    COPIED,
    LAYERS,
    MOVED,
    PENDING,
    archived_ids,
    capture,
    chunk_objects,
    state,
    stats,
    wait_for_state,
)
from tests.store.support import Process, failing_with, grid, serving
from tests.waiting import wait_for

Start = Callable[..., Process]
NOW = "--archive-keep-bytes=0"


def test_captures_are_copied_to_a_bucket_and_restored_from_it(tmp_path: Path, url: str) -> None:
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (store, client):
        for at in range(12):
            capture(client, f"c{at}", prompt=4 + at)
        wait_for(lambda: stats(client).captures_moved == 12, "copies")
        wait_for(lambda: store._db.num_chunks() == 0, "empty database")
        assert client.read("c3")[0] == grid(LAYERS, range(7))
    assert restore_main(["--archive", url, "--path", str(tmp_path / "other")]) == 0
    with serving(tmp_path / "other", archive=url) as (_, client):
        for at in range(12):
            assert client.read(f"c{at}")[0] == grid(LAYERS, range(4 + at))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no call to the archive time out: what does not wait for the archive goes on while such a call hangs."""
    monkeypatch.setenv("AWS_TIMEOUT", "10m")


def failing_puts(status: int, code: str) -> Callable[[Call], None]:
    def fault(call: Call) -> None:
        if call.method == "PUT":
            call.answer(status, code)

    return fault


@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "InternalError"), (503, "SlowDown"), (400, "ExpiredToken"), (403, "AccessDenied")],
)
def test_a_store_whose_archive_fails_goes_on_and_catches_up(
    tmp_path: Path, url: str, s3: Proxy, status: int, code: str
) -> None:
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (store, client):
        s3.before = failing_puts(status, code)
        capture(client)
        wait_for(lambda: stats(client).why_behind, "failure")
        assert str(status) in stats(client).why_behind
        assert client.read()[0] == capture(client, "b") == grid(LAYERS, range(4))
        assert state(client) == PENDING
        assert store._archive.seconds_behind > 0
        s3.work()
        wait_for_state(client, MOVED, ["a", "b"], seconds=60)
        assert stats(client).why_behind == ""
        assert client.read("a")[0] == client.read("b")[0] == grid(LAYERS, range(4))
    assert archived_ids(Objects(url)) == ["a", "b"]


def test_labels_that_cannot_be_written_keep_no_others_from_being_written(tmp_path: Path, url: str, s3: Proxy) -> None:
    objects, names = Objects(url), ["a", "b", "c"]

    def labelled() -> set[str]:
        found = [unpack_capture(objects.get(path)).manifest for path in objects.list(CAPTURES)]
        return {manifest.description.capture_id for manifest in found if manifest.labels}

    with serving(tmp_path / "store", archive=url) as (_, client):
        capture(client, "a")
        wait_for_state(client, COPIED, ["a"])
        (first,) = objects.list(CAPTURES)
        for name in names[1:]:
            capture(client, name)
        wait_for_state(client, COPIED, names)

        def fault(call: Call) -> None:
            if call.method == "PUT" and first in call.path:
                call.answer(403, "AccessDenied")

        s3.before = fault
        for name in names:
            labels = [capture_pb2.Label(name="split", text="train")]
            client.stub.LabelCapture(store_pb2.LabelCaptureRequest(capture_id=name, labels=labels))
        wait_for(lambda: labelled() == {"b", "c"}, "labels of the others", 60)
        s3.work()
        wait_for(lambda: labelled() == {*names}, "labels of the first", 60)


def test_half_an_upload_is_sent_again(tmp_path: Path, url: str, s3: Proxy) -> None:
    cut: set[str] = set()

    def fault(call: Call) -> None:
        if call.method == "PUT" and call.path not in cut:
            cut.add(call.path)
            call.cut()

    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (_, client):
        s3.before = fault
        capture(client, width=1024, prompt=64)
        wait_for_state(client, MOVED)
        assert len(cut) == 2
        assert client.read()[0] == grid(LAYERS, range(64))


def test_an_upload_whose_answer_is_lost_is_there_once(tmp_path: Path, url: str, s3: Proxy) -> None:
    lost: set[str] = set()

    def fault(call: Call) -> None:
        if call.method == "PUT" and call.path not in lost:
            lost.add(call.path)
            call.drop()

    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (_, client):
        s3.after = fault
        capture(client)
        wait_for_state(client, MOVED)
        assert client.read()[0] == grid(LAYERS, range(4))
    assert len(chunk_objects(Objects(url))) == len(archived_ids(Objects(url))) == 1


@pytest.mark.usefixtures("patient")
def test_a_slow_archive_makes_nobody_wait(tmp_path: Path, url: str, s3: Proxy) -> None:
    """Writers and readers of rows in the database go on, whatever waits for the archive."""
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (store, client):
        capture(client, "moved")
        wait_for_state(client, MOVED, ["moved"])
        free = threading.Event()
        s3.before = lambda _: free.wait(300) and None
        readers = [threading.Thread(target=lambda: client.read("moved")) for _ in range(8)]
        for reader in readers:
            reader.start()
        for at in range(8):
            capture(client, f"new{at}")
            assert client.read(f"new{at}")[0] == grid(LAYERS, range(4))
        wait_for(lambda: stats(client).captures_pending == 8, "catalog")
        assert store._archive.link.failures == store._archive.fetcher.failures == 0, "no call to the archive has ended"
        free.set()
        for reader in readers:
            reader.join(30)
        wait_for(lambda: stats(client).captures_moved == 9, "copies")


def test_rows_in_an_archive_that_fails_are_unavailable_until_it_works(tmp_path: Path, url: str, s3: Proxy) -> None:
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (store, client):
        capture(client)
        wait_for_state(client, MOVED)
        wait_for(lambda: store._db.num_chunks() == 0, "empty database")
        s3.before = lambda call: call.answer(403, "ExpiredToken")
        with failing_with(errors_pb2.ERROR_REASON_ARCHIVE_UNREACHABLE) as failures:
            client.read()
        assert "only in the archive" in failures[0].message
        assert BUCKET not in failures[0].message, "callers learn no names"
        with failing_with(errors_pb2.ERROR_REASON_ARCHIVE_UNREACHABLE):
            list(client.stub.Search(store_pb2.SearchRequest(vector=b"\0\0\x80?" * 4, layer=0, max_hits=1)))
        s3.work()
        assert client.read()[0] == grid(LAYERS, range(4))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("many", "num_fetched"),
    [(False, 0), (False, 8), (True, 0)],
    ids=["the first rows", "later rows", "rows of many captures"],
)
def test_a_cancelled_read_does_not_wait_for_an_archive_that_hangs(
    tmp_path: Path, url: str, s3: Proxy, monkeypatch: pytest.MonkeyPatch, num_fetched: int, *, many: bool
) -> None:
    """It frees its slot and its threads. A thread of its own fetches later rows; see `store_svc.reading.prefetch`."""
    monkeypatch.setattr("store_svc.archive.fetching._RANGE_BYTES", 1)  # each chunk is fetched alone
    free, no_copies = threading.Event(), failing_puts(503, "SlowDown")

    def hang(call: Call) -> None:
        if call.method == "GET" and call.first_byte >= num_fetched * num_bytes:
            free.wait(300)
        no_copies(call)

    def read() -> grpc.Call:
        if many:
            return client.stub.ReadCaptures(store_pb2.ReadCapturesRequest(capture_ids=["moved"]))
        return client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="moved"))

    def num_prefetching() -> int:
        return len([thread for thread in threading.enumerate() if thread.name == "ahead"])

    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0, max_streams=2) as (store, client):
        capture(client, "moved", prompt=40)
        wait_for_state(client, MOVED, ["moved"])
        wait_for(lambda: store._db.num_chunks() == 0, "empty database")
        num_bytes = client.get("moved").num_bytes // 40
        s3.before = hang
        capture(client, "local")
        calls = store._servicer.calls
        reads = [read() for _ in range(2)]
        wait_for(lambda: calls.num_reading == 2, "two reads")
        wait_for(lambda: num_prefetching() == (2 if num_fetched else 0), "threads of later rows")
        with failing_with(errors_pb2.ERROR_REASON_LIMIT_REACHED):
            client.read("local")
        for item in reads:
            item.cancel()
        wait_for(lambda: calls.num_reading == 0, "free slots")
        assert store._archive.fetcher.failures == 0, "the reads have waited for a timeout"
        assert num_prefetching() == 0
        assert client.read("local")[0] == grid(LAYERS, range(4))
        free.set()
        s3.work()
        assert client.read("moved")[0] == grid(LAYERS, range(40))


def refused(path: Path, *flags: str) -> str:
    """Start a store that must refuse to start; return its log."""
    command = [sys.executable, "-m", "store_svc", "--listen", "127.0.0.1:0", "--path", str(path), *flags]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert done.returncode == 1, done.stderr
    assert "the archive cannot be used" in done.stderr
    return done.stderr


def test_a_store_does_not_start_without_its_bucket(tmp_path: Path, s3: Proxy) -> None:
    assert s3
    assert "NoSuchBucket" in refused(tmp_path / "store", "--archive", "s3://no-such-bucket/prefix")


def test_a_store_does_not_start_if_it_may_not_write(tmp_path: Path, s3: Proxy, url: str) -> None:
    s3.before = failing_puts(403, "AccessDenied")
    assert "AccessDenied" in refused(tmp_path / "store", "--archive", url)


def test_a_store_does_not_start_if_it_may_not_delete(tmp_path: Path, s3: Proxy, url: str) -> None:
    s3.before = lambda call: call.answer(403, "AccessDenied") if call.method in ("DELETE", "POST") else None
    assert "AccessDenied" in refused(tmp_path / "store", "--archive", url)


def test_a_store_starts_while_its_archive_is_away(start: Start, s3: Proxy, url: str) -> None:
    s3.before = lambda call: call.drop()
    store = start("--archive", url, NOW)
    capture(store.client)
    assert store.client.read()[0] == grid(LAYERS, range(4))
    assert state(store.client) == PENDING
    s3.work()
    wait_for_state(store.client, MOVED, seconds=60)
    assert store.end() == 0
    assert archived_ids(Objects(url)) == ["a"]


@pytest.mark.usefixtures("patient")
def test_a_store_stops_while_its_archive_is_away(start: Start, s3: Proxy, url: str) -> None:
    store = start("--archive", url, "--grace-seconds", "1")
    free, waiting = threading.Event(), threading.Event()

    def hang(_: Call) -> None:
        waiting.set()
        free.wait(300)

    s3.before = hang
    capture(store.client)
    assert waiting.wait(30), "nothing is sent"
    assert store.end() == 0
    free.set()
    s3.work()
    store = start("--archive", url, NOW)
    wait_for_state(store.client, MOVED)
    assert store.client.read()[0] == grid(LAYERS, range(4))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("method", ["GET", "POST"], ids=["read", "deletion"])
def test_a_store_stops_while_a_read_or_a_deletion_waits_for_the_archive(
    start: Start, s3: Proxy, url: str, method: str
) -> None:
    store = start("--archive", url, NOW, "--grace-seconds", "1")
    capture(store.client)
    wait_for_state(store.client, MOVED)
    wait_for(lambda: not store.client.stub.GetStats(store_pb2.GetStatsRequest()).num_chunks, "empty database")
    free, waiting = threading.Event(), threading.Event()

    def hang(call: Call) -> None:
        if call.method == method:
            waiting.set()
            free.wait(300)

    s3.before = hang
    if method == "GET":

        def read() -> None:
            with contextlib.suppress(grpc.RpcError):
                store.client.read()

        threading.Thread(target=read, daemon=True).start()
    else:
        store.client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
    assert waiting.wait(30), "nothing is sent"
    assert store.end() == 0
    free.set()
    s3.work()
    store = start("--archive", url, NOW)
    if method == "GET":
        assert store.client.read()[0] == grid(LAYERS, range(4))
    else:
        wait_for(lambda: not [*Objects(url).list("captures"), *Objects(url).list("chunks")], "deletion")


def test_two_stores_share_a_bucket(tmp_path: Path, s3: Proxy) -> None:
    assert s3
    one, two = f"s3://{BUCKET}/one", f"s3://{BUCKET}/two"
    with (
        serving(tmp_path / "one", archive=one, archive_keep_bytes=0) as (_, first),
        serving(tmp_path / "two", archive=two, archive_keep_bytes=0) as (_, second),
    ):
        capture(first, "same", prompt=4)
        capture(second, "same", prompt=9)
        for client in (first, second):
            wait_for_state(client, MOVED, ["same"])
        assert first.read("same")[0] == grid(LAYERS, range(4))
        assert second.read("same")[0] == grid(LAYERS, range(9))
    restore_main(["--archive", two, "--path", str(tmp_path / "again")])
    with serving(tmp_path / "again", archive=two) as (_, client):
        assert client.read("same")[0] == grid(LAYERS, range(9))
