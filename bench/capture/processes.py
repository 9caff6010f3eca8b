"""Runs each job in a fresh process, with fresh stores if it needs them. All of them end with the job."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import chain, groupby
from pathlib import Path

from bench.capture.baton import Baton
from bench.capture.results import Run
from bench.capture.workload import Job, Runner, Turn, Workload
from bench.memory import peak_of
from bench.plain import restore
from bench.processes import run_child, running_store


def run_all(
    workload: Workload,
    turns: Sequence[Turn],
    store_folder: Path | None = None,
    *,
    together: bool = False,
    after_round: Callable[[Sequence[Run]], object] = lambda _: None,
) -> list[Run]:
    """Run the turns, print their measurements, and return them.

    Args:
        workload: The workload.
        turns: The turns.
        store_folder: See `run_turn`.
        together: Whether the turns of a round with the same model runner run at the same time, and take turns of a
            few iterations. Otherwise they run one after another.
        after_round: Called at the end of each round with all measurements so far.
    """
    runs: list[Run] = []
    for _, of_round in groupby(turns, key=lambda turn: turn.round):
        by_runner = [[*group] for _, group in groupby(of_round, key=lambda turn: turn.runner)]
        for group in by_runner if together else [[turn] for turn in chain(*by_runner)]:
            for run in _run_together(group, workload, store_folder):
                runs.append(run)
                head = f"round {run.round + 1}/{turns[-1].round + 1}  {run.mode.value:<17} {run.model_runner}"
                print(f"{head} {run.line()}", flush=True)
        after_round(runs)
    return runs


def _run_together(turns: Sequence[Turn], workload: Workload, store_folder: Path | None) -> list[Run]:
    if len(turns) == 1:
        return run_turn(turns[0], workload, store_folder)
    with tempfile.TemporaryDirectory(prefix="residuum-") as folder, ThreadPoolExecutor(len(turns)) as pool:
        batons = [Baton(str(Path(folder, "baton")), place, len(turns)) for place in range(len(turns))]
        batons[0].lay_down()
        running = [
            pool.submit(run_turn, turn, workload, store_folder, baton=baton)
            for turn, baton in zip(turns, batons, strict=True)
        ]
        try:
            for future in as_completed(running):
                future.result()
        except BaseException:
            batons[0].drop()  # the others end at their next turn at the latest; an engine that starts is waited for
            raise
        return [run for future in running for run in future.result()]


def run_turn(
    turn: Turn, workload: Workload, store_folder: Path | None = None, profile: str = "", baton: Baton | None = None
) -> list[Run]:
    """Run one process; return its measurements, one for each mode.

    Args:
        turn: The turn.
        workload: The workload.
        store_folder: The folder in which a new folder holds the store's data; None for that of temporary files.
        profile: The folder for a trace of torch's profiler; empty for no trace.
        baton: Says when the process measures, if others run at the same time.
    """
    with tempfile.TemporaryDirectory(prefix="residuum-") as scratch:
        folder = Path(scratch)
        job = Job(turn.modes, turn.round, workload, scratch, turn.runner, profile=profile, baton=baton or Baton())
        if not job.needs_store:
            return _run(job, folder)
        with (
            tempfile.TemporaryDirectory(prefix="residuum-", dir=store_folder) as data,
            ExitStack() as stack,
        ):
            flags = ["--nice", "5"]  # as in a deployment on the machine of the model
            stores = [stack.enter_context(running_store(Path(data, str(at)), flags)) for at in range(workload.stores)]
            named = tuple(f"store-{at}={store.endpoint}" for at, store in enumerate(stores))
            runs = _run(dataclasses.replace(job, stores=named), folder)
            peak = max(peak_of(store.process.pid) for store in stores)
            for run in runs:
                run.memory.peak_mib["store"] = peak
            return runs


def _run(job: Job, folder: Path) -> list[Run]:
    modes = " ".join(mode.value for mode in job.modes)
    what = f"{modes}, round {job.round + 1}, model runner {job.runner.value}"
    measured = run_child(
        "bench.capture.child", dataclasses.asdict(job), folder, environment_of(folder, job.runner), what
    )
    return [restore(Run, run) for run in measured]


def environment_of(folder: Path, runner: Runner) -> dict[str, str]:
    """Return this environment without the service's settings, so that only the workload determines them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RESIDUUM_")}
    return {**kept, **runner.variables, "VLLM_RPC_BASE_PATH": str(folder)}
