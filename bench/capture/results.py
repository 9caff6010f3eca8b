"""The measurements of runs, and their summaries."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields

from bench.capture.workload import Mode, Runner
from bench.output import percent, table


@dataclass(frozen=True)
class Iteration:
    """One iteration: the whole batch, submitted at the same time."""

    generation_seconds: float
    """Seconds from the submission to the last token of the last reply."""
    settled_seconds: float
    """Seconds from the submission until every captured row was acknowledged. `generation_seconds` if nothing is
    captured."""
    prompt_tokens: int
    generated_tokens: int
    rows: int
    """Rows that arrived, of all layers, sites and requests. Unrequested rows do not count."""
    num_bytes: int
    """The size of those rows in bytes."""
    replies: tuple[str, ...]
    """A digest of each reply's token IDs, in the order of the prompts."""
    completed_seconds: float
    """Seconds from the submission until every capture was COMPLETE in the store. `settled_seconds` without a store."""
    fetched_seconds: float | None = None
    """Seconds from the submission until a client held every captured row as arrays. None if no client fetched."""
    first_tokens_seconds: float | None = None
    """Seconds from the submission until every request had its first token: all prompts are computed. None: unknown."""


@dataclass(frozen=True)
class Memory:
    """The memory of an engine in MiB, all devices and ranks together."""

    peak_mib: dict[str, int]
    """Peak resident host memory by kind of process. A shared page counts in each process that touches it."""
    blocks_mib: float = 0.0
    """Device memory of capture blocks."""
    tables_mib: float = 0.0
    """Device memory of the steering vectors and of the kernel's tables of rows and requests."""
    ring_mib: float = 0.0
    """Shared host memory of the ring."""
    gpus_used_mib: float = 0.0
    """Memory in use on all GPUs at the end of the run, by all processes. 0 without a GPU."""


@dataclass(frozen=True)
class Run:
    """The measurements of one process in one mode."""

    mode: Mode
    round: int
    runner: Runner
    """The requested model runner."""
    model_runner: str
    """The model runner that ran, "v1" or "v2"."""
    shared: bool
    """Whether other modes ran alternately on the same engine."""
    device: str
    num_layers: int
    start_seconds: float
    """Seconds until the engine was ready: load, compile, self-test."""
    memory: Memory
    iterations: tuple[Iteration, ...]
    folded_norms: int = 0
    """Layers whose tap was folded into the norm that follows, as the engine reports it."""

    def line(self) -> str:
        """Return the printed line of its times."""
        times = " ".join(f"{iteration.generation_seconds:.3f}" for iteration in self.iterations)
        completed = " ".join(  # without a store, both are the same
            f"{iteration.completed_seconds:.3f}"
            for iteration in self.iterations
            if iteration.completed_seconds != iteration.settled_seconds
        )
        after = f", complete {completed} s" if completed else ""
        return f"{times} s{after}  (ready in {self.start_seconds:.0f} s)"


@dataclass(frozen=True)
class Times:
    """One figure of a mode over all its iterations."""

    median: float
    min: float
    max: float
    ratio_to_stock: float | None
    """The mode's median divided by stock's median, over all rounds. None without stock."""
    ratio_of_best: float | None
    """The mode's shortest time divided by stock's shortest. Other load on the machine affects it least."""
    ratio_by_round: tuple[float, ...]
    """The ratio of medians within each round. Their spread shows how reliable the ratio is."""
    last_over_first: float
    """The last iteration of a process divided by its first, median over all processes. 1 if nothing accumulates."""


@dataclass(frozen=True)
class ModeSummary:
    """A mode over all rounds, with one of vLLM's model runners."""

    mode: Mode
    runner: Runner
    model_runner: str
    generation_seconds: Times
    settled_seconds: Times
    completed_seconds: Times
    tokens_per_second: float
    """Generated tokens divided by the median generation time."""
    rows_per_iteration: int
    bytes_per_iteration: int
    memory: Memory
    """The maximum over all rounds."""
    replies_as_stock: float | None
    """The share of replies that equal stock's, token by token. Steering must lower it; capture alone must not."""
    first_tokens_seconds: Times | None = None
    """Until every request had its first token. The rest of the generation is decode steps alone."""


