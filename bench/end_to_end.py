"""`python -m bench.end_to_end`: the time until all captures of a batch are COMPLETE, compared with stock vLLM.

It runs bench.capture with a store, capturing every layer of every token, and checks bars. It accepts all flags of
bench.capture.
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
    *("--rounds", "3", "--iterations", "5", "--batch-size", "32", "--prefill", "512", "--decode", "128"),
    *("--max-num-batched-tokens", "8192", "--kv-cache-gib", "4", "--ring-mib", "4096", "--shippers", "4"),
)
_DEFAULTS = (*WORKLOAD, "--shape", "qwen2.5-3b", "--modes", "stock,all-layers", "--sink", "store", "--stores", "1")

_COMPLETE, _COMPLETE_STRETCH, _GENERATION = 1.2, 1.1, 1.05
"""The limits, relative to stock's generation: the time until all is COMPLETE, its stretch goal, and the generation
while rows are shipped. On a GPU, shipping must not slow the generation more than the ring alone does."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write the result."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse([*_DEFAULTS, *given], prog="python -m bench.end_to_end")
    if options.sink is not Sink.STORE or not {Mode.STOCK, Mode.ALL_LAYERS} <= set(options.modes):
        sys.exit("bench.end_to_end needs --sink store and modes stock and all-layers; for others use bench.capture.")
    run("bench.end_to_end", options, bars, filesystem=filesystem(options.store_folder))


def bars(summaries: Sequence[ModeSummary]) -> list[Bar]:
    """Return the bars for each model runner that ran."""
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
