"""Part `search`: the tokens of one layer that project most onto a direction, over a whole store."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import filesystem
from bench.output import Bar, table
from bench.processes import RunFailedError
from bench.store.captures import Shape, random_bytes
from bench.store.lane import Lane, processor_seconds, running_lane
from residuum.wire.limits import BLOCK_TOKENS

_LEAST_GB_PER_SECOND = 2.0
_CAPTURES_AT_ONCE = 16
_BLOCK_ROWS = 64
_NUMPY_BYTES = 256 << 20
_GIB = 1 << 30
_ITEM_BYTES = 2
_NAMES = {
    "projection": "projection",
    "cosine": "cosine",
    "numpy_file": "numpy alone, from the store's file",
    "numpy": "numpy alone, from memory",
}


@dataclass(frozen=True)
class SearchJob:
    """What to measure."""

    shape: Shape = field(default_factory=lambda: Shape(layers=4))
    """The shape of each capture. One of its layers is searched."""
    store_gib: float = 20.0
    """The rows in the store, of all layers."""
    rounds: int = 5
    hits: int = 50

    @property
    def captures(self) -> int:
        """The number of captures."""
        return max(int(self.store_gib * _GIB / self.shape.num_bytes), 1)

    @property
    def layer(self) -> int:
        """The layer that is searched."""
        return min(1, self.shape.layers - 1)


def measure(job: SearchJob, folder: Path) -> dict[str, Any]:
    """Measure with the store's data in a folder; return the part of the result."""
    vector = np.random.default_rng(1).standard_normal(job.shape.hidden).astype(np.float32)
    with running_lane(folder / "lane", shippers=1, ring_mib=256, max_gib=int(2 * job.store_gib) + 4) as lane:
        names = [f"c{number:06}" for number in range(job.captures)]
        for first in range(0, len(names), _CAPTURES_AT_ONCE):
            part = names[first : first + _CAPTURES_AT_ONCE]
            lane.open(part, job.shape)
            lane.feed(part, job.shape)
            lane.seal(part, job.shape)
        _check(lane, job, vector)
        ways: dict[str, list[dict[str, float]]] = {name: [] for name in _NAMES}
        for _ in range(job.rounds):
            for measured in ("projection", "cosine"):
                ways[measured].append(_search(lane, job, vector, measured))
            ways["numpy_file"].append(_numpy_of_file(folder / "lane" / "data", job, vector))
            ways["numpy"].append(_numpy(vector))
    return {
        "parameters": {**asdict(job), "captures": job.captures, "filesystem": filesystem(folder)},
        "runs": ways,
        "gb_per_core_second": {
            # Sums, because the kernel counts the store's processor time in steps of 10 ms; at least one step.
            name: round(sum(run["gb"] for run in runs) / max(sum(run["cpu_seconds"] for run in runs), _CLOCK_STEP), 2)
            for name, runs in ways.items()
        },
        "gb_per_second": {
            name: round(statistics.median(run["gb"] / run["seconds"] for run in runs), 2) for name, runs in ways.items()
        },
    }


_CLOCK_STEP = 1 / os.sysconf("SC_CLK_TCK")


def _check(lane: Lane, job: SearchJob, vector: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """Search one capture, and compare the hits with numpy in float64. Then search all, which warms the page cache."""
    acts = lane.client.activations("c000000", layers=[job.layer])
    scores = acts[job.layer].astype(np.float64) @ vector.astype(np.float64)
    found = lane.client.search(vector, layer=job.layer, k=job.hits, captures=["c000000"])
    best = np.argsort(-scores, kind="stable")[: job.hits]
    if [hit.position for hit in found] != best.tolist():
        raise RunFailedError("a search found other rows than numpy")
    found = lane.client.search(vector, layer=job.layer, k=job.hits)
    if found.rows_scanned != job.captures * job.shape.positions or found.left_out or found.rows_without_score:
        raise RunFailedError(f"a search did not scan all rows: {found.summary}")


def _search(
    lane: Lane, job: SearchJob, vector: np.ndarray[Any, np.dtype[np.float32]], measured: Any
) -> dict[str, float]:
    store, started = processor_seconds(lane.store_pid), time.perf_counter()
    found = lane.client.search(vector, layer=job.layer, k=job.hits, measure=measured)
    seconds = time.perf_counter() - started
    return {
        "gb": found.bytes_scanned / 1e9,
        "seconds": round(seconds, 4),
        "cpu_seconds": round(processor_seconds(lane.store_pid) - store, 2),
    }


def _numpy(vector: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, float]:
    """The same arithmetic on one core, on rows that are in memory, one after the other: no store, no pages, no hits."""
    rows = random_bytes(_NUMPY_BYTES).view(np.uint16).reshape(-1, len(vector))
    return _scores([rows], vector)


def _numpy_of_file(data: Path, job: SearchJob, vector: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, float]:
    """The same arithmetic on one core, on pages of the store's largest file: the same part of each frame as a search.

    It takes them at fixed distances without looking at what they are, so headers are among them.
    """
    path, size = max(((path, _used_bytes(path)) for path in data.rglob("*.mdb")), key=lambda item: item[1])
    width, layers = len(vector), job.shape.layers
    words = np.memmap(path, dtype=np.uint16, mode="r", shape=(size // _ITEM_BYTES,))
    frames = words[: len(words) // (width * layers * BLOCK_TOKENS) * (width * layers * BLOCK_TOKENS)]
    rows = frames.reshape(-1, layers, BLOCK_TOKENS, width)[:, job.layer]
    return _scores(rows, vector)


def _used_bytes(path: Path) -> int:
    """Return the bytes of a file that are on the disk: its end may be a hole, or room that is reserved after it."""
    status = path.stat()
    return min(status.st_size, status.st_blocks * 512)


def _scores(
    parts: Iterable[np.ndarray[Any, np.dtype[np.uint16]]], vector: np.ndarray[Any, np.dtype[np.float32]]
) -> dict[str, float]:
    """Compute the scores of rows, [rows, width] in each part, in blocks that fit the cache."""
    bits = np.empty((_BLOCK_ROWS, len(vector)), dtype=np.uint32)
    num_bytes, processor, started = 0, time.thread_time(), time.perf_counter()
    for part in parts:
        for first in range(0, len(part), _BLOCK_ROWS):
            rows = part[first : first + _BLOCK_ROWS]
            np.left_shift(rows, 16, out=bits[: len(rows)], dtype=np.uint32, casting="unsafe")
            np.einsum("ij,j->i", bits[: len(rows)].view(np.float32), vector)
        num_bytes += part.nbytes
    return {
        "gb": num_bytes / 1e9,
        "seconds": round(time.perf_counter() - started, 4),
        "cpu_seconds": round(time.thread_time() - processor, 4),
    }


def bars(part: Mapping[str, Any]) -> list[Bar]:
    """Return the bar."""
    found = part["gb_per_core_second"]["projection"]
    return [Bar("search, GB/s of rows a core", found, _LEAST_GB_PER_SECOND, at_most=False)]


def show(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table: a line for each way."""
    yield table(
        ["way", "GB/s a core", "GB/s"],
        [
            [text, f"{part['gb_per_core_second'][name]:.2f}", f"{part['gb_per_second'][name]:.2f}"]
            for name, text in _NAMES.items()
        ],
    )
