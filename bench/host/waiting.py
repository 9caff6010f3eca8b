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
from typing import Any, NamedTuple

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
_LACKING = 200e-6
"""Seconds without a core, of all threads together, from which a step is not quiet."""

_PRINTED_CALLS = 12

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
    quiet: float
    """The part of the steps in which no thread of the worker lacked a core. The next figures are of these steps. In the
    others, a thread may have held the GIL and not run, so the engine's thread also waited for other processes."""
    quiet_p95_us: float
    quiet_longest_us: float
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
    intervals = [interval / 1e6 for interval in options.switch_us]
    calls = LongCalls() if options.c_calls else None
    if calls:
        calls.watch()
    with tempfile.TemporaryDirectory() as folder, Worker.running(load, options.device, Path(folder)) as worker:
        _LIBC.prctl(_TIMER_SLACK, 1, 0, 0, 0)  # sleeps end on time
        kinds = [(interval, ships) for interval in intervals for ships in (False, True)] * options.rounds
        if calls:
            measure(worker, options, intervals[0], ships=True)
            calls.is_on = True
        rounds = [measure(worker, options, interval, ships=ships) for interval, ships in kinds]
    if calls:
        print_calls(calls)
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
                "c_calls": calls.figures() if calls else None,
                "rounds": [asdict(waiting) for waiting in rounds],
            },
        )


