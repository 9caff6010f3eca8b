"""`python -m bench.host`: the cost of the taps on the host in each step of a running batch, without an engine.

This cost delays every step, because the next forward pass starts only after the taps are placed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from bench.host.loop import Captures, DecodeLoop, Device, Steering
from bench.machine import describe
from bench.options import add_output, numbers, positive
from bench.output import write_result

_WARMUP_STEPS = 64
"""Two blocks of every request. After them all tables are written and all lists have their final size."""
_CACHE_BYTES = 8 << 20
"""More than a core's own caches hold."""
_CACHE_LINE = 64


@dataclass(frozen=True)
class Cost:
    """The cost of a step on the host."""

    requests: int
    """The number of requests. Each generates a token in the step of its batch."""
    captures: Captures
    """The positions that are captured, at every layer."""
    steering: Steering
    median_us: float
    """Microseconds of a step, the median."""
    p95_us: float
    """Microseconds of a step, the 95th percentile."""
    us_per_request: float
    """The median divided by the requests of a step; 0 without requests."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    options = parse(arguments)
    context = {
        "benchmark": "bench.host",
        **describe(),
        "device": options.device.value,
        "layers": options.layers,
        "steps": options.steps,
        "batches": options.batches,
        "cold": options.cold,
    }
    costs = []
    print("requests\tcaptures\tsteering\tus/step\tp95\tus/request")
    for captures, steering in _KINDS:
        for requests in options.requests:
            loop = DecodeLoop(
                requests,
                options.layers,
                device=options.device,
                captures=captures,
                steering=steering,
                batches=options.batches,
            )
            costs.append(
                cost_of(
                    requests,
                    times_of(loop, options.steps, OtherWork() if options.cold else None),
                    captures=captures,
                    steering=steering,
                    batches=options.batches,
                )
            )
            print(line(costs[-1]), flush=True)
    if options.output:
        write_result(options.output, {**context, "costs": [asdict(cost) for cost in costs]})


_KINDS = (
    (Captures.ALL, Steering.NONE),
    (Captures.REPLY, Steering.NONE),
    (Captures.NONE, Steering.SHARED),
    (Captures.NONE, Steering.REQUEST),
    (Captures.ALL, Steering.SHARED),
    (Captures.ALL, Steering.REQUEST),
)
"""The measured combinations: which positions are captured, and how requests are steered."""


class OtherWork:
    """Work between two steps that fills the processor's caches, as an engine's own work does."""

    def __init__(self) -> None:
        """Allocate what the work touches."""
        self._memory = np.zeros(_CACHE_BYTES, dtype=np.uint8)
        self._document = {f"name-{index}": list(range(20)) for index in range(60)}

    def run(self) -> None:
        """Touch every line of the memory, and run some Python."""
        self._memory[::_CACHE_LINE] += 1
        for _ in range(10):
            json.loads(json.dumps(self._document))


def times_of(loop: DecodeLoop, steps: int, other: OtherWork | None = None) -> list[float]:
    """Return the seconds of `place` and `finish_step` together, for each step.

    Args:
        loop: What is measured.
        steps: How many steps.
        other: The work before each of them; None: none, so that all code and data are in the caches.
    """
    for _ in range(_WARMUP_STEPS):
        loop.step()
    times = []
    for _ in range(steps):
        loop.begin()
        if other:
            other.run()
        start = time.perf_counter()
        loop.place_and_finish()
        times.append(time.perf_counter() - start)
    return times


def cost_of(requests: int, times: Sequence[float], *, captures: Captures, steering: Steering, batches: int = 1) -> Cost:
    """Return the cost from the seconds of all steps."""
    median = statistics.median(times) * 1e6
    return Cost(
        requests=requests,
        captures=captures,
        steering=steering,
        median_us=median,
        p95_us=sorted(times)[len(times) * 19 // 20] * 1e6,
        us_per_request=median * batches / requests if requests else 0.0,
    )


def line(cost: Cost) -> str:
    """Return the printed line of a cost."""
    figures = f"{cost.median_us:.1f}\t{cost.p95_us:.1f}\t{cost.us_per_request:.2f}"
    return f"{cost.requests}\t{cost.captures.value}\t{cost.steering.value}\t{figures}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__)
    parser.add_argument(
        "--requests", type=numbers, default=[0, 1, 8, 32, 128, 256], help="requests in the batch, separated by commas"
    )
    parser.add_argument(
        "--batches",
        type=positive,
        default=1,
        help="batches that take turns, as with pipeline parallelism; each has its part of the requests (default: 1)",
    )
    parser.add_argument("--layers", type=int, default=36, help="layers of the model; all are captured and steered")
    parser.add_argument(
        "--cold",
        action="store_true",
        help="fill the processor's caches before each step, as an engine's own work does: then a step takes several "
        "times as long",
    )
    parser.add_argument("--steps", type=int, default=1000, help="measured steps")
    parser.add_argument(
        "--device", type=Device, choices=list(Device), metavar="{none,host,cuda}",
        default=Device.CUDA if torch.cuda.is_available() else Device.HOST,
        help="the tap that a step is passed to: the GPU's tap (cuda; the default with a GPU), that tap in host memory "
        "(host), or none",
    )  # fmt: skip
    add_output(parser)
    options = parser.parse_args(arguments)
    if any(requests % options.batches for requests in options.requests):
        parser.error("--requests must be multiples of --batches, so that all batches are alike")
    return options


if __name__ == "__main__":
    main()
