"""Running each job in a fresh process, with a fresh store if it needs one; nothing outlives it."""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench.capture.memory import peak_of
from bench.capture.results import Run
from bench.capture.workload import Job, Runner
from bench.children import run_child
from svc_common.launcher import start_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.capture.workload import Turn, Workload
    from svc_common.launcher import Service

_STORE_SECONDS = 60.0
_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


def run_turn(turn: Turn, workload: Workload, store_folder: Path | None = None, profile: str = "") -> list[Run]:
    """Run a process; return what it measured, mode by mode.

    Args:
        turn: Which.
        workload: What it does.
        store_folder: Where the store's data lie, in a folder of their own; None: where temporary files do.
        profile: The folder for a trace of torch's profiler; empty: none is made.

    Raises:
        RunFailedError: It failed, or took too long.
        ServiceFailedError: Its store did not come up.
    """
    with tempfile.TemporaryDirectory(prefix="residuum-") as scratch:
        folder = Path(scratch)
        job = Job(turn.modes, turn.round, workload, scratch, turn.runner, profile=profile)
        if not job.needs_store:
            return _run(job, folder)
        with (
            tempfile.TemporaryDirectory(prefix="residuum-", dir=store_folder) as data,
            ExitStack() as stack,
        ):
            stores = [stack.enter_context(_running_store(Path(data, str(at)))) for at in range(workload.stores)]
            named = tuple(f"store-{at}={store.endpoint}" for at, store in enumerate(stores))
            runs = _run(dataclasses.replace(job, stores=named), folder)
            peak = max(peak_of(store.process.pid) for store in stores)
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
    store = start_store(folder, ["--nice", "5"])  # as one would beside a model
    try:
        store.wait_until_serving(_STORE_SECONDS)
        yield store
    finally:
        store.stop()


def _run(job: Job, folder: Path) -> list[Run]:
    modes = " ".join(mode.value for mode in job.modes)
    what = f"{modes}, round {job.round + 1}, model runner {job.runner.value}"
    measured = run_child("bench.capture.child", job.to_json(), folder, environment_of(folder, job.runner), what)
    return [Run.from_json(run) for run in measured]


def environment_of(folder: Path, runner: Runner) -> dict[str, str]:
    """Return this environment without the service's own settings: the workload alone decides."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RESIDUUM_")}
    if runner.variable is not None:
        kept[_RUNNER_VARIABLE] = runner.variable
    return {**kept, "VLLM_RPC_BASE_PATH": str(folder)}
