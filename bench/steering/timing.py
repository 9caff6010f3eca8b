"""How long a kernel takes: inside a CUDA graph, where it serves, and launched one by one."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

_T = TypeVar("_T")

SAMPLES = 7
"""Times that are measured, one after the other; the median counts."""

_SAMPLE_US = 2000.0
"""A sample lasts at least this long: events tell half a microsecond, and the GPU's clock has to settle."""
_WARMUPS = 3
_MOST_WARMUPS = 32
"""Covers the tap points of all layers, for which Triton makes more than one kernel."""
_WARM_UP_PRODUCTS = 2000
_MOST_REPEATS = 2000


@dataclass(frozen=True)
class Times:
    """Microseconds of one launch."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The time that counts."""
        return statistics.median(self.samples)

    def to_json(self) -> dict[str, float | list[float]]:
        """Return them as plain data."""
        return {"us": round(self.median, 3), "samples": [round(sample, 3) for sample in self.samples]}


def warm_up() -> None:
    """Let the GPU reach the clock that it keeps under load."""
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(_WARM_UP_PRODUCTS):
        matrix = matrix @ matrix / 64
    torch.cuda.synchronize()


def in_graph(launch: Callable[[int], object], launches: int, *, keep: bool) -> Times:
    """Return the time of a launch among `launches` in one CUDA graph, replayed; `launch` is told its number.

    Args:
        launch: What is measured.
        launches: How often it is in the graph.
        keep: Whether what it returns has memory of its own for each launch, rather than the same for all.
    """
    graph, returned = capture(launch, launches, keep=keep)
    times = sampled(graph.replay, launches)
    del returned  # so far its memory must not be another's
    return times


def launched(launch: Callable[[int], object]) -> Times:
    """Return the time of a launch by the host, one after the other."""
    numbers = itertools.count()
    return sampled(lambda: launch(next(numbers)), 1)


def capture(launch: Callable[[int], _T], launches: int, *, keep: bool = True) -> tuple[torch.cuda.CUDAGraph, list[_T]]:
    """Return a CUDA graph of some launches, and, if they are kept, what they returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what compiles or allots at the first calls does so here
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
    """Return the time of each of the launches that a run makes."""
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
