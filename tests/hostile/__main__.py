"""Attacks both services in separate processes, and prints their peak memory and the limit from their settings.

    python -m tests.hostile

The exit status is 0 if memory stayed within the limits and well-behaved callers were served throughout. For the store,
these are a follower and a writer that started before the attacks. The inference service has a scripted engine.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from residuum.rpc.channels import open_aio_channel
from residuum.v1 import inference_pb2_grpc
from store_svc.memory_bound import memory_bound
from tests.faults.support import ENVIRONMENT, Store
from tests.hostile import inference
from tests.hostile.memory import Peak, inference_bound_mib, own_mib
from tests.hostile.store import ATTACKS, MIB, WellBehaved, idle_streams, wide_capture

LIMITS = {"max_streams": 128, "max_writers": 128, "max_open_mib": 64}
IDLE = 1000
INFERENCE_LIMITS = {"max_requests": 1100, "max_registration_mib": 8, "max_vector_mib": 8}
"""The settings of tests.hostile.inference_service."""


def main() -> int:
    """Run all attacks; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        attacked = attack(Path(folder, "attacked"))
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        idle = idle_alone(Path(folder, "idle"))
    return 0 if all((attacked, idle, asyncio.run(attack_inference()))) else 1


def attack(folder: Path) -> bool:
    """Run all attacks on one store; return whether its memory stayed within the limit."""
    bound = memory_bound(**LIMITS, max_captures=1000) / MIB
    store = _start(folder, LIMITS)
    peak = Peak(store.process.pid)
    try:
        good = WellBehaved(store.port)
        wide_capture(good.client, "wide", 64)
        for name, run in ATTACKS.items():
            start = time.monotonic()
            _say(f"{name}: {run(store.port)}; {own_mib(store.process.pid):.0f} MiB, {time.monotonic() - start:.1f} s")
            good.check()
        good.end()
    finally:
        peak.close()
        store.close()
    _say(f"store: peak {peak.mib:.0f} MiB, bound {bound:.0f} MiB ({LIMITS})")
    return peak.mib <= bound


def idle_alone(folder: Path) -> bool:
    """Hold many idle streams; return whether the store's memory stayed within the limit for waiting streams."""
    limits = {"max_streams": IDLE + 100, "max_writers": 16, "max_open_mib": 64}
    # Waiting streams hold no chunks, but a thread each.
    bound = memory_bound(**{**limits, "max_streams": 0}, max_captures=1) / MIB + 0.25 * limits["max_streams"]
    store = _start(folder, limits)
    peak = Peak(store.process.pid)
    try:
        good = WellBehaved(store.port)
        _say(idle_streams(store.port, IDLE))
        good.end()
    finally:
        peak.close()
        store.close()
    _say(f"store: peak {peak.mib:.0f} MiB, bound {bound:.0f} MiB ({limits}, all streams idle)")
    return peak.mib <= bound


async def attack_inference() -> bool:
    """Run all attacks on an inference service with a scripted engine; return whether memory stayed within the limit."""
    command = [sys.executable, "-m", "tests.hostile.inference_service"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=ENVIRONMENT, text=True, **pipes) as process:  # noqa: ASYNC220 - nothing else runs yet
        endpoint = process.stdout.readline().strip()
        bound = inference_bound_mib(base_mib=own_mib(process.pid), **INFERENCE_LIMITS)
        peak = Peak(process.pid)
        async with open_aio_channel(endpoint) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            stub.endpoint = endpoint
            for name, run in inference.ATTACKS.items():
                start = time.monotonic()
                _say(f"{name}: {await run(stub)}; {own_mib(process.pid):.0f} MiB, {time.monotonic() - start:.1f} s")
                await inference.check(stub)
        peak.close()
    _say(f"inference service: peak {peak.mib:.0f} MiB, bound {bound:.0f} MiB ({INFERENCE_LIMITS})")
    return peak.mib <= bound


def _start(folder: Path, limits: dict[str, int]) -> Store:
    folder.mkdir()
    flags = [word for name, value in limits.items() for word in ("--" + name.replace("_", "-"), str(value))]
    # 10 s: in "200 busy streams", each of 200 threads of one process may wait for seconds on a busy machine.
    return Store(folder, *flags, "--first-message-seconds", "10", "--stall-seconds", "10")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
