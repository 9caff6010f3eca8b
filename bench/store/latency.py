"""Part `latency`: the time to read one layer of one request from a full store, and to a follower's first row."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import residuum
from bench.machine import filesystem
from bench.output import table
from bench.processes import RunFailedError
from bench.store.captures import Shape
from bench.store.lane import Lane, running_lane

_GIB = 1 << 30
_CAPTURES_AT_ONCE = 32
_FOLLOW_SECONDS = 30.0
_SETTLE_SECONDS = 0.05


@dataclass(frozen=True)
class LatencyJob:
    """The stored captures, and the number of reads."""

    shape: Shape
    """The shape of each capture."""
    store_gib: float
    """The least size of the rows in the store."""
    reads: int = 500
    follows: int = 50
    shippers: int = 1
    ring_mib: int = 256

    @property
    def captures(self) -> int:
        """The number of captures in the store."""
        return -(-int(self.store_gib * _GIB) // self.shape.num_bytes)


def measure(job: LatencyJob, folder: Path) -> dict[str, Any]:
    """Measure with the store's data in a folder; return the part of the result."""
    max_gib = int(job.store_gib * 1.25) + 2
    with running_lane(folder / "lane", shippers=job.shippers, ring_mib=job.ring_mib, max_gib=max_gib) as lane:
        captures = [f"stored-{number}" for number in range(job.captures)]
        started = time.perf_counter()
        for at in range(0, len(captures), _CAPTURES_AT_ONCE):
            some = captures[at : at + _CAPTURES_AT_ONCE]
            lane.open(some, job.shape)
            lane.feed(some, job.shape)
            lane.seal(some, job.shape)
        fill_seconds = time.perf_counter() - started
        reads = list(_reads(lane.client, job, captures))
        with residuum.Client(lane.endpoint, store=lane.endpoint, shared_memory=False) as client:
            reads_in_messages = [seconds for _, seconds in _reads(client, job, captures)]
        follows = list(_follows(lane, job))
    return {
        "parameters": {
            **asdict(job),
            "captures": job.captures,
            "stored_bytes": job.captures * job.shape.num_bytes,
            "bytes_per_read": job.shape.num_bytes // job.shape.layers,
            "filesystem": filesystem(folder),
        },
        "fill_seconds": round(fill_seconds, 2),
        "read_ms": summary([seconds for _, seconds in reads]),
        "first_read_ms": summary(_firsts(reads, captures[0])),
        "read_in_messages_ms": summary(reads_in_messages),
        "first_row_ms": summary(follows),
    }


def _reads(client: residuum.Client, job: LatencyJob, captures: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield a capture and the seconds of reading one layer of it, both chosen randomly each time."""
    source = random.Random(0)  # noqa: S311 - repeatable, not secret
    client.activations(captures[0], layers=[0])  # opens the connection
    for _ in range(job.reads):
        capture_id, layer = source.choice(captures), source.randrange(job.shape.layers)
        started = time.perf_counter()
        rows = client.activations(capture_id, layers=[layer]).raw(layer)
        yield capture_id, time.perf_counter() - started
        if rows.shape != (job.shape.positions, job.shape.hidden):
            raise RunFailedError(f"{capture_id}: layer {layer} came as {rows.shape}")


def _firsts(reads: Sequence[tuple[str, float]], known: str) -> list[float]:
    """Return the seconds of each capture's first read, before which no page of it is in the store's memory map.

    Those of the capture `known` are left out: it was read before.
    """
    return [seconds for capture_id, seconds in dict(reversed(reads)).items() if capture_id != known]


def _follows(lane: Lane, job: LatencyJob) -> Iterator[float]:
    """Yield the seconds from passing a block to the shippers until a follower has its first row."""
    shape = Shape(job.shape.layers, job.shape.hidden, 32)
    for number in range(job.follows):
        capture_id = f"followed-{number}"
        lane.open([capture_id], shape)
        follower = _Follower(lane, capture_id, shape.layers // 2)
        time.sleep(_SETTLE_SECONDS)  # until the follower waits in the store
        fed = lane.feed([capture_id], shape)
        lane.seal([capture_id], shape)
        yield follower.first_row_at() - fed.started


class _Follower(threading.Thread):
    """Follows one layer of a capture."""

    def __init__(self, lane: Lane, capture_id: str, layer: int) -> None:
        super().__init__(daemon=True)
        self._pieces = lane.client.follow(capture_id, layers=[layer])
        self._first: float | None = None
        self.start()

    def run(self) -> None:
        """Read all rows, and record the arrival of the first."""
        for _ in self._pieces:
            self._first = self._first or time.monotonic()

    def first_row_at(self) -> float:
        """Wait for the end of the capture; return the arrival of the first row on the monotonic clock."""
        self.join(_FOLLOW_SECONDS)
        if self.is_alive() or self._first is None:
            raise RunFailedError("a follower did not get its rows")
        return self._first


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the quantiles of some times, in milliseconds."""
    times = sorted(seconds)
    return {"count": len(times), **{name: round(1e3 * quantile(times, at), 3) for name, at in _QUANTILES.items()}}


_QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def quantile(ordered: Sequence[float], at: float) -> float:
    """Return the smallest value that at least a share `at` of the values do not exceed."""
    return ordered[max(0, math.ceil(at * len(ordered)) - 1)]


def show(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table."""
    size = part["parameters"]["stored_bytes"] / _GIB
    yield f"{part['parameters']['captures']} captures, {size:.1f} GiB in the store"
    names = {
        "read_ms": "one layer of one request",
        "first_read_ms": "the first read of each request",
        "read_in_messages_ms": "the same without shared memory",
        "first_row_ms": "first row while following",
    }
    rows = [[name, *(f"{part[key][at]:.1f}" for at in _QUANTILES)] for key, name in names.items() if key in part]
    yield table(["ms", *_QUANTILES], rows)
