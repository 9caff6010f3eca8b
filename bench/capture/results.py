"""What runs measured, and what follows from it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.capture.workload import Mode

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Iteration:
    """One iteration: the whole batch, submitted at once."""

    generation_seconds: float
    """From the submission to the last token of the last reply."""
    settled_seconds: float
    """From the submission until every captured row was acknowledged; the same as above if nothing is captured."""
    prompt_tokens: int
    generated_tokens: int
    rows: int
    """Rows that arrived, of all layers and requests; each of them was asked for."""
    num_bytes: int
    """Their size."""
    replies: tuple[str, ...]
    """A digest of each reply's token ids, in the order of the prompts."""


@dataclass(frozen=True)
class Run:
    """What one process measured."""

    mode: Mode
    round: int
    device: str
    num_layers: int
    start_seconds: float
    """Until the engine was ready: load, compile, self-test."""
    peak_mib: dict[str, int]
    """Peak resident memory by kind of process. Shared pages count in each process that touches them."""
    capture_pool_mib: float
    """Device memory of capture blocks."""
    ring_mib: float
    """Shared host memory of the ring."""
    iterations: tuple[Iteration, ...]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        """Return the run that its process wrote as plain data."""
        iterations = tuple(Iteration(**{**item, "replies": tuple(item["replies"])}) for item in data["iterations"])
        return cls(**{**data, "mode": Mode(data["mode"]), "iterations": iterations})


@dataclass(frozen=True)
class Times:
    """One figure of a mode over all its iterations."""

    median: float
    min: float
    max: float
    ratio_to_stock: float | None
    """Median over median, all rounds together. None without stock."""
    ratio_of_best: float | None
    """Shortest over shortest: what a machine that others use as well disturbs least."""
    ratio_by_round: tuple[float, ...]
    """The same within each round: how far apart they are says how much the ratio is worth."""


@dataclass(frozen=True)
class ModeSummary:
    """A mode over all rounds."""

    mode: Mode
    generation_seconds: Times
    settled_seconds: Times
    tokens_per_second: float
    """Generated tokens, over the median generation."""
    rows_per_iteration: int
    bytes_per_iteration: int
    peak_mib: dict[str, int]
    replies_as_stock: float | None
    """The share of replies that equal stock's, token by token. Steering must lower it; taps that only look must not."""


def summarise(runs: Sequence[Run]) -> list[ModeSummary]:
    """Return a summary of each mode, in the order in which they first ran."""
    stock = [run for run in runs if run.mode is Mode.STOCK]
    modes = list(dict.fromkeys(run.mode for run in runs))
    return [_summarise_mode([run for run in runs if run.mode is mode], stock) for mode in modes]


def _summarise_mode(runs: Sequence[Run], stock: Sequence[Run]) -> ModeSummary:
    generation = _times(runs, stock, "generation_seconds")
    first = runs[0].iterations[0]
    return ModeSummary(
        mode=runs[0].mode,
        generation_seconds=generation,
        settled_seconds=_times(runs, stock, "settled_seconds"),
        tokens_per_second=first.generated_tokens / generation.median,
        rows_per_iteration=first.rows,
        bytes_per_iteration=first.num_bytes,
        peak_mib={kind: max(run.peak_mib.get(kind, 0) for run in runs) for run in runs for kind in run.peak_mib},
        replies_as_stock=_agreement(runs, stock),
    )


def _times(runs: Sequence[Run], stock: Sequence[Run], field: str) -> Times:
    times = _all_times(runs, field)
    median = statistics.median(times)
    stock_times = _all_times(stock, field)
    stock_by_round = {run.round: statistics.median(_all_times([run], field)) for run in stock}
    return Times(
        median=median,
        min=min(times),
        max=max(times),
        ratio_to_stock=median / statistics.median(stock_times) if stock_times else None,
        ratio_of_best=min(times) / min(stock_times) if stock_times else None,
        ratio_by_round=tuple(
            statistics.median(_all_times([run], field)) / stock_by_round[run.round]
            for run in sorted(runs, key=lambda run: run.round)
            if run.round in stock_by_round
        ),
    )


def _all_times(runs: Sequence[Run], field: str) -> list[float]:
    return [getattr(iteration, field) for run in runs for iteration in run.iterations]


def _agreement(runs: Sequence[Run], stock: Sequence[Run]) -> float | None:
    if not stock:
        return None
    expected = [reply for iteration in stock[0].iterations for reply in iteration.replies]
    same = [
        reply == want
        for run in runs
        for reply, want in zip(
            (reply for iteration in run.iterations for reply in iteration.replies), expected, strict=True
        )
    ]
    return statistics.mean(same)