_FIGURES = {
    "median_us": "wait/step",
    "p95_us": "p95",
    "p99_us": "p99",
    "max_us": "max",
    "longest_us": "longest",
    "quiet": "quiet",
    "quiet_p95_us": "its p95",
    "quiet_longest_us": "its longest",
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
        engine.steps.clear()
        published, ours = worker.producer.stats().published, _seconds_of_threads()
        for _ in range(options.steps):
            engine.step()
        ours = _seconds_of_threads() - ours
        published = worker.producer.stats().published - published
        batch.end()
        worker.drain()
    finally:
        sys.setswitchinterval(before)
        engine.close()
    waits = sorted(step.wait for step in engine.steps)
    quiet = [step for step in engine.steps if step.is_quiet]
    quiet_waits = sorted(step.wait for step in quiet) or [0.0]
    return Waiting(
        threads="working" if ships else "idle",
        switch_us=round(switch_seconds * 1e6),
        median_us=statistics.median(waits) * 1e6,
        p95_us=waits[len(waits) * 95 // 100] * 1e6,
        p99_us=waits[len(waits) * 99 // 100] * 1e6,
        max_us=waits[-1] * 1e6,
        longest_us=max(step.longest for step in engine.steps) * 1e6,
        quiet=len(quiet) / len(waits),
        quiet_p95_us=quiet_waits[len(quiet_waits) * 95 // 100] * 1e6,
        quiet_longest_us=max((step.longest for step in quiet), default=0.0) * 1e6,
        host_us=statistics.median(step.host for step in engine.steps) * 1e6,
        no_core_us=statistics.mean(step.no_core for step in engine.steps) * 1e6,
        ours_us=ours / len(waits) * 1e6,
        blocks=published / len(waits),
    )


class Step(NamedTuple):
    """What was measured in one step, in seconds."""

    wait: float
    longest: float
    """The longest wait of one call."""
    host: float
    """The host's part of the step."""
    no_core: float
    """Time in which the engine's thread could run but had no core."""
    is_quiet: bool
    """Whether no thread of the worker lacked a core."""


class Engine:
    """The engine's thread: it does the taps' work, calls functions that give up the GIL, and waits for the device."""

    def __init__(self, worker: Worker, batch: Batch, calls: int) -> None:
        self._worker, self._batch, self._calls = worker, batch, calls
        self._own = RunDelay(threading.get_native_id())
        self._others = [RunDelay(thread.native_id) for thread in _worker_threads() if thread.native_id]
        self._longest = 0.0
        self.steps: list[Step] = []
        """What was measured."""

    def close(self) -> None:
        """Release what the measuring took."""
        for delay in (self._own, *self._others):
            delay.close()

    def step(self) -> None:
        """Run a step: prepare it, launch it, hand over full blocks, sample, wait for the device."""
        self._own.since_last()
        self._longest = no_core = 0.0
        cpu, start = time.thread_time(), time.perf_counter()
        self._worker.clock.model = end = start + self._worker.load.step_seconds
        self._batch.prepare()
        no_core += self._call(self._calls // 2)
        self._batch.finish()
        no_core += self._call(self._calls - self._calls // 2)
        host, used = time.perf_counter() - start, time.thread_time() - cpu
        no_core += self._own.since_last()
        time.sleep(max(end - time.perf_counter(), 0.0))
        late = max(time.perf_counter() - end, 0.0) if host < self._worker.load.step_seconds else 0.0
        no_core_late = self._own.since_last()
        self._longest = max(self._longest, late - no_core_late)
        no_core += no_core_late
        lacking = no_core + sum(other.since_last() for other in self._others)
        wait = max(host - used + late - no_core, 0.0)
        self.steps.append(Step(wait, self._longest, host, no_core, lacking < _LACKING))

    def _call(self, count: int) -> float:
        """Call functions that give up the GIL and return at once, with some Python in between, as engines do.

        Returns:
            Seconds without a core that were noticed.
        """
        clock, call = time.perf_counter, _LIBC.getppid
        no_core = 0.0
        for _ in range(count):
            for _ in range(_PYTHON_BETWEEN_CALLS):
                pass
            start = clock()
            call()
            took = clock() - start
            if took > _MAY_HAVE_WAITED and took > self._longest:
                without = self._own.since_last()
                no_core += without
                self._longest = max(self._longest, took - without)
        return no_core


class LongCalls:
    """The longest calls of C functions in the worker's other threads, in processor time.

    Between two instructions of Python, a thread gives up the GIL after the switch interval. Within a call of a C
    function it keeps the GIL, unless the function gives it up. So no hold is longer than the switch interval and the
    longest of these calls together.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}
        self._started = threading.local()
        self.is_on = False
        """Whether calls are measured."""

    def watch(self) -> None:
        """Watch all threads that start from now on. This makes them slower."""
        threading.setprofile(self._profile)

    def _profile(self, _frame: object, event: str, function: Any) -> None:
        if event == "c_call":
            self._started.at = time.thread_time()
        elif event == "c_return" and self.is_on:
            took = time.thread_time() - self._started.at
            name = f"{function.__module__ or type(function.__self__).__name__}.{function.__name__}"
            self._seconds.setdefault(name, []).append(took)

    def figures(self) -> dict[str, tuple[int, float, float]]:
        """Return the calls of each function, and the 99th percentile and the longest of them in microseconds."""
        return {
            name: (len(found), sorted(found)[len(found) * 99 // 100] * 1e6, max(found) * 1e6)
            for name, found in list(self._seconds.items())
        }


class RunDelay:
    """How long a thread could run but had no core, as the kernel counts it."""

    def __init__(self, thread: int) -> None:
        """Count for a thread of this process. If the kernel does not count, all figures are 0."""
        try:
            self._file: int | None = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None
        self._last = 0.0
        self.since_last()

    def close(self) -> None:
        """Stop counting."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def since_last(self) -> float:
        """Return the seconds since the last call."""
        if self._file is None:
            return 0.0
        last, self._last = self._last, int(os.pread(self._file, 128, 0).split()[1]) / 1e9
        return self._last - last


_PYTHON_BETWEEN_CALLS = 300
"""Turns of an empty loop, about 5 µs."""


def _seconds_of_threads() -> float:
    """Return the processor time of the worker's other threads."""
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in _worker_threads() if thread.ident]
    return sum(map(time.clock_gettime, clocks))


def _worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("residuum-")]


def print_calls(calls: LongCalls) -> None:
    """Print the longest C calls."""
    print("C function\tcalls\tp99\tlongest")
    for name, (count, p99, longest) in sorted(calls.figures().items(), key=lambda item: -item[1][1])[:_PRINTED_CALLS]:
        print(f"{name}\t{count}\t{p99:.0f}\t{longest:.0f}")


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
        digits = 2 if name in {"blocks", "quiet"} else 0
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
        "--switch-us", type=positives, default=(50, 5000),
        help="switch intervals in microseconds, separated by commas (default: 50, and the interpreter's own 5000)",
    )  # fmt: skip
    parser.add_argument(
        "--device", type=Device, choices=[Device.HOST, Device.CUDA], metavar="{host,cuda}",
        default=Device.CUDA if torch.cuda.is_available() else Device.HOST,
        help="the GPU's tap and sink (cuda; the default with a GPU), or the same with a clock instead of a GPU (host)",
    )  # fmt: skip
    parser.add_argument(
        "--c-calls", action="store_true",
        help="also print the longest calls of C functions in the worker's threads, which makes these slower",
    )  # fmt: skip
    add_output(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