def summarise(runs: Sequence[Run]) -> list[ModeSummary]:
    """Return a summary of each mode with each model runner, in the order of their first runs.

    Each is compared with stock on the same model runner.
    """
    kinds = list(dict.fromkeys((run.runner, run.mode) for run in runs))
    return [_summarise_mode(_of(runs, *kind), _of(runs, kind[0], Mode.STOCK)) for kind in kinds]


def _of(runs: Sequence[Run], runner: Runner, mode: Mode) -> list[Run]:
    return [run for run in runs if (run.runner, run.mode) == (runner, mode)]


def _summarise_mode(runs: Sequence[Run], stock: Sequence[Run]) -> ModeSummary:
    generation = times_of(runs, stock, "generation_seconds")
    first = runs[0].iterations[0]
    return ModeSummary(
        mode=runs[0].mode,
        runner=runs[0].runner,
        model_runner=runs[0].model_runner,
        generation_seconds=generation,
        first_tokens_seconds=None
        if first.first_tokens_seconds is None
        else times_of(runs, stock, "first_tokens_seconds"),
        settled_seconds=times_of(runs, stock, "settled_seconds"),
        completed_seconds=times_of(runs, stock, "completed_seconds"),
        tokens_per_second=first.generated_tokens / generation.median,
        rows_per_iteration=first.rows,
        bytes_per_iteration=first.num_bytes,
        memory=_most([run.memory for run in runs]),
        replies_as_stock=_agreement(runs, stock),
    )


def _most(memories: Sequence[Memory]) -> Memory:
    kinds = dict.fromkeys(kind for memory in memories for kind in memory.peak_mib)
    sizes = {
        item.name: max(getattr(memory, item.name) for memory in memories)
        for item in fields(Memory)
        if item.name != "peak_mib"
    }
    return Memory(peak_mib={kind: max(memory.peak_mib.get(kind, 0) for memory in memories) for kind in kinds}, **sizes)


def times_of(runs: Sequence[Run], stock: Sequence[Run], field: str) -> Times:
    """Return a figure of runs, such as `generation_seconds`, compared with the same figure of stock."""
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
        last_over_first=statistics.median(
            getattr(run.iterations[-1], field) / getattr(run.iterations[0], field) for run in runs
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


def show(summaries: Sequence[ModeSummary]) -> str:
    """Return the printed table."""
    head = (
        *("mode", "runner", "generation", "over stock", "best", "by round", "last/first"),
        *("first tokens", "over stock", "settled", "over stock", "tokens/s", "rows", "MB", "as stock"),
    )
    rows = []
    for summary in summaries:
        generation, settled, same = summary.generation_seconds, summary.settled_seconds, summary.replies_as_stock
        firsts = summary.first_tokens_seconds
        mode = " batch-invariant" if summary.runner is Runner.BATCH_INVARIANT else ""
        runner = f"{summary.model_runner}{mode}"
        rows.append(
            (
                *(summary.mode.value, runner, f"{generation.median:.3f} s"),
                *map(percent, (generation.ratio_to_stock, generation.ratio_of_best)),
                *(", ".join(map(percent, generation.ratio_by_round)), f"{generation.last_over_first:.2f}"),
                *((f"{firsts.median:.3f} s", percent(firsts.ratio_to_stock)) if firsts else ("", "")),
                *(f"{settled.median:.3f} s", percent(settled.ratio_to_stock), f"{summary.tokens_per_second:.0f}"),
                *(f"{summary.rows_per_iteration}", f"{summary.bytes_per_iteration / 1e6:.1f}"),
                "" if same is None else f"{same:.0%}",
            )
        )
    return table(head, rows)
