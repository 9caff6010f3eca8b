"""`python -m bench.encodings`: the accuracy, cost and savings of encodings."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bench.capture.__main__ import parse as parse_capture
from bench.capture.options import workload_of
from bench.capture.processes import run_all
from bench.capture.results import ModeSummary, show, summarise
from bench.capture.shapes import SHAPES
from bench.capture.workload import Mode, Sink, schedule
from bench.encodings import blocks, rows
from bench.end_to_end import WORKLOAD
from bench.machine import Machine
from bench.options import add_output, words
from bench.output import Bar
from bench.parts import Part, run_parts
from examples.model import default_model

PARTS = ("rows", "blocks", "overhead", "end-to-end")
MODES = (Mode.STOCK, Mode.ALL_LAYERS, Mode.ALL_LAYERS_ENCODED)

_LEAST_BYTES, _MOST_POINTS, _FASTER = 7.0, 0.01, 1.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    machine = Machine.describe()
    own, capture = parse(arguments, has_gpu=machine.gpu_count > 0)
    run_parts("bench.encodings", machine, own.parts, own.output, lambda name: _measure(name, capture))


def _measure(name: str, options: argparse.Namespace) -> Part:
    if name == "rows":
        part = rows.measure(Path(options.model or default_model()))
        return Part(part, [rows.table(part), "", rows.svd_line(part)])
    if name == "blocks":
        config = SHAPES[options.shape or "qwen2.5-3b"].config
        part = blocks.measure(config["num_hidden_layers"], config["hidden_size"], blocks.Gpu())
        return Part(part, blocks.lines(part))
    return _measure_generation(options, Sink.RING if name == "overhead" else Sink.STORE)


def _measure_generation(options: argparse.Namespace, sink: Sink) -> Part:
    """Measure a batch with stock vLLM, and with all rows captured raw and encoded, alternately on one engine."""
    workload = dataclasses.replace(workload_of(options), sink=sink)
    turns = schedule(MODES, options.rounds, options.runners, shared=True)
    summaries = summarise(run_all(workload, turns, options.store_folder))
    part = {
        "workload": workload.shown(),
        "rounds": options.rounds,
        "modes": [dataclasses.asdict(summary) for summary in summaries],
    }
    return Part(part, [show(summaries)], bars(summaries, sink))


def bars(summaries: list[ModeSummary], sink: Sink) -> list[Bar]:
    """Return the bars for each model runner that ran."""
    found = []
    for runner in dict.fromkeys(summary.runner for summary in summaries):
        by_mode = {summary.mode: summary for summary in summaries if summary.runner is runner}
        raw, encoded = by_mode[Mode.ALL_LAYERS], by_mode[Mode.ALL_LAYERS_ENCODED]
        name = raw.model_runner
        if sink is Sink.STORE:
            ratio = encoded.completed_seconds.median / raw.completed_seconds.median
            found.append(Bar(f"{name}: all COMPLETE, encoded over raw", ratio, _FASTER))
            continue
        ratio = raw.bytes_per_iteration / encoded.bytes_per_iteration
        found.append(Bar(f"{name}: raw bytes over encoded", ratio, _LEAST_BYTES, at_most=False))
        points = _overhead(encoded) - _overhead(raw)
        found.append(Bar(f"{name}: generation over stock, encoded beyond raw", points, _MOST_POINTS))
    return found


def _overhead(summary: ModeSummary) -> float:
    ratio = summary.generation_seconds.ratio_to_stock
    assert ratio is not None  # noqa: S101 - stock always runs
    return ratio


def parse(arguments: Sequence[str] | None, *, has_gpu: bool) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Read the command line; return this benchmark's own options, and those of bench.capture."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.encodings",
        description=__doc__,
        epilog="The flags of bench.capture are also accepted: --model for part rows; --shape, --encoding, --dimensions "
        "and the workload for the other parts.",
    )
    parser.add_argument(
        "--parts", type=words(PARTS), default=["blocks", "overhead", "end-to-end"] if has_gpu else ["rows"],
        help="rows, blocks (needs a GPU), overhead, end-to-end, separated by commas (default: rows without a GPU, "
        "otherwise the others)",
    )  # fmt: skip
    add_output(parser, parts=True)
    own, rest = parser.parse_known_args(arguments)
    return own, parse_capture([*WORKLOAD, *rest], prog="python -m bench.encodings")


if __name__ == "__main__":
    main()
