"""Running each job in a fresh process, with a fresh store if it needs one; nothing outlives it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bench.capture.memory import peak_of
from bench.capture.results import Run
from bench.capture.workload import Job, Runner
from bench.machine import ROOT
from examples.services import start_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.capture.workload import Turn, Workload
    from examples.services import Service

_STORE_SECONDS = 60.0
_RUN_SECONDS = 1800.0
_LOG_LINES = 40
_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


class RunFailedError(RuntimeError):
    """A run failed. The message ends with the end of its log."""


def run_turn(turn: Turn, workload: Workload) -> list[Run]:
    """Run a process; return what it measured, mode by mode.

    Raises:
        RunFailedError: It failed, or took too long.
        ServiceFailedError: Its store did not come up.
    """
    with tempfile.TemporaryDirectory(prefix="residuum-") as scratch:
        folder = Path(scratch)
        job = Job(turn.modes, turn.round, workload, scratch, turn.runner)
        if not job.needs_store:
            return _run(job, folder)
        with _running_store(folder) as store:
            runs = _run(dataclasses.replace(job, store=store.endpoint), folder)
            peak = peak_of(store.process.pid)
            return [_with_peak(run, "store", peak) for run in runs]


def _with_peak(run: Run, kind: str, peak: int) -> Run:
    memory = dataclasses.replace(run.memory, peak_mib={**run.memory.peak_mib, kind: peak})
    return dataclasses.replace(run, memory=memory)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end the context as Ctrl-C does, so that whatever was started is stopped."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _running_store(folder: Path) -> Iterator[Service]:
    store = start_store(folder)
    try:
        store.wait_until_serving(_STORE_SECONDS)
        yield store
    finally:
        store.stop()


def _run(job: Job, folder: Path) -> list[Run]:
    job_file, result_file, log_file = (folder / name for name in ("job.json", "result.json", "run.log"))
    job_file.write_text(json.dumps(job.to_json()))
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.capture.child", str(job_file), str(result_file)],
            cwd=ROOT,
            env=_environment(folder, job.runner),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # so that it and vLLM's processes can be ended together
        )
    try:
        status: int | None = process.wait(_RUN_SECONDS)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        # Whatever is left, at whatever point this was interrupted: a run has nothing worth a graceful end. Shippers
        # have sessions of their own, and go when their parent has gone.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status != 0 or not result_file.exists():
        end = "\n".join(log_file.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        how = "took too long" if status is None else f"ended with code {status}"
        modes = " ".join(mode.value for mode in job.modes)
        raise RunFailedError(f"{modes}, round {job.round + 1}, model runner {job.runner.value}: {how}\n{end}")
    return [Run.from_json(run) for run in json.loads(result_file.read_text())]


def _environment(folder: Path, runner: Runner) -> dict[str, str]:
    """Return this environment without the service's own settings: the workload alone decides."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RESIDUUM_")}
    if runner.variable is not None:
        kept[_RUNNER_VARIABLE] = runner.variable
    return {**kept, "VLLM_RPC_BASE_PATH": str(folder)}
