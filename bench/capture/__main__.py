"""`python -m bench.capture`: what capture and steering cost beside stock vLLM, all modes side by side in one run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from bench.capture.options import add_workload_arguments, workload_of
from bench.capture.processes import run_all
from bench.capture.results import ModeSummary, Run, show, summarise
from bench.capture.workload import CHOICES, USUAL_MODES, Runner, Workload, schedule
from bench.machine import describe
from bench.options import add_output, positive, words
from bench.output import Bar, write_result
from bench.processes import measuring


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write the result."""
    run("bench.capture", parse(arguments))


def run(
    benchmark: str,
    options: argparse.Namespace,
    bars_of: Callable[[Sequence[ModeSummary]], list[Bar]] | None = None,
    **more: str,
) -> None:
    """Run what the command line asks for, print it, and write the result.

    Args:
        benchmark: Whose result it is.
        options: What `parse` returned.
        bars_of: Returns the bars, of a benchmark that has some.
        more: What the result says besides.
    """
    workload = workload_of(options)
    context = {"benchmark": benchmark, **describe(), "rounds": options.rounds, **more}
    with measuring():
        turns = schedule(options.modes, options.rounds, options.runners, shared=options.share_engine)
        runs = run_all(workload, turns, options.store_folder)
    summaries = summarise(runs)
    print(show(summaries))
    written = {**context, **result(workload, runs, summaries)}
    if bars_of:
        bars = bars_of(summaries)
        print(*(bar.line() for bar in bars), sep="\n")
        written["bars"] = [bar.to_json() for bar in bars]
    if options.output:
        write_result(options.output, written)


def result(workload: Workload, runs: Sequence[Run], summaries: Sequence[ModeSummary]) -> dict[str, Any]:
    """Return what is written to the output file."""
    plain = [asdict(run) for run in runs]
    for run in plain:
        for iteration in run["iterations"]:
            del iteration["replies"]  # compared by now
    return {"workload": workload.shown(), "modes": [asdict(summary) for summary in summaries], "runs": plain}


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
        "--runners", type=words(Runner), default=[Runner.DEFAULT],
        help="vLLM's model runners, with each of which all is done: v1,v2 (default: the one that vLLM takes)",
    )  # fmt: skip
    parser.add_argument(
        "--modes", type=words(CHOICES), default=list(USUAL_MODES),
        help="names, separated by commas (default: all but all-layers+encoded)",
    )  # fmt: skip
    add_output(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
