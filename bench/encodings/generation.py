"""Parts `overhead` and `end-to-end`: a batch is generated with stock vLLM, with all rows captured raw, and encoded.

It is bench.capture, with the ring as the end or with a store: raw and encoded take turns on one engine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bench.capture.__main__ import run_all
from bench.capture.options import workload_of
from bench.capture.report import show_summary
from bench.capture.results import summarise
from bench.capture.workload import Mode, Sink, schedule
from bench.output import Bar

if TYPE_CHECKING:
    import argparse

    from bench.capture.results import ModeSummary

MODES = (Mode.STOCK, Mode.ALL_LAYERS, Mode.ALL_LAYERS_ENCODED)

DEFAULTS = (
    *("--rounds", "2", "--iterations", "5", "--batch-size", "32", "--prefill", "512", "--decode", "128"),
    *("--max-num-batched-tokens", "8192", "--kv-cache-gib", "4", "--ring-mib", "4096", "--shippers", "4"),
)
"""The workload of bench.end_to_end; flags of bench.capture change it."""

_LEAST_BYTES, _MOST_POINTS, _FASTER = 7.0, 0.01, 1.0


def measure(options: argparse.Namespace, sink: Sink) -> tuple[dict[str, Any], list[Bar]]:
    """Measure; return the part and its bars."""
    workload = dataclasses.replace(workload_of(options), sink=sink)
    console = Console(highlight=False)
    turns = schedule(MODES, options.rounds, options.runners, shared=True)
    summaries = summarise(run_all(console, workload, turns, options.rounds, options.store_folder))
    show_summary(console, summaries)
    part = {
        "workload": {**asdict(workload), "model": Path(workload.model).name},
        "rounds": options.rounds,
        "modes": [asdict(summary) for summary in summaries],
    }
    return part, bars(summaries, sink)


def bars(summaries: list[ModeSummary], sink: Sink) -> list[Bar]:
    """Return the bars, for each of vLLM's model runners that ran."""
    found = []
    for runner in dict.fromkeys(summary.runner for summary in summaries):
        by_mode = {summary.mode: summary for summary in summaries if summary.runner is runner}
        raw, encoded = by_mode[Mode.ALL_LAYERS], by_mode[Mode.ALL_LAYERS_ENCODED]
        name = raw.model_runner
        if sink is Sink.STORE:
            ratio = encoded.completed_seconds.median / raw.completed_seconds.median
            found.append(Bar(f"{name}: all COMPLETE, encoded over raw", ratio, _FASTER))
            continue
        found.append(Bar(f"{name}: raw bytes over encoded", bytes_ratio(raw, encoded), _LEAST_BYTES, at_most=False))
        points = _overhead(encoded) - _overhead(raw)
        found.append(Bar(f"{name}: generation over stock, encoded beyond raw", points, _MOST_POINTS))
    return found


def bytes_ratio(raw: ModeSummary, encoded: ModeSummary) -> float:
    """Return how many times more bytes raw rows are."""
    return raw.bytes_per_iteration / encoded.bytes_per_iteration


def _overhead(summary: ModeSummary) -> float:
    ratio = summary.generation_seconds.ratio_to_stock
    assert ratio is not None  # noqa: S101 - stock is always among the modes
    return ratio
