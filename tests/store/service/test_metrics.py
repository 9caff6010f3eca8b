"""The store's metrics, scraped from its process, and the request IDs in its log lines."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from residuum.rpc.errors import Reason
from residuum.v1 import store_pb2
from store_svc.server import main
from store_svc.writing.changes import Batch
from tests import ports
from tests.store.support import (
    ABORTED,
    OpenStream,
    Process,
    describe,
    failing_with,
    make_chunk,
    message,
    seal_request,
    serving,
)

LAYERS = [0, 1, 2]
Start = Callable[..., Process]
Samples = dict[tuple[str, ...], float]


def log_of(process: Process) -> list[dict[str, object]]:
    return [json.loads(line) for line in process.log_path.read_text().splitlines()]


def scrape(port: object) -> Samples:
    """Return the samples by name and label values."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def process(start: Start) -> Process:
    return start("--metrics", "127.0.0.1:0", "--retain-bytes", "1MiB")


@pytest.fixture
def look(process: Process) -> Callable[[], Samples]:
    (port,) = (line["port"] for line in log_of(process) if line["event"] == "metrics")
    return lambda: scrape(port)


def test_metrics_of_a_store(process: Process, look: Callable[[], Samples]) -> None:
    client = process.client
    before = look()
    assert before["residuum_store_captures", "open"] == 0
    methods = store_pb2.DESCRIPTOR.services_by_name["StoreService"].methods
    assert {before["residuum_call_errors_total", method.name, "INTERNAL"] for method in methods} == {0}, (
        "an alert misses what is not there before"
    )
    client.open()
    chunks = [make_chunk(LAYERS, [0, 1]), make_chunk(LAYERS, [2, 3, 4])]
    client.append([*chunks, chunks[0]])
    client.append([make_chunk([7], [0])])
    client.open(describe("b"))
    client.seal(generated=[2])
    client.seal("b", generated=[2], outcome=ABORTED)
    client.read()
    with failing_with(Reason.ERROR_REASON_UNKNOWN_CAPTURE):
        client.get("nobody")
    with failing_with(Reason.ERROR_REASON_INVALID_FIELD):
        list(client.raw_append(iter([b"\xff"]), timeout=10))
    now = look()
    size = sum(map(len, chunks))
    expected = {
        ("residuum_store_captures", "complete"): 1,
        ("residuum_store_captures", "open"): 1,
        ("residuum_store_chunk_bytes",): size,
        ("residuum_store_chunks",): 2,
        ("residuum_store_appended_chunks_total", "written"): 2,
        ("residuum_store_appended_chunks_total", "repeated"): 1,
        ("residuum_store_appended_chunks_total", "rejected"): 1,
        ("residuum_store_written_bytes_total",): size,
        ("residuum_store_queue_messages",): 0,
        ("residuum_store_queue_bytes",): 0,
        ("residuum_store_append_streams",): 0,
        ("residuum_store_reads",): 0,
        ("residuum_store_read_chunks_total",): 4,  # including two manifests
        ("residuum_store_retain_bytes",): 1 << 20,
        ("residuum_store_expired_captures_total", "size"): 0,
        ("residuum_store_max_bytes",): 64 << 30,
        ("residuum_call_errors_total", "GetCapture", "UNKNOWN_CAPTURE"): 1,
        ("residuum_call_errors_total", "AppendChunks", "INVALID_FIELD"): 1,
        ("residuum_call_seconds_count", "ReadChunks"): 1,
        ("residuum_call_seconds_count", "SealCapture"): 2,
    }
    assert {name: now.get(name) for name in expected} == expected
    assert now["residuum_store_read_bytes_total",] > size
    assert now["residuum_store_acknowledgements_total",] >= 2
    assert now["residuum_store_commit_seconds_count",] >= 5
    assert now["residuum_store_commit_seconds_sum",] < 10
    assert 0 < now["residuum_store_used_bytes",] <= now["residuum_store_disk_bytes",]
    assert now["residuum_store_append_limit_bytes",] < now["residuum_store_max_bytes",]
    assert now["residuum_store_free_disk_bytes",] > 0
    assert now["process_resident_memory_bytes",] > 1 << 20


