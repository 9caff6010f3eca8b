"""Part `scale`: the throughput of many shippers into one store with shards, or several stores, on one machine.

With one store, a client also reads the rows while they are written: the time until it holds all of them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.machine import filesystem
from bench.output import Bar, table
from bench.processes import RunFailedError
from bench.store.captures import Shape
from bench.store.lane import Lane, running_lane

_LEAST_GB_PER_SECOND = 5.0


@dataclass(frozen=True)
class ScaleJob:
    """What to measure."""

    shape: Shape
    shippers: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of shippers of all stores together."""
    stores: tuple[int, ...] = (1, 2, 4)
    shards: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of shards of a single store. Each of several stores has one."""
    captures: int = 32
    """Captures in a round, over all stores."""
    rounds: int = 5
    ring_mib: int = 512
    """The size of each store's ring."""
    max_gib: int = 24
    """The maximum size of each store."""

    def cases(self) -> list[tuple[int, int, int]]:
        """Return the measured (stores, shards, shippers). Each store has the same number of shippers."""
        combinations = itertools.product(sorted(self.stores), sorted({1, *self.shards}), sorted(self.shippers))
        return [
            (stores, shards, shippers)
            for stores, shards, shippers in combinations
            if shippers % stores == 0 and (shards in self.shards if stores == 1 else shards == 1)
        ]


def measure(job: ScaleJob, folder: Path) -> dict[str, Any]:
    """Measure with the stores' data in a folder; return the part of the result."""
    cases = []
    for stores, shards, shippers in job.cases():
        rates, held = _measure_case(job, stores, shards, shippers, folder / f"{stores}-{shards}-{shippers}")
        case = {"stores": stores, "shards": shards, "shippers": shippers}
        cases.append({**case, "gb_per_second": rates, "median": _median(rates)})
        if held:
            cases[-1] |= {"held_gb_per_second": held, "held_median": _median(held)}
        print(_line(cases[-1]), flush=True)
    return {"parameters": {**asdict(job), "filesystem": filesystem(folder)}, "cases": cases}


def _measure_case(
    job: ScaleJob, stores: int, shards: int, shippers: int, folder: Path
) -> tuple[list[float], list[float]]:
    """Return the rates of commits; and of rows that a client held, with one store."""
    with ExitStack() as stack:
        lanes = [
            stack.enter_context(
                running_lane(
                    folder / str(number),
                    shippers=shippers // stores,
                    ring_mib=job.ring_mib,
                    max_gib=job.max_gib,
                    shards=shards,
                )
            )
            for number in range(stores)
        ]
        rates, held = [], []
        for number in range(job.rounds + 1):
            rates.append(_round(job, lanes, number))
            held += [_round_with_reader(job, lane, number) for lane in lanes if stores == 1]
        return rates[1:], held[1:]  # the first round is a warm-up in which the files grow


def _round(job: ScaleJob, lanes: Sequence[Lane], number: int) -> float:
    shares = spread([f"{number}-{index}" for index in range(job.captures)], len(lanes))
    for lane, share in zip(lanes, shares, strict=True):
        lane.open(share, job.shape)
    for lane, share in zip(lanes, shares, strict=True):
        lane.start_feeding(share, job.shape)
    fed = [lane.fed() for lane in lanes]
    seconds = max(item.ended for item in fed) - min(item.started for item in fed)
    for lane, share in zip(lanes, shares, strict=True):
        lane.seal(share, job.shape)
        lane.delete(share)
    return _rate(job, seconds)


def _round_with_reader(job: ScaleJob, lane: Lane, number: int) -> float:
    captures = [f"{number}-read-{index}" for index in range(job.captures)]
    lane.open(captures, job.shape)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(_read, lane, captures)
        fed = lane.feed(captures, job.shape)
        lane.seal(captures, job.shape)
        held = reading.result()
    lane.delete(captures)
    return _rate(job, held - fed.started)


def _read(lane: Lane, captures: Sequence[str]) -> float:
    """Read captures, and return when all rows are held."""
    found = lane.client.activations(captures)
    held = time.monotonic()
    if len(found) != len(captures):
        raise RunFailedError(f"{len(found)} of {len(captures)} captures were read")
    return held


def _rate(job: ScaleJob, seconds: float) -> float:
    return round(job.captures * job.shape.num_bytes / seconds / 1e9, 4)


def spread(captures: Sequence[str], stores: int) -> list[list[str]]:
    """Return the captures of each store. Their numbers differ by at most one."""
    return [list(captures[number::stores]) for number in range(stores)]


def _median(rates: Sequence[float]) -> float:
    return sorted(rates)[len(rates) // 2]


def bars(part: Mapping[str, Any]) -> list[Bar]:
    """Return the bar."""
    best = max(case["median"] for case in part["cases"])
    return [Bar("best, GB/s committed", best, _LEAST_GB_PER_SECOND, at_most=False)]


def _line(case: Mapping[str, Any]) -> str:
    rates = " ".join(f"{rate:.2f}" for rate in case["gb_per_second"])
    held = " ".join(f"{rate:.2f}" for rate in case.get("held_gb_per_second", ()))
    return f"{place(case)}, {case['shippers']} shippers: {rates} GB/s" + (f", until held {held}" if held else "")


def place(case: Mapping[str, Any]) -> str:
    """Return where the rows of a case go, in words. Older results have no shards."""
    shards = case.get("shards", 1)
    if case["stores"] > 1:
        return f"{case['stores']} stores"
    return f"1 store, {shards} shards" if shards > 1 else "1 store"


def show(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables: a line for each number of stores or shards, a column for each number of shippers."""
    yield _table("GB/s committed", part["cases"], "median")
    held = [case for case in part["cases"] if "held_median" in case]
    if held:
        yield _table("GB/s until held", held, "held_median")


def _table(head: str, cases: Sequence[Mapping[str, Any]], figure: str) -> str:
    found = {(place(case), case["shippers"]): case[figure] for case in cases}
    shippers = sorted({case["shippers"] for case in cases})
    rows = [
        [line, *(f"{found[line, column]:.2f}" if (line, column) in found else "" for column in shippers)]
        for line in dict.fromkeys(map(place, cases))
    ]
    return table([head, *(f"{count} shippers" for count in shippers)], rows)
