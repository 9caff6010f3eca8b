"""`python -m bench.capture`: what capture and steering cost beside stock vLLM, all modes side by side in one run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from bench.capture.processes import run_turn, terminated_as_interrupted
from bench.capture.report import show_run, show_summary
from bench.capture.results import ModeSummary, Run, summarise
from bench.capture.shapes import SHAPES, write_shape
from bench.capture.workload import Mode, Runner, Sink, Turn, Vectors, Workload, schedule
from bench.children import RunFailedError
from bench.machine import Machine, Revision, versions
from examples.model import default_model
from examples.services import ServiceFailedError
from residuum import ResiduumError
from residuum.capture import site_list, site_numbers
from residuum.wire.encodings import ENCODINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Choice = TypeVar("_Choice", bound=Enum)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write the result."""
    options = parse(arguments)
    workload = workload_of(options)
    console = Console(highlight=False)
    context = {
        "machine": asdict(Machine.describe()),
        "versions": versions(),
        "revision": asdict(Revision.describe()),
        "rounds": options.rounds,
    }
    try:
        with terminated_as_interrupted():
            runs = run_all(
                console,
                workload,
                schedule(options.modes, options.rounds, options.runners, shared=options.share_engine),
                options.rounds,
                options.store_folder,
            )
    except KeyboardInterrupt:
        sys.exit(130)
    except (RunFailedError, ServiceFailedError) as error:
        sys.exit(f"BENCH FAILED: {error}")
    summaries = summarise(runs)
    show_summary(console, summaries)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result(context, workload, runs, summaries), indent=1) + "\n")


def run_all(
    console: Console, workload: Workload, turns: Sequence[Turn], rounds: int, store_folder: Path | None = None
) -> list[Run]:
    """Run the processes one after another."""
    runs = []
    for turn in turns:
        names = " ".join(mode.value for mode in turn.modes)
        with console.status(f"round {turn.round + 1}/{rounds}  {names} ..."):  # silent in a pipe
            measured = run_turn(turn, workload, store_folder)
        for run in measured:
            show_run(console, run, rounds)
        runs += measured
    return runs


def result(
    context: dict[str, Any], workload: Workload, runs: Sequence[Run], summaries: Sequence[ModeSummary]
) -> dict[str, Any]:
    """Return what is written to the output file."""
    plain = [asdict(run) for run in runs]
    for run in plain:
        for iteration in run["iterations"]:
            del iteration["replies"]  # compared by now
    return {
        "benchmark": "bench.capture",
        **context,
        "workload": {**asdict(workload), "model": Path(workload.model).name},  # the name, not where it lies here
        "modes": [asdict(summary) for summary in summaries],
        "runs": plain,
    }


