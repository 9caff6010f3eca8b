"""`python -m bench.end_to_end`: until all that a batch captured is COMPLETE in the store, beside stock vLLM.

It is bench.capture with a store, on every layer of every token, with bars; all of its flags may follow.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from bench.capture.__main__ import parse, result, run_all
from bench.capture.options import workload_of
from bench.capture.processes import terminated_as_interrupted
from bench.capture.report import show_summary
from bench.capture.results import summarise
from bench.capture.workload import Mode, Sink, schedule
from bench.children import RunFailedError
from bench.machine import Machine, Revision, filesystem, versions
from bench.output import Bar, write_result
from examples.services import ServiceFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.capture.results import ModeSummary

_DEFAULTS = (
    *("--shape", "qwen2.5-3b", "--modes", "stock,all-layers", "--sink", "store", "--rounds", "2", "--iterations", "5"),
    *("--batch-size", "32", "--prefill", "512", "--decode", "128", "--max-num-batched-tokens", "8192"),
    *("--kv-cache-gib", "4", "--ring-mib", "4096", "--shippers", "4", "--stores", "4"),
)

_COMPLETE, _COMPLETE_STRETCH, _GENERATION = 1.5, 1.15, 1.05
"""How much longer than stock's generation it may take until all is COMPLETE, and how much longer the generation itself
while rows are shipped: on a GPU no longer than while they end at the ring."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write the result."""
    options = parse(
        [*_DEFAULTS, *(sys.argv[1:] if arguments is None else arguments)], prog="python -m bench.end_to_end"
    )
    if options.sink is not Sink.STORE or not {Mode.STOCK, Mode.ALL_LAYERS} <= set(options.modes):
        sys.exit("A store, stock and all-layers are what this compares; bench.capture measures the rest.")
    workload = workload_of(options)
    console = Console(highlight=False)
    context = {
        "machine": asdict(Machine.describe()),
        "versions": versions(),
        "revision": asdict(Revision.describe()),
        "rounds": options.rounds,
        "filesystem": filesystem(options.store_folder),
    }
    turns = schedule(options.modes, options.rounds, options.runners, shared=options.share_engine)
    try:
        with terminated_as_interrupted():
            runs = run_all(console, workload, turns, options.rounds, options.store_folder)
    except KeyboardInterrupt:
        sys.exit(130)
    except (RunFailedError, ServiceFailedError) as error:
        sys.exit(f"BENCH FAILED: {error}")
    summaries = summarise(runs)
    show_summary(console, summaries)
    all_bars = bars(summaries)
    for bar in all_bars:
        print(bar.line())
    if options.output:
        whole = result(context, workload, runs, summaries)
        written = {**whole, "benchmark": "bench.end_to_end", "bars": [bar.to_json() for bar in all_bars]}
        write_result(options.output, written)


def bars(summaries: Sequence[ModeSummary]) -> list[Bar]:
    """Return the bars, for each of vLLM's model runners that ran."""
    found = []
    for summary in summaries:
        completed, generation = summary.completed_seconds.ratio_to_stock, summary.generation_seconds.ratio_to_stock
        if summary.mode is Mode.ALL_LAYERS and completed is not None and generation is not None:
            runner = summary.model_runner
            found += [
                Bar(f"{runner}: all COMPLETE, over stock's generation", completed, _COMPLETE),
                Bar(f"{runner}: all COMPLETE, over stock's generation (stretch)", completed, _COMPLETE_STRETCH),
                Bar(f"{runner}: generation while shipping, over stock's", generation, _GENERATION),
            ]
    return found


if __name__ == "__main__":
    main()
