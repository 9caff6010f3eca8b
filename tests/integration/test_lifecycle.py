"""Services start, stop and die, as real processes.

Only those that are stopped as usual import vLLM anew; the others are forks (tests/warm_start.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import residuum
from svc_common.launcher import OWN_GROUP, ROOT, Service, start_store
from tests import one_process, ports, warm_start
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine

START_SECONDS = 200.0
ALL = residuum.Capture(layers="all")
EAGER = ["--enforce-eager", "--kv-cache-gib", "0.25", "--max-num-batched-tokens", "128", "--max-num-seqs", "8"]


@pytest.fixture
def run() -> Iterator[Callable[[Service], Service]]:
    """Stop a service at the end of the test."""
    started: list[Service] = []

    def note(service: Service) -> Service:
        started.append(service)
        return service

    yield note
    for service in reversed(started):
        service.stop()


def children_of(pid: int) -> set[int]:
    """Return all descendants of a process."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], check=True, capture_output=True, text=True).stdout
    parents = {int(a): int(b) for a, b in (line.split() for line in table.splitlines())}
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_stored(client: residuum.Client, request_id: str) -> bool:
    """Return whether the store knows a capture."""
    try:
        client.manifest(request_id)
    except residuum.UnknownCapture:
        return False
    return True


def test_the_store_may_start_late_and_be_killed_without_losing_rows(
    tiny_llama: Path, tmp_path: Path, run: Callable[[Service], Service]
) -> None:
    """If the inference service starts before its store, it serves without captures until the store is there.

    If the store is killed during a capture and restarted, it finally has every row.
    """
    port = ports.reserve()
    arguments = [*EAGER, one_process.FLAG]
    inference = run(warm_start.start_inference(tmp_path, str(tiny_llama), f"127.0.0.1:{port}", arguments))
    inference.wait_until_serving(START_SECONDS)
    with residuum.Client(inference.endpoint) as client:
        assert client.generate([5, 6, 7], max_tokens=2).token_ids
        for refused in (
            lambda: client.generate([5, 6, 7], max_tokens=2, capture=ALL),
            lambda: client.register(capture=ALL),
        ):
            with pytest.raises(residuum.StoreUnreachable, match=str(port)):
                refused()

        store = run(start_store(tmp_path, port=port))
        store.wait_until_serving(30)
        reply = client.generate([5, 6, 7], max_tokens=40, ignore_eos=True, capture=ALL)
        assert client.activations(reply.request_id).manifest.state == "complete"

        with client.stream([5, 6, 7], max_tokens=300, ignore_eos=True, capture=ALL) as stream:
            tokens = iter(stream)
            for _ in range(60):
                next(tokens)
            store.kill()
            for _ in range(60):
                next(tokens)
            store = run(start_store(tmp_path, port=port))
            for _ in tokens:
                pass
        store.wait_until_serving(30)
        acts = client.activations(stream.reply.request_id)
        assert acts.manifest.state == "complete"
        assert len(acts.positions) == 3 + 300 - 1
        again = client.activations(reply.request_id)
        assert again.manifest.state == "complete", "rows acknowledged before the kill are in the store"


def test_sigterm_drains_requests_and_leaves_no_processes(
    tiny_llama: Path, tmp_path: Path, run: Callable[[Service], Service]
) -> None:
    store = run(start_store(tmp_path))
    store.wait_until_serving(30)
    arguments = [*EAGER, "--grace-seconds", "120"]  # a busy machine may need more than the default
    inference = run(warm_start.start_inference(tmp_path, str(tiny_llama), store.endpoint, arguments))
    inference.wait_until_serving(START_SECONDS)
    with residuum.Client(inference.endpoint, store=store.endpoint) as client:
        family = children_of(inference.process.pid)
        assert len(family) >= 3, "the engine, its worker and a shipper"

        def generate() -> str:
            """Start requests that take seconds. Some of them wait in the queue."""
            reply = client.generate([5, 6, 7], max_tokens=80, ignore_eos=True, capture=ALL, n=12, request_id="drained")
            return reply.request_id

        with ThreadPoolExecutor(1) as pool:
            generated = pool.submit(generate)
            # Do not wait for a first token: if the scheduler favours other processes, it may arrive when all requests
            # have finished, and none is left to drain.
            wait_for(lambda: is_stored(client, "drained"))
            inference.process.send_signal(signal.SIGTERM)
            wait_for(lambda: b"draining" in inference.log.read_bytes())
            with pytest.raises(residuum.Unavailable):
                client.generate([5, 6, 7], max_tokens=1)
            assert generated.result(120) == "drained"
        assert inference.process.wait(60) == 0
        wait_for(lambda: not any(alive(pid) for pid in family))
        acts = client.activations("drained")
        for sequence in range(12):
            assert len(acts.select(sequence=sequence).positions) == 3 + 80 - 1
    store.process.send_signal(signal.SIGTERM)
    assert store.process.wait(30) == 0


