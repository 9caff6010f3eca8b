"""Part `small`: many small captures, read one by one, and in one call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import filesystem
from bench.output import Bar, table
from bench.processes import RunFailedError
from bench.store.captures import Shape
from bench.store.lane import Lane, processor_seconds, running_lane

ONE_BY_ONE, LIST, ROWS, LARGE = "one by one", "activations([ids])", "rows(ids)", "one large capture"

_LEAST_PER_SECOND = 3000.0
_CAPTURES_AT_ONCE = 64


@dataclass(frozen=True)
class SmallJob:
    """What to measure."""

    shape: Shape = field(default_factory=lambda: Shape(layers=1, hidden=256, positions=30))
    """The shape of each small capture."""
    captures: int = 500
    rounds: int = 5
    ring_mib: int = 64
    max_gib: int = 4


@dataclass(frozen=True)
class Run:
    """One read of all captures."""

    seconds: float
    client_seconds: float
    """Processor time of the client's process."""
    store_seconds: float
    """Processor time of the store's process."""


def measure(job: SmallJob, folder: Path) -> dict[str, Any]:
    """Measure with the store's data in a folder; return the part of the result."""
    with running_lane(folder / "lane", shippers=1, ring_mib=job.ring_mib, max_gib=job.max_gib) as lane:
        names = [f"small-{number:05}" for number in range(job.captures)]
        large = replace(job.shape, positions=job.captures * job.shape.positions)
        for at in range(0, len(names), _CAPTURES_AT_ONCE):
            _fill(lane, names[at : at + _CAPTURES_AT_ONCE], job.shape)
        _fill(lane, ["large"], large)
        client = lane.client
        ways: dict[str, Callable[[], Any]] = {
            ONE_BY_ONE: lambda: [client.activations(name) for name in names],
            LIST: lambda: client.activations(names),
            ROWS: lambda: client.rows(names, layer=0),
            LARGE: lambda: client.activations("large"),
        }
        _check(ways, large.positions)
        runs: dict[str, list[Run]] = {name: [] for name in ways}
        for number in range(job.rounds):
            for name, way in list(ways.items())[:: 1 if number % 2 == 0 else -1]:
                runs[name].append(_run(way, lane.store_pid))
    return {
        "parameters": {**asdict(job), "filesystem": filesystem(folder)},
        "runs": {name: [asdict(run) for run in found] for name, found in runs.items()},
        "captures_per_second": {
            name: round(statistics.median(job.captures / run.seconds for run in runs[name]), 1)
            for name in (ONE_BY_ONE, LIST, ROWS)
        },
        "rows_per_second": {
            name: round(statistics.median(large.positions / run.seconds for run in found), 1)
            for name, found in runs.items()
        },
        "ratios": {name: _ratio(runs[ONE_BY_ONE], runs[name]) for name in (LIST, ROWS)},
    }


def _fill(lane: Lane, names: Sequence[str], shape: Shape) -> None:
    lane.open(names, shape)
    lane.feed(names, shape)
    lane.seal(names, shape)


def _check(ways: Mapping[str, Callable[[], Any]], rows: int) -> None:
    """Read in each way once, as a warm-up, and compare the rows."""
    singles = np.concatenate([acts[0] for acts in ways[ONE_BY_ONE]()])
    together = np.concatenate([acts[0] for acts in ways[LIST]()])
    if len(singles) != rows or not np.array_equal(singles, together, equal_nan=True):
        raise RunFailedError("the captures differ when they are read together")
    if not np.array_equal(singles, ways[ROWS]().values, equal_nan=True):
        raise RunFailedError("the array of all rows differs from the captures")
    ways[LARGE]()


def _run(way: Callable[[], Any], store_pid: int) -> Run:
    store, client, started = processor_seconds(store_pid), time.process_time(), time.perf_counter()
    way()
    return Run(
        time.perf_counter() - started, time.process_time() - client, round(processor_seconds(store_pid) - store, 2)
    )


def _ratio(slow: Sequence[Run], fast: Sequence[Run]) -> float:
    """Return the median of the ratios within a round."""
    return round(statistics.median(a.seconds / b.seconds for a, b in zip(slow, fast, strict=True)), 2)


def bars(part: Mapping[str, Any]) -> list[Bar]:
    """Return the bars."""
    found = part["captures_per_second"]
    return [Bar(f"{name}, captures/s", found[name], _LEAST_PER_SECOND, at_most=False) for name in (LIST, ROWS)]


def show(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table: a line for each way."""
    lines = []
    for name, runs in part["runs"].items():
        rate = part["captures_per_second"].get(name)
        ratio = part["ratios"].get(name)
        lines.append(
            [
                name,
                f"{rate:.0f}" if rate else "",
                f"{part['rows_per_second'][name]:.0f}",
                f"{ratio:.1f} ×" if ratio else "",
                *(f"{statistics.median(run[key] for run in runs):.3f}" for key in ("client_seconds", "store_seconds")),
            ]
        )
    yield table(["way", "captures/s", "rows/s", "over one by one", "client CPU s", "store CPU s"], lines)
