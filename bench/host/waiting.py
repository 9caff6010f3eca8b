"""`python -m bench.host.waiting`: how long the engine's thread waits for the other threads of the worker, per step.

A thread waits if another one holds the interpreter's lock (the GIL), or a lock that it needs. The engine's thread gives
up the GIL in every call of torch and CUDA, so each of them may wait.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.host.loop import Device
from bench.host.serving import Batch, Load, Worker
from bench.machine import describe
from bench.options import add_output, positive, positives
from bench.output import write_result

_WARMUP_STEPS = 200
_TIMER_SLACK = 29  # PR_SET_TIMERSLACK
_MAY_HAVE_WAITED = 20e-6
"""Seconds. A shorter call is not looked at more closely."""

_LIBC = ctypes.CDLL(None)
"""ctypes gives up the GIL in every call of its functions, like torch and CUDA in theirs."""


@dataclass(frozen=True)
class Waiting:
    """What the engine's thread waited in the steps of one round, in microseconds."""

    threads: str
    """Whether the worker's other threads were idle or working."""
    switch_us: int
    """The interpreter's switch interval."""
    median_us: float
    """Waiting per step, for the GIL and for locks. Time without a core is left out."""
    p95_us: float
    p99_us: float
    max_us: float
    longest_us: float
    """The longest wait for one call."""
    host_us: float
    """Median time of the host's part of a step, without the sleep for the device."""
    no_core_us: float
    """Mean time per step in which the engine's thread could run but had no core."""
    ours_us: float
    """Processor time of the worker's other threads, per step."""
    blocks: float
    """Blocks that left, per step."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    options = parse(arguments)
    load = Load(
        options.requests,
        options.prompt_tokens,
        options.new_tokens,
        options.layers,
        options.sites,
        options.step_ms / 1e3,
    )
    intervals = [interval / 1e6 for interval in options.switch_us] or [sys.getswitchinterval()]
    with tempfile.TemporaryDirectory() as folder, Worker.running(load, options.device, Path(folder)) as worker:
        _LIBC.prctl(_TIMER_SLACK, 1, 0, 0, 0)  # sleeps end on time
        kinds = [(interval, ships) for interval in intervals for ships in (False, True)] * options.rounds
        rounds = [measure(worker, options, interval, ships=ships) for interval, ships in kinds]
    print("threads\tswitch\t" + "\t".join(_FIGURES.values()))
    for (threads, switch), found in grouped(rounds).items():
        print(line(threads, switch, found), flush=True)
    if options.output:
        write_result(
            options.output,
            {
                "benchmark": "bench.host.waiting",
                **describe(),
                "device": options.device.value,
                "load": asdict(load),
                "calls": options.calls,
                "steps": options.steps,
                "rounds": [asdict(waiting) for waiting in rounds],
            },
        )


_FIGURES = {
    "median_us": "wait/step",
    "p95_us": "p95",
    "p99_us": "p99",
    "max_us": "max",
    "longest_us": "longest",
    "host_us": "host/step",
    "no_core_us": "no core",
    "ours_us": "ours/step",
    "blocks": "blocks",
}
"""The printed figures, and their titles."""


def measure(worker: Worker, options: argparse.Namespace, switch_seconds: float, *, ships: bool) -> Waiting:
    """Run the steps of one round, and return what the engine's thread waited in them."""
    batch = Batch(worker, ships=ships)
    engine = Engine(worker, batch, options.calls)
    before = sys.getswitchinterval()
    sys.setswitchinterval(switch_seconds)
    try:
        for _ in range(max(_WARMUP_STEPS, worker.load.new_tokens + 1)):
            engine.step()
        gc.collect()
        engine.forget()
        published, ours = worker.producer.stats().published, _seconds_of_threads()
        for _ in range(options.steps):
            engine.step()
        ours = _seconds_of_threads() - ours
        published = worker.producer.stats().published - published
        batch.end()
        worker.drain()
    finally:
        sys.setswitchinterval(before)
    waits = sorted(engine.waits)
    return Waiting(
        threads="working" if ships else "idle",
        switch_us=round(switch_seconds * 1e6),
        median_us=statistics.median(waits) * 1e6,
        p95_us=waits[len(waits) * 95 // 100] * 1e6,
        p99_us=waits[len(waits) * 99 // 100] * 1e6,
        max_us=waits[-1] * 1e6,
        longest_us=engine.longest * 1e6,
        host_us=statistics.median(engine.hosts) * 1e6,
        no_core_us=engine.no_core / len(waits) * 1e6,
        ours_us=ours / len(waits) * 1e6,
        blocks=published / len(waits),
    )


class Engine:
    """The engine's thread: it does the taps' work, calls functions that give up the GIL, and waits for the device."""

    def __init__(self, worker: Worker, batch: Batch, calls: int) -> None:
        self._worker, self._batch, self._calls = worker, batch, calls
        self._schedule = open_schedule(threading.get_native_id())
        self._end = 0.0
        self.forget()

    def forget(self) -> None:
        """Drop what was measured."""
        self.waits: list[float] = []
        """Seconds of waiting in each step."""
        self.hosts: list[float] = []
        """Seconds of the host's part of each step."""
        self.longest = 0.0
        """Seconds of the longest wait in one call."""
        self.no_core = 0.0
        """Seconds without a core, in all steps."""

    def step(self) -> None:
        """Run a step: prepare it, launch it, hand over full blocks, sample, wait for the device."""
        delay, cpu, start = self._delay(), time.thread_time(), time.perf_counter()
        self._worker.clock.model = self._end = start + self._worker.load.step_seconds
        self._batch.prepare()
        self._call(self._calls // 2)
        self._batch.finish()
        self._call(self._calls - self._calls // 2)
        host, used = time.perf_counter() - start, time.thread_time() - cpu
        time.sleep(max(self._end - time.perf_counter(), 0.0))
        late = max(time.perf_counter() - self._end, 0.0) if host < self._worker.load.step_seconds else 0.0
        no_core = self._delay() - delay
        self.waits.append(max(host - used + late - no_core, 0.0))
        self.hosts.append(host)
        self.no_core += no_core
        self.longest = max(self.longest, late - no_core)

    def _call(self, count: int) -> None:
        """Call functions that give up the GIL and return at once, with some Python in between, as engines do."""
        clock, call = time.perf_counter, _LIBC.getppid
        for _ in range(count):
            for _ in range(_PYTHON_BETWEEN_CALLS):
                pass
            start = clock()
            call()
            took = clock() - start
            if took > _MAY_HAVE_WAITED and took > self.longest:
                self.longest = max(self.longest, took - self._delay_since_last())

    def _delay(self) -> float:
        self._last_delay = run_delay(self._schedule)
        return self._last_delay

    def _delay_since_last(self) -> float:
        last = self._last_delay
        return self._delay() - last


_PYTHON_BETWEEN_CALLS = 300
"""Turns of an empty loop, about 5 µs."""


def open_schedule(thread: int) -> int | None:
    """Open the kernel's figures of a thread; None if it keeps none."""
    try:
        return os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
    except OSError:
        return None


def run_delay(schedule: int | None) -> float:
    """Return the seconds in which a thread could have run but had no core; 0 if that is unknown."""
    return int(os.pread(schedule, 128, 0).split()[1]) / 1e9 if schedule is not None else 0.0


def _seconds_of_threads() -> float:
    """Return the processor time of the worker's other threads."""
    total = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith("residuum-"):
            clock = time.pthread_getcpuclockid(thread.ident)  # type: ignore[arg-type]
            total += time.clock_gettime(clock)
    return total


def grouped(rounds: Sequence[Waiting]) -> dict[tuple[str, int], list[Waiting]]:
    """Return the rounds of each kind."""
    groups: dict[tuple[str, int], list[Waiting]] = {}
    for waiting in rounds:
        groups.setdefault((waiting.threads, waiting.switch_us), []).append(waiting)
    return groups


def line(threads: str, switch_us: int, rounds: Sequence[Waiting]) -> str:
    """Return the printed line of a kind: of each figure the median of the rounds, the lowest and the highest."""
    cells = []
    for name in _FIGURES:
        values = sorted(getattr(waiting, name) for waiting in rounds)
        digits = 1 if name == "blocks" else 0
        cells.append(f"{statistics.median(values):.{digits}f} ({values[0]:.{digits}f}–{values[-1]:.{digits}f})")
    return f"{threads}\t{switch_us}\t" + "\t".join(cells)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.host.waiting", description=__doc__)
    parser.add_argument("--requests", type=positive, default=64, help="requests that run at once")
    parser.add_argument("--prompt-tokens", type=positive, default=512, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=positive, default=128, help="tokens that a request generates")
    parser.add_argument("--layers", type=positive, default=36, help="layers of the model; all are captured")
    parser.add_argument("--sites", type=int, choices=range(1, 5), default=1, help="captured sites of each layer")
    parser.add_argument("--step-ms", type=float, default=10.0, help="milliseconds of a step on the device")
    parser.add_argument("--calls", type=positive, default=100, help="calls of a step that give up the GIL")
    parser.add_argument("--steps", type=positive, default=500, help="measured steps of a round")
    parser.add_argument("--rounds", type=positive, default=5, help="rounds; in each, all kinds take turns")
    parser.add_argument(
        "--switch-us", type=positives, default=(),
        help="switch intervals in microseconds, separated by commas (default: the interpreter's)",
    )  # fmt: skip
    parser.add_argument(
        "--device", type=Device, choices=[Device.HOST, Device.CUDA], metavar="{host,cuda}",
        default=Device.CUDA if torch.cuda.is_available() else Device.HOST,
        help="the GPU's tap and sink (cuda; the default with a GPU), or the same with a clock instead of a GPU (host)",
    )  # fmt: skip
    add_output(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
