"""The store as a process: started, killed, stopped."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, store_pb2
from store_svc.server import main
from store_svc.settings import StoreSettings
from svc_common.settings import load_settings
from tests.store.support import (
    ABORTED,
    COMPLETE,
    INCOMPLETE,
    ONE_AND_SEVERAL,
    OPEN,
    Client,
    OpenStream,
    Process,
    cells_of,
    describe,
    failing_with,
    grid,
    loss_message,
    make_chunk,
    message,
    serving,
)

LAYERS = [0, 1, 2]
SERVING = health_pb2.HealthCheckResponse.SERVING
Start = Callable[..., Process]


def write_until_killed(process: Process, chunks: list[bytes], acks_before_kill: int) -> int:
    """Send chunks and kill the store after some acknowledgements. Return how many chunks were acknowledged."""
    acked = 0
    messages = (message(number, "a", chunk) for number, chunk in enumerate(chunks, start=1))
    answers = process.client.raw_append(messages, timeout=30)
    try:
        for at, answer in enumerate(answers):
            acked = answer.committed_through
            if at == acks_before_kill:
                process.process.send_signal(signal.SIGKILL)
    except grpc.RpcError:
        pass
    assert answers.code() == grpc.StatusCode.UNAVAILABLE
    process.process.wait()
    return acked


@ONE_AND_SEVERAL
def test_a_store_with_too_many_open_files_stores_rows(start: Start) -> None:
    """The files grow beyond what is allocated of them."""
    width = 1 << 12
    process = start()
    process.client.open(describe(prompt=32, width=width))
    pid = process.process.pid
    count = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    chunks = [make_chunk(LAYERS, range(first, first + 8), width=width) for first in range(0, 32, 8)]
    assert not any(answer.rejections for answer in process.client.append(chunks))
    assert process.client.seal(generated=(1,)).state == COMPLETE
    assert process.end() == 0


@ONE_AND_SEVERAL
@pytest.mark.slow
def test_acknowledged_rows_survive_a_kill(start: Start) -> None:
    """Chunks are large, so transactions are long and the kill hits one in progress."""
    chooser = random.Random(7)
    length, width = 1200, 1 << 13
    chunks = [make_chunk(LAYERS, [position], width=width) for position in range(length)]
    process = start()
    process.client.open(describe(prompt=length, width=width))
    done = 0
    for _ in range(5):
        acked = write_until_killed(process, chunks[done:], chooser.randrange(3))
        process = start()
        cells, manifest = process.client.read()
        assert cells >= grid(LAYERS, range(done + acked)), "an acknowledged row is gone"
        assert cells == cells_of(manifest.present)
        assert manifest.num_rows == len(cells)
        done += acked
        assert done < length, "the kill came too late to show anything"
    process.client.seal(generated=[1])
    process.client.append(chunks[done:])
    cells, manifest = process.client.read()
    assert manifest.state == COMPLETE
    assert cells == grid(LAYERS, range(length))


@ONE_AND_SEVERAL
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_everything_survives_a_restart(start: Start, number: int) -> None:
    process = start("--ending-timeout-seconds", "60")
    client = process.client
    names = ["open", "sealed", "complete", "aborting", "aborted", "lossy", "gone"]
    for name in names:
        client.open(describe(name))
        client.append([make_chunk(LAYERS, [0, 1]), make_chunk([0], [3])], name)
    client.send([loss_message(1, "lossy", store_pb2.RowLoss(sites=[1], layers=[1], positions=[2], reason=1))])
    for name in ("complete", "aborted"):
        client.append([make_chunk(LAYERS, range(5))], name)
    for name in ("sealed", "complete", "lossy"):
        client.seal(name, generated=[2])
    for name in ("aborting", "aborted"):
        client.seal(name, generated=[2], outcome=ABORTED)
    client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="gone"))
    before = {name: client.get(name) for name in names[:-1]}
    page = store_pb2.ListCapturesRequest(page_size=2)
    listed = client.stub.ListCaptures(page)
    process.end(number)

    client = start("--ending-timeout-seconds", "60").client
    assert {name: client.get(name) for name in before} == before
    assert client.stub.ListCaptures(page) == listed, "page tokens stay valid across restarts"
    stats = client.stub.GetStats(store_pb2.GetStatsRequest())
    assert stats.num_bytes == sum(manifest.num_bytes for manifest in before.values())

    for name in ("sealed", "aborting", "lossy"):
        client.append([make_chunk(LAYERS, range(5))], name)
    assert client.get("sealed").state == COMPLETE
    assert client.get("lossy").state == COMPLETE, "the lost row arrived later"
    assert (client.get("aborting").state, client.get("aborting").num_rows) == (ABORTED, 15)
    assert client.get("open").state == OPEN
    client.open(describe("gone"))
    assert client.get("gone").num_rows == 0


def test_losses_survive_a_restart(start: Start) -> None:
    process = start()
    process.client.open()
    losses = [
        store_pb2.RowLoss(sites=[1], layers=[layer], positions=[2], reason=1 + 3 * layer, detail=f"layer {layer}")
        for layer in (0, 1)
    ]
    process.client.send([loss_message(number, "a", loss) for number, loss in enumerate(losses, start=1)])
    process.client.append([make_chunk(LAYERS, [0, 1, 3, 4]), make_chunk([2], [2])])
    process.end(signal.SIGKILL)
    manifest = start().client.seal(generated=[2])
    assert (manifest.state, manifest.incomplete_detail) == (INCOMPLETE, "layer 0")
    assert cells_of(manifest.missing) == grid([0, 1], [2])


def test_the_wait_for_rows_restarts_with_the_store(start: Start) -> None:
    process = start("--ending-timeout-seconds", "60")
    process.client.open(describe("unsealed"))
    for name, outcome in (("complete", COMPLETE), ("aborted", ABORTED)):
        process.client.open(describe(name))
        assert process.client.seal(name, generated=[2], outcome=outcome).state == OPEN
    assert process.end() == 0
    waits = ("--open-timeout-seconds", "--seal-timeout-seconds", "--ending-timeout-seconds")
    client = start(*(word for flag in waits for word in (flag, "0.3"))).client
    assert "never sealed" in client.get("unsealed", wait=20).incomplete_detail
    assert client.get("complete", wait=20).incomplete_reason == capture_pb2.INCOMPLETE_REASON_TIMED_OUT
    assert client.get("aborted", wait=20).state == ABORTED


@ONE_AND_SEVERAL
def test_frames_of_a_deleted_capture_are_freed_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, serving(tmp_path / "store") as (_, client):
        patch.setattr("store_svc.writing.writer.purge_some", lambda _, limit: False)  # so the store never frees frames
        client.open()
        client.append([make_chunk(LAYERS, [position]) for position in range(50)])
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
        assert client.stub.GetStats(store_pb2.GetStatsRequest()).num_chunks == 50
    monkeypatch.setattr("store_svc.writing.writer._PURGE_FRAMES", 7)
    with serving(tmp_path / "store") as (_, client):
        for _ in range(10):
            client.open(describe("b"))  # each answer follows another transaction
            client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="b"))
        assert client.stub.GetStats(store_pb2.GetStatsRequest()).num_chunks == 0


def test_a_stop_writes_and_acknowledges_what_was_sent(start: Start) -> None:
    process = start()
    process.client.open()
    stream = OpenStream(process.client)
    stream.until_acked(stream.send(make_chunk(LAYERS, [0])))
    process.process.send_signal(signal.SIGTERM)
    seen = [0]
    with failing_with(Reason.ERROR_REASON_NOT_SERVING):
        seen.extend(answer.synced_through for answer in stream.answers)
    assert seen[-1] == 1
    assert process.process.wait(timeout=20) == 0
    assert start().client.get().num_rows == 3


def test_the_store_reports_when_it_serves_and_when_it_stops(start: Start) -> None:
    process = start()
    health = health_pb2_grpc.HealthStub(process.client.channel)
    service = "residuum.v1.StoreService"
    for name in ("", service):
        assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == SERVING
    watch = health.Watch(health_pb2.HealthCheckRequest(service=service), timeout=20)
    assert next(watch).status == SERVING
    process.process.send_signal(signal.SIGINT)
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert process.process.wait(timeout=20) == 0


def test_reflection_names_the_service(client: Client) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]))
    assert "residuum.v1.StoreService" in {item.name for item in answer.list_services_response.service}


def run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "store_svc", *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_help_explains_every_setting() -> None:
    text = run("--help").stdout
    for name in StoreSettings.model_fields:
        assert "--" + name.replace("_", "-") in text
    assert "`synced` rows a power failure" in " ".join(text.split())
    assert "store_svc restore" in text
    assert "--config FILE" in text
    assert not re.search(r"Path\b|ByteSize|tuple\[|dict\[| str\b| int\b| float\b|null|default: \(\)", text)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--path", "{path}", "--listen", "nowhere"], "--listen"),
        (["--path", "{path}", "--max-bytes", "lots"], "--max-bytes .*: this is not a size. Give a number of bytes, or"),
        (
            ["--path", "{path}", "--max-bytes", "5 apples"],
            "--max-bytes .*: this is not a size. Give a number of bytes, or",
        ),
        (["--path", "{path}", "--max-bytes", "1MiB"], "--max-bytes"),
        (["--path", "{path}", "--ack", "maybe"], "--ack"),
        (["--path", "{path}", "--seal-timeout-seconds", "0"], "--seal-timeout-seconds"),
        (["--path", "{path}", "--open-timeout-seconds", "inf"], "--open-timeout-seconds"),
        (["--path", "{path}", "--stall-seconds", "1e10"], "--stall-seconds"),
        (["--path", "{path}", "--grace-seconds", "inf"], "--grace-seconds"),
        ([], "--path .*: this setting is required"),
    ],
)
def test_a_bad_setting_is_named(tmp_path: Path, flags: list[str], name: str) -> None:
    with pytest.raises(SystemExit, match=name):
        main([flag.format(path=tmp_path / "store") for flag in flags])


def test_a_bad_setting_ends_the_process_with_an_error() -> None:
    done = run("--ack", "maybe")
    assert done.returncode == 1
    assert "--ack" in done.stderr
    assert "Traceback" not in done.stderr


def test_settings_come_from_the_environment_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "store.toml"
    file.write_text(f'path = "{tmp_path}"\nmax_bytes = "1GiB"\nack = "synced"\n')
    monkeypatch.setenv("RESIDUUM_MAX_BYTES", "2GiB")
    settings = load_settings(StoreSettings, "store", ["--config", str(file), "--listen", "127.0.0.1:1"])
    assert (settings.max_bytes, settings.ack, settings.path) == (2 << 30, "synced", tmp_path)
    assert settings.listen == "127.0.0.1:1"


def test_a_misspelt_variable_ends_the_process_and_any_other_is_logged(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # a folder cannot be created in it, so the process exits after reading its settings
    flags = ["--path", str(tmp_path / "file" / "db"), "--listen", "127.0.0.1:0"]
    done = run(*flags, RESIDUUM_RETAIN_HOUR="1")
    assert done.returncode == 1
    assert "RESIDUUM_RETAIN_HOUR: unknown setting. Did you mean RESIDUUM_RETAIN_HOURS" in done.stderr
    done = run(*flags, RESIDUUM_XYZZY="1", RESIDUUM_CACHE="", RESIDUUM_RING_MIB="7", RESIDUUM_STORE_TLS_CA="ca.pem")
    assert "cannot start" in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "unknown environment variables" in line)
    assert json.loads(line)["variables"] == ["RESIDUUM_XYZZY"]


def test_a_port_in_use_and_a_folder_in_use_are_reported(tmp_path: Path, start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("--listen", endpoint, "--path", str(tmp_path / "other"))
        assert (done.returncode, endpoint in done.stderr) == (1, True)
    start()
    done = run("--listen", "127.0.0.1:0", "--path", str(tmp_path / "store"))
    assert (done.returncode, "in use" in done.stderr) == (1, True)


def test_a_port_file_that_cannot_be_written_ends_the_process(tmp_path: Path) -> None:
    flags = ["--listen", "127.0.0.1:0", "--path", str(tmp_path / "store")]
    done = run(*flags, "--port-file", str(tmp_path / "none" / "port"))
    assert (done.returncode, "the port file cannot be written" in done.stderr) == (1, True)
    assert "Traceback" not in done.stderr


def test_a_store_can_wait_for_as_long_as_its_settings_may_say(start: Start) -> None:
    names = [name for name in StoreSettings.model_fields if name.endswith("_seconds")]
    process = start(*(f"--{name.replace('_', '-')}=1e9" for name in names))
    process.client.open()
    process.client.append([make_chunk(LAYERS, [0])])
    process.client.open(describe("second"))
    assert process.client.get().num_rows == len(LAYERS)
    assert process.end() == 0
    assert "Traceback" not in process.log_path.read_text()


def test_an_empty_port_file_is_none() -> None:
    assert not StoreSettings(path=Path("x"), port_file="").port_file


@pytest.mark.parametrize(
    "method",
    [
        "OpenCapture",
        "SealCapture",
        "OpenCaptures",
        "SealCaptures",
        "GetCapture",
        "ListCaptures",
        "DeleteCapture",
        "DeleteCaptures",
        "GetStats",
        "ReadChunks",
    ],
)
def test_malformed_requests_are_the_callers_fault(client: Client, method: str) -> None:
    path = f"/residuum.v1.StoreService/{method}"
    with failing_with(Reason.ERROR_REASON_INVALID_FIELD):
        if method in {"ReadChunks", "OpenCaptures"}:
            list(client.channel.unary_stream(path)(b"\xff\xff"))
        else:
            client.channel.unary_unary(path)(b"\xff\xff")
    client.open()


def test_a_store_on_the_models_machine_yields_the_processor(start: Start) -> None:
    process = start("--nice", "3")
    threads = [int(task.name) for task in Path(f"/proc/{process.process.pid}/task").iterdir()]
    expected = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)
    assert len(threads) > 1
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {expected}
