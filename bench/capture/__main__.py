"""`python -m bench.capture`: what capture and steering cost beside stock vLLM, all modes side by side in one run."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bench.capture.options import add_workload_arguments, names, positive, workload_of
from bench.capture.processes import run_turn, terminated_as_interrupted
from bench.capture.report import show_run, show_summary
from bench.capture.results import ModeSummary, Run, summarise
from bench.capture.workload import CHOICES, USUAL_MODES, Mode, Runner, Turn, Workload, schedule
from bench.children import RunFailedError
from bench.machine import Machine, Revision, versions
from bench.output import write_result
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
        write_result(options.output, result(context, workload, runs, summaries))


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
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--rounds", type=positive, default=2, help="how often each mode is run, in a fresh process")
    parser.add_argument(
        "--share-engine", action="store_true",
        help="measure the modes with taps by turns on one engine, instead of each on its own",
    )  # fmt: skip
    parser.add_argument(
        "--runners", type=names(Runner), default=[Runner.DEFAULT],
        help="vLLM's model runners, with each of which all is done: v1,v2 (default: the one that vLLM takes)",
    )  # fmt: skip
    parser.add_argument(
        "--modes", type=names(Mode, CHOICES), default=list(USUAL_MODES),
        help="names, separated by commas (default: all but all-layers+encoded)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
