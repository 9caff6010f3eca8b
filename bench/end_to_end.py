"""`python -m bench.end_to_end`: until all that a batch captured is COMPLETE in the store, beside stock vLLM.

It is bench.capture with a store, on every layer of every token, with bars; all of its flags may follow.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.capture.__main__ import parse, run
from bench.capture.results import ModeSummary
from bench.capture.workload import Mode, Sink
from bench.machine import filesystem
from bench.output import Bar

WORKLOAD = (
    *("--rounds", "2", "--iterations", "5", "--batch-size", "32", "--prefill", "512", "--decode", "128"),
    *("--max-num-batched-tokens", "8192", "--kv-cache-gib", "4", "--ring-mib", "4096", "--shippers", "4"),
)
_DEFAULTS = (*WORKLOAD, "--shape", "qwen2.5-3b", "--modes", "stock,all-layers", "--sink", "store", "--stores", "4")

_COMPLETE, _COMPLETE_STRETCH, _GENERATION = 1.5, 1.15, 1.05
"""How much longer than stock's generation it may take until all is COMPLETE, and how much longer the generation itself
while rows are shipped: on a GPU no longer than while they end at the ring."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write the result."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse([*_DEFAULTS, *given], prog="python -m bench.end_to_end")
    if options.sink is not Sink.STORE or not {Mode.STOCK, Mode.ALL_LAYERS} <= set(options.modes):
        sys.exit("A store, stock and all-layers are what this compares; bench.capture measures the rest.")
    run("bench.end_to_end", options, bars, filesystem=filesystem(options.store_folder))


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