def parse(arguments: Sequence[str] | None, prog: str = "python -m bench.capture") -> argparse.Namespace:
    """Read the command line."""
    defaults = Workload(model="")
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="the model's folder, or its name on the Hugging Face hub (default: SmolLM2)")
    which.add_argument("--shape", choices=sorted(SHAPES), help="a model's shape with random weights, no tokenizer")
    parser.add_argument("--batch-size", type=_positive, default=defaults.batch_size, help="requests submitted at once")
    parser.add_argument("--prefill", type=_positive, default=defaults.prefill, help="tokens of each prompt, exactly")
    parser.add_argument("--decode", type=_positive, default=defaults.decode, help="tokens of each reply, exactly")
    parser.add_argument("--iterations", type=_positive, default=defaults.iterations, help="after one as a warm-up")
    parser.add_argument("--rounds", type=_positive, default=2, help="how often each mode is run, in a fresh process")
    parser.add_argument(
        "--share-engine", action="store_true",
        help="measure the modes with taps by turns on one engine, instead of each on its own",
    )  # fmt: skip
    parser.add_argument(
        "--runners", type=_names(Runner), default=[Runner.DEFAULT],
        help="vLLM's model runners, with each of which all is done: v1,v2 (default: the one that vLLM takes)",
    )  # fmt: skip
    compiling = parser.add_mutually_exclusive_group()
    compiling.add_argument("--eager", action="store_true", help="do not compile the model")
    compiling.add_argument("--compiled", dest="eager", action="store_false", help="compile the model (the default)")
    parser.add_argument(
        "--modes", type=_names(Mode), default=[mode for mode in Mode if not mode.encodes],
        help="names, separated by commas (default: all but all-layers+encoded)",
    )  # fmt: skip
    parser.add_argument(
        "--encoding", choices=sorted(ENCODINGS.keys() - {"project"}), default=defaults.encoding,
        help=f"what all-layers+encoded does (default: {defaults.encoding})",
    )  # fmt: skip
    parser.add_argument(
        "--dimensions", type=int, default=defaults.dimensions,
        help=f"its dimensions, 0 for an encoding that has none (default: {defaults.dimensions})",
    )  # fmt: skip
    parser.add_argument(
        "--sink", type=Sink, choices=list(Sink), default=defaults.sink, metavar="{store,ring}",
        help="where captured rows go: through shippers into a store (the default), or no further than the ring",
    )  # fmt: skip
    parser.add_argument(
        "--vectors", type=Vectors, choices=list(Vectors), default=defaults.vectors, metavar="{request,layer}",
        help="what steers: a vector for each request, used after every layer (the default), or one for each layer",
    )  # fmt: skip
    parser.add_argument(
        "--max-num-batched-tokens", type=_positive, default=defaults.max_num_batched_tokens,
        help="tokens that one step computes at most",
    )  # fmt: skip
    parser.add_argument("--kv-cache-gib", type=float, default=defaults.kv_cache_gib, help="memory of the KV cache")
    parser.add_argument("--ring-mib", type=_positive, default=defaults.ring_mib, help="shared memory of the ring")
    parser.add_argument(
        "--store-folder", type=Path, help="where the store's data lie (default: where temporary files do)"
    )
    parser.add_argument("--stores", type=_positive, default=defaults.stores, help="stores that take the captures")
    parser.add_argument("--shippers", type=_positive, default=defaults.shippers, help="processes that feed the store")
    parser.add_argument(
        "--capture-sites", type=_sites, default=defaults.capture_sites, metavar="SITE,...",
        help="the sites that are armed, and that the modes which capture capture, as for the service "
        f"(default: {','.join(defaults.capture_sites)})",
    )  # fmt: skip
    parser.add_argument(
        "--fold-norms", action=argparse.BooleanOptionalAction,
        help="fold taps into the norms that follow them, or do not (default: as the service does)",
    )  # fmt: skip
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more of vLLM's arguments, as a JSON object")
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    return parser.parse_args(arguments)


def workload_of(options: argparse.Namespace) -> Workload:
    """Return the workload that the command line asks for."""
    shaped = SHAPES[options.shape].engine_args if options.shape else {}
    return Workload(
        model=write_shape(options.shape) if options.shape else options.model or default_model(),
        batch_size=options.batch_size,
        prefill=options.prefill,
        decode=options.decode,
        iterations=options.iterations,
        eager=options.eager,
        sink=options.sink,
        vectors=options.vectors,
        max_num_batched_tokens=options.max_num_batched_tokens,
        kv_cache_gib=options.kv_cache_gib,
        ring_mib=options.ring_mib,
        shippers=options.shippers,
        stores=options.stores,
        capture_sites=options.capture_sites,
        encoding=options.encoding,
        dimensions=options.dimensions,
        fold_norms=options.fold_norms,
        engine_args={**shaped, **options.engine_args},
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _sites(text: str) -> tuple[str, ...]:
    try:
        site_numbers(text)
    except ResiduumError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return site_list(text)


def _names(kind: type[_Choice]) -> Callable[[str], list[_Choice]]:
    """Return a reader of names that are separated by commas."""

    def read(text: str) -> list[_Choice]:
        try:
            return [kind(name) for name in text.split(",")]
        except ValueError:
            allowed = ", ".join(member.value for member in kind)
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {allowed}") from None

    return read


if __name__ == "__main__":
    main()
