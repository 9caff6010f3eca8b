"""How errors of object storage are understood, and the threads that wait for it."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from residuum.rpc.objects import ArchiveRefusedError, MissingObjectError, Objects
from residuum.wire.rows.archive import chunks_path
from store_svc.archive import owner
from store_svc.archive.fetching import Away, Fetcher
from store_svc.archive.records import Place
from store_svc.archive.workers import Workers
from store_svc.settings import StoreSettings
from tests.archive.s3 import BUCKET, Call, Proxy
from tests.waiting import wait_for


class _NoContainer(http.server.BaseHTTPRequestHandler):
    """Answers every call as Azure does for a container that does not exist."""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b'<?xml version="1.0"?><Error><Code>ContainerNotFound</Code><Message>Made by the test.</Message></Error>'
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    do_GET = do_PUT = do_DELETE = do_POST = _answer  # noqa: N815 - names of http.server


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _NoContainer)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    yield Objects("az://container/prefix")
    server.shutdown()
    server.server_close()


OPERATIONS: dict[str, Callable[[Objects], object]] = {
    "put": lambda objects: objects.put("x", b"1"),
    "get": lambda objects: objects.get("x"),
    "range": lambda objects: objects.get_range("x", 0, 1),
    "delete": lambda objects: objects.delete(["x"]),
    "list": lambda objects: list(objects.list("captures")),
    "claim": lambda objects: owner.claim(objects, b"x" * 16, was_claimed=False),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_container_of_azure_that_is_missing_refuses_every_operation(azure: Objects, name: str) -> None:
    with pytest.raises(ArchiveRefusedError):
        OPERATIONS[name](azure)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_bucket_of_s3_that_is_missing_refuses_every_operation(s3: Proxy, name: str) -> None:
    assert s3
    with pytest.raises(ArchiveRefusedError):
        OPERATIONS[name](Objects("s3://nothing/prefix"))


def check_missing_and_short(objects: Objects) -> None:
    objects.put("a", b"0123456789")
    objects.put("b", b"")
    assert bytes(objects.get_range("a", 2, 3)) == b"234"
    with pytest.raises(MissingObjectError):
        objects.get("c")
    with pytest.raises(MissingObjectError):
        objects.get_range("a", 20, 3)
    with pytest.raises(MissingObjectError):
        objects.get_range("b", 0, 3)
    objects.delete(["c", "a", "d", "b"])
    assert not list(objects.list(""))
    objects.delete([])


def test_missing_and_short_objects_of_s3(url: str) -> None:
    check_missing_and_short(Objects(url))


def test_missing_and_short_objects_of_a_folder(tmp_path: Path) -> None:
    check_missing_and_short(Objects(f"file://{tmp_path}"))


def test_a_server_that_cannot_delete_several_objects_at_once(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DISABLE_BULK_DELETE", "true")
    objects = Objects(f"s3://{BUCKET}/prefix")
    for name in "abc":
        objects.put(name, b"1")

    def refuse(call: Call) -> None:
        if call.method == "POST":
            call.answer(501, "NotImplemented")

    s3.before = refuse
    objects.delete(["a", "b", "c", "missing"])
    assert not list(objects.list(""))


def test_a_folder_with_a_space_and_without_empty_folders(tmp_path: Path) -> None:
    objects = Objects(f"file://{tmp_path}/my%20archive")
    objects.put("chunks/key/00000", b"1")
    assert (tmp_path / "my archive" / "chunks" / "key" / "00000").exists()
    objects.delete(["chunks/key/00000"])
    assert not (tmp_path / "my archive" / "chunks" / "key").exists()


@pytest.mark.parametrize(("mark", "escaped"), [("?", "%3F"), ("#", "%23")])
def test_a_mark_that_would_end_the_path_must_be_escaped(tmp_path: Path, mark: str, escaped: str) -> None:
    with pytest.raises(ArchiveRefusedError, match=escaped):
        Objects(f"file://{tmp_path}/a{mark}b")
    Objects(f"file://{tmp_path}/a{escaped}b").put("owner", b"1")
    assert [path.name for path in tmp_path.iterdir()] == [f"a{mark}b"]


def test_an_archive_in_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="must begin with"):
        StoreSettings(archive="memory:///x")


@pytest.mark.parametrize("sizes", [[8 << 20] * 12, [(1 << 20) - 1, 8 << 20] * 8, [900_000] * 40])
def test_a_reader_holds_at_most_two_large_ranges(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    bound = 16 << 20
    live, peak, changed = 0, 0, threading.Condition()

    class Counted(bytearray):
        def __del__(self) -> None:
            nonlocal live
            with changed:
                live -= len(self)
                changed.notify_all()

    class Fake:
        def get_range(self, _path: str, _start: int, length: int) -> memoryview:
            nonlocal live, peak
            with changed:
                # The thread that has fetched a range may hold it for a moment longer than the reader.
                changed.wait_for(lambda: live + length <= bound, 20)
                live += length
                peak = max(peak, live)
            return memoryview(Counted(length))

    monkeypatch.setattr("store_svc.archive.fetching.checksum", lambda _: 0)
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    frames = [Away(b"%05d" % at, Place(0, starts[at], size, 0), "key") for at, size in enumerate(sizes)]
    fetcher = Fetcher(Fake())  # type: ignore[arg-type]
    seen = 0
    for found in fetcher.ahead(frames, "a", tick=10):
        assert found is not None
        assert len(found[1] or b"") == sizes[seen]
        seen += 1
    assert seen == len(sizes)
    assert peak <= bound
    fetcher.stop()


class TestWorkers:
    """Daemon threads with futures."""

    def test_calls_run_at_once_up_to_the_number_of_threads(self) -> None:
        workers = Workers(2, "test")
        begun, free = [], threading.Event()

        def call(at: int) -> int:
            begun.append(at)
            assert free.wait(10)
            return at

        futures = [workers.submit(call, at) for at in range(4)]
        wait_for(lambda: len(begun) == 2, "two calls")
        time.sleep(0.05)
        assert begun == [0, 1]
        assert futures[3].cancel()
        free.set()
        assert [future.result(10) for future in futures[:3]] == [0, 1, 2]
        assert 3 not in begun
        workers.close()

    def test_an_error_reaches_the_caller_and_the_thread_goes_on(self) -> None:
        workers = Workers(1, "test")
        with pytest.raises(ZeroDivisionError):
            workers.submit(lambda: 1 / 0).result(10)
        assert workers.submit(lambda: 5).result(10) == 5
        workers.close()

    def test_after_close_the_threads_end_and_nothing_is_accepted(self) -> None:
        workers = Workers(2, "closing")
        assert workers.submit(lambda: chunks_path("k", 1)).result(10) == "chunks/k/00001"
        workers.close()
        wait_for(lambda: not [item for item in threading.enumerate() if item.name == "closing"], "end")
        with pytest.raises(CancelledError):
            workers.submit(lambda: 5).result(1)
