"""How a result is shown: a table on a terminal, plain lines in a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.capture.results import ModeSummary, Run, Times

_COLUMNS = (
    "mode",
    "runner",
    "generation",
    "over stock",
    "best",
    "by round",
    "last/first",
    "settled",
    "over stock",
    "tokens/s",
    "rows",
    "MB",
    "as stock",
)


def show_run(console: Console, run: Run, rounds: int) -> None:
    """Print one line for a run that has ended."""
    times = " ".join(f"{iteration.generation_seconds:.3f}" for iteration in run.iterations)
    head = f"round {run.round + 1}/{rounds}  {run.mode.value:<17} {run.model_runner}"
    console.print(f"{head} {times} s  (ready in {run.start_seconds:.0f} s)")


def show_summary(console: Console, summaries: Sequence[ModeSummary]) -> None:
    """Print the result."""
    rows = [summary_cells(summary) for summary in summaries]
    if not console.is_terminal:
        for cells in (_COLUMNS, *rows):
            print("\t".join(cells), file=console.file)  # rich would turn tabs into spaces
        return
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(_COLUMNS):
        table.add_column(name, justify="right" if index else "left")
    for cells in rows:
        table.add_row(*cells)
    console.print(table)


def summary_cells(summary: ModeSummary) -> tuple[str, ...]:
    """Return a mode's line of the table."""
    generation, settled = summary.generation_seconds, summary.settled_seconds
    same = summary.replies_as_stock
    return (
        summary.mode.value,
        summary.model_runner,
        f"{generation.median:.3f} s",
        _change(generation.ratio_to_stock),
        _change(generation.ratio_of_best),
        _by_round(generation),
        f"{generation.last_over_first:.2f}",
        f"{settled.median:.3f} s",
        _change(settled.ratio_to_stock),
        f"{summary.tokens_per_second:.0f}",
        f"{summary.rows_per_iteration}",
        f"{summary.bytes_per_iteration / 1e6:.1f}",
        "" if same is None else f"{same:.0%}",
    )


def _change(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio - 1:+.1%}"


def _by_round(times: Times) -> str:
    return " ".join(_change(ratio) for ratio in times.ratio_by_round)
