"""`python -m bench.store`: how fast rows come into the store and out of it, and how soon."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.children import RunFailedError
from bench.machine import Machine
from bench.parts import run_parts
from bench.store import compare, latency, scale
from bench.store.captures import Shape
from bench.store.compare import CompareJob
from bench.store.latency import LatencyJob
from bench.store.scale import ScaleJob
from svc_common.launcher import ServiceFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BENCHMARK = "bench.store"
PARTS = ("compare", "latency", "scale")
_LARGE_MACHINE = 8
"""Cores from which on many shippers and stores are measured without being asked for."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    machine = Machine.describe()
    options = parse(arguments, cores=machine.cores)
    run_parts(BENCHMARK, machine, options.parts, options.output, lambda name: _measured(name, options))


def _measured(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    try:
        return _measure(name, options), []
    except (RunFailedError, ServiceFailedError) as error:
        raise RunFailedError(f"{name}: {error}") from error


def _measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a part in an empty folder, print it, and return it."""
    print(f"=== {name}", flush=True)
    with tempfile.TemporaryDirectory(prefix="residuum-", dir=options.folder) as scratch:
        part, lines, bars = _MEASURES[name](options, Path(scratch))
    for line in (*lines, *(bar.line() for bar in bars)):
        print(line, flush=True)
    return {**part, "bars": [bar.to_json() for bar in bars]}


def _measure_compare(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Any, Any]:
    part = compare.measure(compare_job(options), folder)
    return part, compare.show(part), compare.bars(part)


def _measure_latency(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Any, Any]:
    part = latency.measure(latency_job(options), folder)
    return part, latency.show(part), []


def _measure_scale(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Any, Any]:
    part = scale.measure(scale_job(options), folder)
    return part, scale.show(part), scale.bars(part)


_MEASURES: dict[str, Callable[[argparse.Namespace, Path], tuple[dict[str, Any], Any, Any]]] = {
    "compare": _measure_compare,
    "latency": _measure_latency,
    "scale": _measure_scale,
}
"""Each returns its part of the result, the lines that show it, and its bars."""


def compare_job(options: argparse.Namespace) -> CompareJob:
    """Return what is compared."""
    default = CompareJob(_shape(options))
    captures, rounds = (3, 7) if options.quick else (default.captures, default.rounds)
    return CompareJob(
        default.shape,
        captures=options.captures or captures,
        rounds=options.rounds or rounds,
        shippers=options.compare_shippers,
    )


def latency_job(options: argparse.Namespace) -> LatencyJob:
    """Return what is asked for one by one."""
    store_gib = options.store_gib or (1.0 if options.quick else 20.0)
    reads, follows = (200, 20) if options.quick else (500, 50)
    return LatencyJob(_shape(options), store_gib, reads, follows)


def scale_job(options: argparse.Namespace) -> ScaleJob:
    """Return what is measured with many processes."""
    default = ScaleJob(_shape(options), options.shippers, options.stores)
    captures, rounds = (8, 3) if options.quick else (default.captures, default.rounds)
    return ScaleJob(
        default.shape,
        options.shippers,
        options.stores,
        captures=options.captures or captures,
        rounds=options.rounds or rounds,
    )


def _shape(options: argparse.Namespace) -> Shape:
    return Shape(options.layers, options.hidden)


def parse(arguments: Sequence[str] | None, *, cores: int) -> argparse.Namespace:
    """Read the command line."""
    shape = Shape()
    parser = argparse.ArgumentParser(prog="python -m bench.store", description=__doc__)
    parser.add_argument(
        "--parts", type=_parts, default=[name for name in PARTS if cores >= _LARGE_MACHINE or name != "scale"],
        help="compare, latency, scale, separated by commas (default: all; scale only where there are 8 cores)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="less of everything: in less than a minute on two cores")
    parser.add_argument(
        "--folder", type=Path, help="where the stores' data lie, such as /dev/shm (default: where temporary files do)"
    )
    parser.add_argument(
        "--output", type=Path,
        help="a JSON file for the result; parts that it holds already stay, if machine and revision are the same",
    )  # fmt: skip
    parser.add_argument("--layers", type=_positive, default=shape.layers, help="layers of the model (Qwen2.5-3B's)")
    parser.add_argument("--hidden", type=_positive, default=shape.hidden, help="its hidden size")
    parser.add_argument("--captures", type=_positive, help="compare, scale: captures of a round, of 639 positions each")
    parser.add_argument("--rounds", type=_positive, help="compare, scale: rounds after the first, which does not count")
    parser.add_argument(
        "--compare-shippers", type=_positive, default=1, metavar="N", help="compare: shippers (default: 1)"
    )
    parser.add_argument("--store-gib", type=float, help="latency: rows in the store (default: 20, with --quick 1)")
    parser.add_argument(
        "--shippers", type=_numbers, default=(1, 2, 4, 8), help="scale: shippers of all stores together"
    )
    parser.add_argument("--stores", type=_numbers, default=(1, 2, 4), help="scale: stores, each with a ring of its own")
    return parser.parse_args(arguments)


def _parts(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r}: choose from {', '.join(PARTS)}")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({_positive(number) for number in text.split(",")}))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


if __name__ == "__main__":
    main()
