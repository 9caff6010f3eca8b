"""`python -m bench.store`: the throughput and latency of writing rows to the store and reading them."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.machine import Machine
from bench.options import add_output, positive, positives, words
from bench.parts import Part, run_parts
from bench.store import compare, latency, scale, search, small
from bench.store.captures import Shape
from bench.store.compare import CompareJob
from bench.store.latency import LatencyJob
from bench.store.scale import ScaleJob
from bench.store.search import SearchJob
from bench.store.small import SmallJob

PARTS = ("compare", "latency", "small", "search", "scale")

_LARGE_MACHINE = 8
"""The number of cores from which part `scale` runs by default."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    machine = Machine.describe()
    options = parse(arguments, cores=machine.cores)
    run_parts("bench.store", machine, options.parts, options.output, lambda name: _measure(name, options))


def _measure(name: str, options: argparse.Namespace) -> Part:
    """Measure a part in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="residuum-", dir=options.folder) as scratch:
        folder = Path(scratch)
        if name == "compare":
            part = compare.measure(compare_job(options), folder)
            return Part(part, compare.show(part), compare.bars(part))
        if name == "latency":
            part = latency.measure(latency_job(options), folder)
            return Part(part, latency.show(part))
        if name == "small":
            part = small.measure(small_job(options), folder)
            return Part(part, small.show(part), small.bars(part))
        if name == "search":
            part = search.measure(search_job(options), folder)
            return Part(part, search.show(part), search.bars(part))
        part = scale.measure(scale_job(options), folder)
        return Part(part, scale.show(part), scale.bars(part))


def compare_job(options: argparse.Namespace) -> CompareJob:
    """Return the job of part `compare` from the command line."""
    captures, rounds = (3, 7) if options.quick else (CompareJob.captures, CompareJob.rounds)
    return CompareJob(
        Shape(options.layers, options.hidden),
        captures=options.captures or captures,
        rounds=options.rounds or rounds,
        shippers=options.compare_shippers,
    )


def latency_job(options: argparse.Namespace) -> LatencyJob:
    """Return the job of part `latency` from the command line."""
    store_gib = options.store_gib or (1.0 if options.quick else 20.0)
    reads, follows = (200, 20) if options.quick else (500, 50)
    return LatencyJob(Shape(options.layers, options.hidden), store_gib, reads, follows)


def small_job(options: argparse.Namespace) -> SmallJob:
    """Return the job of part `small` from the command line. The captures have a shape of their own."""
    return SmallJob(
        captures=options.captures or SmallJob.captures,
        rounds=options.rounds or (3 if options.quick else SmallJob.rounds),
    )


def search_job(options: argparse.Namespace) -> SearchJob:
    """Return the job of part `search` from the command line. The captures have four layers."""
    return SearchJob(
        Shape(min(options.layers, SearchJob().shape.layers), options.hidden),
        store_gib=options.store_gib or (1.0 if options.quick else SearchJob.store_gib),
        rounds=options.rounds or SearchJob.rounds,
    )


def scale_job(options: argparse.Namespace) -> ScaleJob:
    """Return the job of part `scale` from the command line."""
    captures, rounds = (8, 3) if options.quick else (ScaleJob.captures, ScaleJob.rounds)
    return ScaleJob(
        Shape(options.layers, options.hidden),
        options.shippers,
        options.stores,
        options.shards,
        captures=options.captures or captures,
        rounds=options.rounds or rounds,
    )


def parse(arguments: Sequence[str] | None, *, cores: int) -> argparse.Namespace:
    """Read the command line."""
    shape = Shape()
    parser = argparse.ArgumentParser(prog="python -m bench.store", description=__doc__)
    parser.add_argument(
        "--parts", type=words(PARTS), default=[name for name in PARTS if cores >= _LARGE_MACHINE or name != "scale"],
        help=f"{', '.join(PARTS)}, separated by commas (default: all; scale only with 8 cores or more)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="smaller sizes, for less than a minute on two cores")
    parser.add_argument(
        "--folder", type=Path, help="folder of the stores' data, such as /dev/shm (default: that of temporary files)"
    )
    add_output(parser, parts=True)
    parser.add_argument("--layers", type=positive, default=shape.layers, help="layers of the model (Qwen2.5-3B's)")
    parser.add_argument("--hidden", type=positive, default=shape.hidden, help="its hidden size")
    parser.add_argument(
        "--captures",
        type=positive,
        help="compare, scale: captures in a round (639 positions each); small: captures (30 rows each)",
    )
    parser.add_argument("--rounds", type=positive, help="compare, small, search, scale: rounds after one warm-up")
    parser.add_argument(
        "--compare-shippers", type=positive, default=1, metavar="N", help="compare: shippers (default: 1)"
    )
    parser.add_argument(
        "--store-gib", type=float, help="latency, search: rows in the store (default: 20, with --quick 1)"
    )
    parser.add_argument(
        "--shippers", type=positives, default=(1, 2, 4, 8), help="scale: shippers of all stores together"
    )
    parser.add_argument("--stores", type=positives, default=(1, 2, 4), help="scale: stores, each with its own ring")
    parser.add_argument("--shards", type=positives, default=(1, 2, 4, 8), help="scale: shards of a single store")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