def test_streams_and_expiry_are_seen(process: Process, look: Callable[[], Samples]) -> None:
    client = process.client
    client.open(describe("a", width=1 << 15, prompt=4))
    stream = OpenStream(client)
    for position in range(4):  # 384 KiB each
        number = stream.send(make_chunk(LAYERS, [position], width=1 << 15))
    stream.until_acked(number)
    assert look()["residuum_store_append_streams",] == 1
    stream.half_close()
    size = client.seal(generated=[1]).num_bytes
    while "a" in [item.capture_id for item in client.stub.ListCaptures(store_pb2.ListCapturesRequest()).captures]:
        pass
    now = look()
    assert now["residuum_store_expired_captures_total", "size"] == 1
    assert now["residuum_store_expired_bytes_total",] == size
    assert now["residuum_store_chunk_bytes",] == 0


def test_names_follow_prometheus(look: Callable[[], Samples]) -> None:
    own = {name for name, *_ in look() if name.startswith("residuum_")}
    kinds = ("_total", "_bytes", "_seconds_bucket", "_seconds_count", "_seconds_sum", "_created")
    plain = {name for name in own if not name.endswith(kinds)}
    assert plain == {
        f"residuum_store_{name}" for name in ("captures", "chunks", "full", "queue_messages", "append_streams", "reads")
    }


def test_metrics_are_off_by_default(start: Start) -> None:
    process = start()
    assert not [line for line in log_of(process) if line["event"] == "metrics"]


def test_a_store_stops_with_its_listener_and_may_start_again(start: Start) -> None:
    port = ports.reserve()
    process = start("--metrics", f"127.0.0.1:{port}")
    assert scrape(port)
    assert process.end() == 0
    with pytest.raises(OSError, match="refused"):
        scrape(port)
    assert start("--metrics", f"127.0.0.1:{port}").end() == 0


def test_an_address_in_use_is_reported(start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process = start("--metrics", "127.0.0.1:0")
    (port,) = (line["port"] for line in log_of(process) if line["event"] == "metrics")
    flags = ["--path", str(tmp_path / "other"), "--listen", "127.0.0.1:0", "--metrics", f"127.0.0.1:{port}"]
    assert main(flags) == 1
    assert f"metrics: cannot listen on 127.0.0.1:{port}" in capfd.readouterr().err
    (served,) = (line["port"] for line in log_of(process) if line["event"] == "serving")
    address = f"127.0.0.1:{served}"
    # In a process of its own: it gets as far as to log, which configures the loggers of the process.
    command = [sys.executable, "-m", "store_svc", "--path", str(tmp_path / "other"), "--listen", address]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert (
        f"listen: cannot listen on {address}: Address already in use. Set --listen to another address." in found.stderr
    )


# ------------------------------------------------------------------------------------------------------------- the log


def test_lines_about_a_request_have_its_id(start: Start) -> None:
    process = start()
    process.client.open(describe("mine"))
    process.client.stub.SealCapture(seal_request("mine", outcome=ABORTED, generated=[0]))
    process.client.append([make_chunk(LAYERS, range(4))], "mine")
    assert process.client.get("mine", wait=10).state == ABORTED
    process.end()
    (ended,) = [line for line in log_of(process) if line["event"] == "capture ended"]
    assert ended["request_id"] == "mine"


def test_a_fault_is_logged_with_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from store_svc.reading.reader import Reader
    from store_svc.servicer import StoreServicer

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with capture_logs([merge_contextvars]) as lines, serving(tmp_path / "store") as (_, client):
        for name in "abc":
            client.open(describe(name))
        monkeypatch.setattr(Reader, "manifest", fail)
        with failing_with(Reason.ERROR_REASON_INTERNAL):
            client.get("a")
        monkeypatch.setattr(Reader, "read", fail)
        with failing_with(Reason.ERROR_REASON_INTERNAL):
            client.read("b")
        monkeypatch.setattr(Batch, "append", fail)
        with failing_with(Reason.ERROR_REASON_INTERNAL):
            list(client.raw_append(iter([message(1, "c", make_chunk(LAYERS, [0]))]), timeout=10))
        monkeypatch.setattr(StoreServicer, "_retention_stats", fail)
        for _ in range(40):  # no thread keeps the request ID of an earlier call
            with pytest.raises(grpc.RpcError):
                client.stub.GetStats(store_pb2.GetStatsRequest())
    faults = [line.get("request_id", "") for line in lines if line["event"] == "call failed"]
    assert faults == ["a", "b", "c", *[""] * 40]
