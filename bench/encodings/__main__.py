"""`python -m bench.encodings`: what encodings keep of captured rows, what they cost, and what they save."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.capture.__main__ import parse as parse_capture
from bench.capture.shapes import SHAPES
from bench.capture.workload import Sink
from bench.children import RunFailedError
from bench.encodings import blocks, generation, rows
from bench.machine import Machine
from bench.parts import run_parts
from examples.model import default_model
from svc_common.launcher import ServiceFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCHMARK = "bench.encodings"
PARTS = ("rows", "blocks", "overhead", "end-to-end")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    machine = Machine.describe()
    own, capture = parse(arguments, has_gpu=machine.gpu_count > 0)
    run_parts(BENCHMARK, machine, own.parts, own.output, lambda name: _measured(name, capture))


def _measured(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    print(f"=== {name}", flush=True)
    try:
        return _measure(name, options), []
    except (RunFailedError, ServiceFailedError) as error:
        raise RunFailedError(f"{name}: {error}") from error


def _measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    if name == "rows":
        part = rows.measure(Path(options.model or default_model()))
        print(rows.table(part), rows.svd_line(part), sep="\n\n", flush=True)
        return part
    if name == "blocks":
        config = SHAPES[options.shape or "qwen2.5-3b"].config
        part = blocks.measure(config["num_hidden_layers"], config["hidden_size"], blocks.Gpu())
        print(*blocks.lines(part), sep="\n", flush=True)
        return part
    part, bars = generation.measure(options, Sink.RING if name == "overhead" else Sink.STORE)
    for bar in bars:
        print(bar.line(), flush=True)
    return {**part, "bars": [bar.to_json() for bar in bars]}


def parse(arguments: Sequence[str] | None, *, has_gpu: bool) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Read the command line; return what is ours, and what bench.capture makes of the rest."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.encodings",
        description=__doc__,
        epilog="The flags of bench.capture may follow: --model for rows; --shape, --encoding, --dimensions and the "
        "workload for the others.",
    )
    parser.add_argument(
        "--parts", type=_parts, default=["blocks", "overhead", "end-to-end"] if has_gpu else ["rows"],
        help="rows, blocks (on a GPU), overhead, end-to-end, separated by commas (default: rows without a GPU, the "
        "others with one)",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path,
        help="a JSON file for the result; parts that it holds already stay, if machine and revision are the same",
    )  # fmt: skip
    own, rest = parser.parse_known_args(arguments)
    return own, parse_capture([*generation.DEFAULTS, *rest], prog="python -m bench.encodings")


def _parts(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r}: choose from {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    main()