def test_requests_longer_than_the_grace_period_are_aborted_and_sealed(
    tiny_llama: Path, tmp_path: Path, run: Callable[[Service], Service]
) -> None:
    """This includes queued requests. A capture with a token has every row that was computed."""
    store = run(start_store(tmp_path))
    store.wait_until_serving(30)
    arguments = [*EAGER, one_process.FLAG, "--grace-seconds", "0.2"]
    inference = run(warm_start.start_inference(tmp_path, str(tiny_llama), store.endpoint, arguments))
    inference.wait_until_serving(START_SECONDS)
    with residuum.Client(inference.endpoint, store=store.endpoint) as client:
        streams = [client.stream([5, 6, 7], max_tokens=500, ignore_eos=True, capture=ALL) for _ in range(24)]
        names = [stream.started.request_id for stream in streams]
        next(iter(streams[0]))
        inference.process.send_signal(signal.SIGTERM)
        assert inference.process.wait(60) == 0
        manifests = [client.manifest(name, wait=60) for name in names]
    assert {manifest.state for manifest in manifests} <= {"complete", "aborted"}
    assert "aborted" in {manifest.state for manifest in manifests}
    begun = [manifest for manifest in manifests if manifest.sequences[0].generated_token_ids]
    assert begun
    assert not any(manifest.missing for manifest in begun)


def test_a_dead_engine_stops_the_service_and_seals_its_captures(
    tiny_llama: Path, tmp_path: Path, run: Callable[[Service], Service]
) -> None:
    store = run(start_store(tmp_path))
    store.wait_until_serving(30)
    inference = run(warm_start.start_inference(tmp_path, str(tiny_llama), store.endpoint, EAGER))
    inference.wait_until_serving(START_SECONDS)
    with residuum.Client(inference.endpoint, store=store.endpoint) as client:
        (engine,) = [pid for pid in children_of(inference.process.pid) if "EngineCore" in command_of(pid)]
        stream = client.stream([5, 6, 7], max_tokens=500, ignore_eos=True, capture=ALL)
        request_id = stream.started.request_id
        tokens = iter(stream)
        next(tokens)
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(residuum.Unavailable):
            for _ in tokens:
                pass
        assert inference.process.wait(60) != 0
        manifest = client.manifest(request_id, wait=True)
        assert manifest.state == "incomplete"
        assert manifest.reason == "ENGINE_DIED"


def test_a_killed_service_leaves_no_process(
    tiny_llama: Path, tmp_path: Path, run: Callable[[Service], Service]
) -> None:
    """This includes a worker whose step waits for a store that accepts nothing."""
    store = run(start_store(tmp_path))
    store.wait_until_serving(30)
    arguments = [*EAGER, "--ring-mib", "1"]
    inference = run(warm_start.start_inference(tmp_path, str(tiny_llama), store.endpoint, arguments))
    inference.wait_until_serving(START_SECONDS)
    family = children_of(inference.process.pid)
    with residuum.Client(inference.endpoint) as client:
        streams = [client.stream([5, 6, 7], max_tokens=500, ignore_eos=True, capture=ALL) for _ in range(8)]
        next(iter(streams[0]))
        store.process.send_signal(signal.SIGSTOP)
        inference.process.kill()
        wait_for(lambda: not any(alive(pid) for pid in family), 60)
    store.process.send_signal(signal.SIGCONT)


def command_of(pid: int) -> str:
    return subprocess.run(["ps", "-o", "args=", "-p", str(pid)], check=False, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("module", "arguments", "named"),
    [
        ("store_svc", ["--path", "x", "--listen", "nonsense"], "--listen"),
        ("store_svc", ["--path", "x", "--ack", "never"], "--ack"),
        ("inference_svc", ["--model", "x", "--listen", "nonsense"], "--listen"),
        ("inference_svc", ["--model", "x", "--max-num-seqs", "0"], "--max-num-seqs"),
        ("inference_svc", [], "--model"),
    ],
)
def test_bad_settings_are_named(module: str, arguments: list[str], named: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode != 0
    assert named in done.stderr


def test_ctrl_c_stops_all_processes_of_the_demo(smollm2: Path, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "examples.demo", "--model", str(smollm2), "--picture", str(tmp_path / "x.png")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **OWN_GROUP,
    )
    wait_for(lambda: len(children_of(demo.pid)) >= 3, 60)  # the store, the inference service, its engine
    family = children_of(demo.pid)
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=120)
    assert demo.returncode == 130
    assert "loading the model ... " in output, "while the services start, the demo says for how long"
    wait_for(lambda: not any(alive(pid) for pid in family))
