"""Measures the time of a kernel: in a CUDA graph, as in production, and launched one by one."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

_T = TypeVar("_T")

SAMPLES = 7
"""The number of measured times; the median is reported."""

_SAMPLE_US = 2000.0
"""The least length of a sample. Events have a resolution of half a microsecond, and the GPU's clock must settle."""
_WARMUPS = 3
_MOST_WARMUPS = 32
"""Enough for the tap points of all layers, for which Triton compiles more than one kernel."""
_WARM_UP_PRODUCTS = 2000
_MOST_REPEATS = 2000


@dataclass(frozen=True)
class Times:
    """Microseconds of one launch."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The reported time."""
        return statistics.median(self.samples)

    def to_json(self) -> dict[str, float | list[float]]:
        """Return the times as plain data."""
        return {"us": round(self.median, 3), "samples": [round(sample, 3) for sample in self.samples]}


def warm_up() -> None:
    """Run the GPU until its clock reaches its rate under load."""
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(_WARM_UP_PRODUCTS):
        matrix = matrix @ matrix / 64
    torch.cuda.synchronize()


def in_graph(launch: Callable[[int], object], launches: int, *, keep: bool) -> Times:
    """Return the time of one of `launches` in a replayed CUDA graph.

    Args:
        launch: The launch, which gets its number.
        launches: The number of launches in the graph.
        keep: Whether the result of each launch has its own memory, instead of the same memory for all.
    """
    graph, returned = capture(launch, launches, keep=keep)
    times = sampled(graph.replay, launches)
    del returned  # the graph's memory must not be reused before this point
    return times


def launched(launch: Callable[[int], object]) -> Times:
    """Return the time of a launch when the host launches one after the other."""
    numbers = itertools.count()
    return sampled(lambda: launch(next(numbers)), 1)


def capture(launch: Callable[[int], _T], launches: int, *, keep: bool = True) -> tuple[torch.cuda.CUDAGraph, list[_T]]:
    """Return a CUDA graph of some launches, and their results if `keep`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compilation and allocation of the first calls happen here
        for number in range(max(_WARMUPS, min(launches, _MOST_WARMUPS))):
            launch(number)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    returned: list[_T] = []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for number in range(launches):
            if keep:
                returned.append(launch(number))
            else:
                launch(number)
    return graph, returned


def sampled(run: Callable[[], object], launches: int) -> Times:
    """Return the time of a launch in a run of `launches`."""
    for _ in range(_WARMUPS):
        run()
    once = _microseconds(run, 1)
    repeats = max(1, min(_MOST_REPEATS, round(_SAMPLE_US / max(once, 1.0))))
    return Times(tuple(_microseconds(run, repeats) / (repeats * launches) for _ in range(SAMPLES)))


def _microseconds(run: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
