"""`python -m bench.capture`: what capture and steering cost, each mode in fresh processes, side by side in one run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bench.capture.processes import RunFailedError, run_job, terminated_as_interrupted
from bench.capture.report import show_run, show_summary
from bench.capture.results import ModeSummary, Run, summarise
from bench.capture.workload import Mode, Sink, Workload, schedule
from bench.machine import Machine, Revision, versions
from examples.model import default_model
from examples.services import ServiceFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence


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
            runs = run_all(console, workload, options.modes, options.rounds)
    except KeyboardInterrupt:
        sys.exit(130)
    except (RunFailedError, ServiceFailedError) as error:
        sys.exit(f"BENCH FAILED: {error}")
    summaries = summarise(runs)
    show_summary(console, summaries)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result(context, workload, runs, summaries), indent=1) + "\n")


def run_all(console: Console, workload: Workload, modes: list[Mode], rounds: int) -> list[Run]:
    """Run every mode in every round, one process after another."""
    runs = []
    for number, mode in schedule(modes, rounds):
        with console.status(f"round {number + 1}/{rounds}  {mode.value} ..."):  # silent in a pipe
            runs.append(run_job(mode, number, workload))
        show_run(console, runs[-1], rounds)
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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    defaults = Workload(model="")
    parser = argparse.ArgumentParser(prog="python -m bench.capture", description=__doc__)
    parser.add_argument("--model", help="the model's folder, or its name on the Hugging Face hub (default: SmolLM2)")
    parser.add_argument("--batch-size", type=_positive, default=defaults.batch_size, help="requests submitted at once")
    parser.add_argument("--prefill", type=_positive, default=defaults.prefill, help="tokens of each prompt, exactly")
    parser.add_argument("--decode", type=_positive, default=defaults.decode, help="tokens of each reply, exactly")
    parser.add_argument("--iterations", type=_positive, default=defaults.iterations, help="after one as a warm-up")
    parser.add_argument("--rounds", type=_positive, default=2, help="how often each mode is run, in a fresh process")
    compiling = parser.add_mutually_exclusive_group()
    compiling.add_argument("--eager", action="store_true", help="do not compile the model")
    compiling.add_argument("--compiled", dest="eager", action="store_false", help="compile the model (the default)")
    parser.add_argument("--modes", type=_modes, default=list(Mode), help="names, separated by commas (default: all)")
    parser.add_argument(
        "--sink", type=Sink, choices=list(Sink), default=defaults.sink, metavar="{store,ring}",
        help="where captured rows go: through shippers into a store (the default), or no further than the ring",
    )  # fmt: skip
    parser.add_argument("--kv-cache-gib", type=float, default=defaults.kv_cache_gib, help="memory of the KV cache")
    parser.add_argument("--ring-mib", type=_positive, default=defaults.ring_mib, help="shared memory of the ring")
    parser.add_argument("--shippers", type=_positive, default=defaults.shippers, help="processes that feed the store")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more of vLLM's arguments, as a JSON object")
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    return parser.parse_args(arguments)


def workload_of(options: argparse.Namespace) -> Workload:
    """Return the workload that the command line asks for."""
    return Workload(
        model=options.model or default_model(),
        batch_size=options.batch_size,
        prefill=options.prefill,
        decode=options.decode,
        iterations=options.iterations,
        eager=options.eager,
        sink=options.sink,
        kv_cache_gib=options.kv_cache_gib,
        ring_mib=options.ring_mib,
        shippers=options.shippers,
        engine_args=options.engine_args,
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _modes(text: str) -> list[Mode]:
    try:
        return [Mode(name) for name in text.split(",")]
    except ValueError:
        allowed = ", ".join(mode.value for mode in Mode)
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {allowed}") from None


if __name__ == "__main__":
    main()
