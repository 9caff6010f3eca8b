"""Part `compare`: writes and reads rows with the store and with alternatives, alternately in each round."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.machine import filesystem
from bench.output import Bar, table
from bench.store.captures import Shape, random_bytes
from bench.store.lane import running_lane, running_peer
from bench.store.ways import Flight, Plain, Shipped, Tcp, Way

DIRECTIONS = ("ingest", "read")

MESSAGES = "residuum without shared memory"
"""The same store and client, with the payloads in gRPC's messages: what another machine gets."""

CALLER, BOTH = "stubs", "stubs at both ends"
"""Protobuf's stubs only in the caller of the store, or also in the store (`bench.store.stub_store`)."""

_LIMITS = (
    ("ingest", Flight.name, 0.4, ""),
    ("ingest", Flight.name, 0.6, " (stretch)"),
    ("read", Flight.name, 0.6, ""),
    ("ingest", MESSAGES, 1.0, ""),
    ("read", MESSAGES, 1.5, ""),
    ("ingest", CALLER, 1.5, ""),
    ("read", CALLER, 1.5, ""),
    ("ingest", BOTH, 1.5, ""),
    ("read", BOTH, 1.5, ""),
)
"""The least ratio to the rate of another way."""


@dataclass(frozen=True)
class CompareJob:
    """The captures of each round, and the number of rounds."""

    shape: Shape
    captures: int = 6
    rounds: int = 8
    shippers: int = 1
    ring_mib: int = 256
    max_gib: int = 16


def measure(job: CompareJob, folder: Path) -> dict[str, Any]:
    """Measure with the store's data in a folder; return the part of the result."""
    size = job.captures * job.shape.num_bytes
    with ExitStack() as stack:
        lane = stack.enter_context(
            running_lane(folder / "lane", shippers=job.shippers, ring_mib=job.ring_mib, max_gib=job.max_gib)
        )
        stub_lane = stack.enter_context(
            running_lane(
                folder / "stub-lane", shippers=0, ring_mib=1, max_gib=job.max_gib, store_module="bench.store.stub_store"
            )
        )
        message_lane = stack.enter_context(
            running_lane(
                folder / "message-lane", shippers=job.shippers, ring_mib=job.ring_mib, max_gib=job.max_gib,
                shared_memory=False,
            )
        )  # fmt: skip
        source = random_bytes(job.ring_mib << 20)
        ways: list[Way] = [
            Shipped(lane, job.shape, job.captures, source),
            Shipped(message_lane, job.shape, job.captures, source, MESSAGES),
            Plain(CALLER, lane, job.shape, job.captures, source),
            Plain(BOTH, stub_lane, job.shape, job.captures, source),
            Tcp(stack.enter_context(running_peer("tcp", folder)), size, source),
        ]
        if importlib.util.find_spec("pyarrow"):
            ways.insert(1, Flight(stack.enter_context(running_peer("flight", folder)), size, source))
        for way in ways:
            _run(way, -1)  # warm-up: files grow, buffers are allocated, connections open
        rates: dict[str, dict[str, list[float]]] = {name: {way.name: [] for way in ways} for name in DIRECTIONS}
        for number in range(job.rounds):
            for way in ways if number % 2 == 0 else reversed(ways):
                for direction, seconds in zip(DIRECTIONS, _run(way, number), strict=True):
                    rates[direction][way.name].append(rate(size, seconds))
    return {
        "parameters": {**asdict(job), "bytes_per_round": size, "filesystem": filesystem(folder)},
        "gb_per_second": rates,
        "ratios": {direction: ratios(rates[direction]) for direction in DIRECTIONS},
    }


def _run(way: Way, number: int) -> tuple[float, float]:
    seconds = way.put(number), way.get()
    way.clear()
    return seconds


def rate(num_bytes: int, seconds: float) -> float:
    """Return GB/s with four significant digits, so that ratios of slow rates are accurate."""
    return float(f"{num_bytes / seconds / 1e9:.4g}")


def ratios(rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the ratio of the store's rate to that of each other way: the median over the rounds."""
    ours = rates[Shipped.name]
    return {
        name: round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)
        for name, theirs in rates.items()
        if name != Shipped.name
    }


def bars(part: Mapping[str, Any]) -> list[Bar]:
    """Return the bars. Those of Flight are left out if it is not installed."""
    return [
        Bar(f"{direction} over {name}{stretch}", part["ratios"][direction][name], limit, at_most=False)
        for direction, name, limit, stretch in _LIMITS
        if name in part["ratios"][direction]
    ]


def show(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table."""
    names = list(part["gb_per_second"]["ingest"])
    rates = part["gb_per_second"]
    rows = []
    for name in names:
        ranges = [f"{min(rates[way][name]):.2f}-{max(rates[way][name]):.2f}" for way in DIRECTIONS]
        medians = [f"{statistics.median(rates[way][name]):.2f}" for way in DIRECTIONS]
        ours = [f"{part['ratios'][way][name]:.2f}" if name in part["ratios"][way] else "" for way in DIRECTIONS]
        rows.append([name, *(cell for triple in zip(medians, ranges, ours, strict=True) for cell in triple)])
    head = ["way", *(word for way in DIRECTIONS for word in (f"{way}, GB/s", "range", "we over it"))]
    yield table(head, rows)
    if Flight.name not in names:
        yield "Arrow Flight is not installed, so there is no comparison with it; install the extra `bench`."
