"""`python -m bench.capture`: the cost of capture and steering, compared with stock vLLM in the same run."""

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
    """Run the modes that the command line selects, print the figures, and write the result.

    Args:
        benchmark: The name of the benchmark, for the result.
        options: The return value of `parse`.
        bars_of: Returns the bars; None for a benchmark without bars.
        more: Further fields of the result.
    """
    workload = workload_of(options)
    context = {"benchmark": benchmark, **describe(), "together": options.together, **more}

    def write(runs: Sequence[Run]) -> None:
        """Write the result of the rounds so far, so that a run that is stopped keeps them."""
        if options.output:
            write_result(options.output, {**context, **result(workload, runs, bars_of)})

    with measuring():
        shared = options.share_engine or options.together
        turns = schedule(options.modes, options.rounds, options.runners, shared=shared)
        runs = run_all(workload, turns, options.store_folder, together=options.together, after_round=write)
    summaries = summarise(runs)
    print(show(summaries))
    if bars_of:
        print(*(bar.line() for bar in bars_of(summaries)), sep="\n")


def result(
    workload: Workload,
    runs: Sequence[Run],
    bars_of: Callable[[Sequence[ModeSummary]], list[Bar]] | None = None,
) -> dict[str, Any]:
    """Return the content of the output file."""
    summaries = summarise(runs)
    plain = [asdict(run) for run in runs]
    for run in plain:
        for iteration in run["iterations"]:
            del iteration["replies"]  # the summaries have compared them already
    return {
        "rounds": len({run.round for run in runs}),
        "workload": workload.shown(),
        "modes": [asdict(summary) for summary in summaries],
        "runs": plain,
        **({"bars": [bar.to_json() for bar in bars_of(summaries)]} if bars_of else {}),
    }


def parse(arguments: Sequence[str] | None, prog: str = "python -m bench.capture") -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--rounds", type=positive, default=2, help="runs of each mode, each in a fresh process")
    parser.add_argument(
        "--share-engine", action="store_true",
        help="measure all modes with taps alternately on one engine, instead of each on its own engine",
    )  # fmt: skip
    parser.add_argument(
        "--together", action="store_true",
        help="--share-engine, and stock's engine runs at the same time: the engines take turns of a few iterations, so "
        "that a drift of the machine does not count; the device must have memory for all engines "
        "(gpu_memory_utilization)",
    )  # fmt: skip
    parser.add_argument(
        "--runners", type=words(Runner), default=[Runner.DEFAULT],
        help=f"repeat everything with each of these model runners of vLLM: {','.join(Runner)}; batch-invariant is "
        "vLLM's choice with VLLM_BATCH_INVARIANT=1 (default: vLLM's choice)",
    )  # fmt: skip
    parser.add_argument(
        "--modes", type=words(CHOICES), default=list(USUAL_MODES),
        help="names, separated by commas (default: all but stock-again and all-layers+encoded)",
    )  # fmt: skip
    add_output(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
