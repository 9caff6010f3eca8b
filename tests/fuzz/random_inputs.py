"""Runs random inputs in several processes, each with its own service. Every input comes from a seed."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

TARGETS = {"store": ("tests.fuzz.store", "FuzzedStore"), "inference": ("tests.fuzz.inference", "FuzzedInference")}
CHECK_EVERY = 50
"""Inputs after which the service is checked."""

_SEEDS_OF_A_JOB = 10**9
_REPORT_SECONDS = 5
_MOST_MIB = 1024
"""A limit on the memory of a process, far above what it needs."""


def target_of(service: str) -> Any:
    """Return the class that runs a service and calls it. This imports the service."""
    module, name = TARGETS[service]
    importlib.import_module("svc_common.logs").configure_logs("warning")
    return getattr(importlib.import_module(module), name)


def run_random(service: str, minutes: float, num_jobs: int, seed: int | None) -> int:
    """Run until the time is up or an input fails; return the exit status."""
    first = seed if seed is not None else random.SystemRandom().randrange(10**6) * 10**6
    start, context = time.monotonic(), multiprocessing.get_context("spawn")
    counts = context.Array("Q", 2 * num_jobs, lock=False)
    jobs = [
        context.Process(target=_run_job, args=(service, minutes, first, job, counts), daemon=True)
        for job in range(num_jobs)
    ]
    for item in jobs:
        item.start()
    while any(item.is_alive() for item in jobs) and not any(item.exitcode for item in jobs):
        time.sleep(_REPORT_SECONDS)
        seconds, inputs, messages = time.monotonic() - start, sum(counts[::2]), sum(counts[1::2])
        print(f"{seconds:.0f} s: {inputs} inputs with {messages} messages from --seed {first}", flush=True)
    failed = any(item.exitcode for item in jobs)
    print("failed" if failed else "none failed")
    return int(failed)


def _run_job(service: str, minutes: float, first: int, job: int, counts: Any) -> None:
    """Run the inputs of a job, and write to `counts` how many inputs and messages these were."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[job % len(cores)]])  # the threads share the GIL: on two cores they need more time
    seed, is_last, parent = first + job * _SEEDS_OF_A_JOB, False, multiprocessing.parent_process()
    unchecked = seed
    with target_of(service)() as running:
        end = time.monotonic() + 60 * minutes
        while not is_last:
            data = random.Random(seed).randbytes(128)
            is_last = time.monotonic() >= end or not parent.is_alive()
            try:
                running.run(data)
                if seed % CHECK_EVERY == 0 or is_last:
                    running.check()
                    assert _resident_mib() < _MOST_MIB, "the memory grows"
                    unchecked = seed + 1
            except Exception as error:
                print(f"--jobs 1 --seed {seed}: {error}\ninput: {data.hex()}")
                print(f"The service was last checked before --seed {unchecked}.", flush=True)
                raise
            seed += 1
            counts[2 * job] += 1
            counts[2 * job + 1] = running.caller.messages
        print(f"job {job} has {_resident_mib():.0f} MiB in the end", flush=True)


def _resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0
