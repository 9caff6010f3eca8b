"""`python -m tests.conformance.mixture`: random requests of all kinds at once, each compared with the reference.

It serves tiny models on the CPU, one after the other, and sends each rounds of requests that differ in everything:
captures, steering and its changes, probes, rules, sampling, length, shared prefixes, aborts. A seed gives the same
requests again. It ends with 1 if anything is wrong.

    python -m tests.conformance.mixture --seed 7 --minutes 10 --models llama,gemma2
    python -m tests.conformance.mixture --seed 7 --models llama --round 3 --only 5,12
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

from tests.conformance.mixture.campaign import Setup, run, serving
from tests.conformance.mixture.tally import Tally

_MODELS = "llama,gemma2,gpt2,qwen2,mixtral"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0, help="for all models together, without their starts")
    parser.add_argument("--models", default=_MODELS, help="architectures of bench.conformance")
    parser.add_argument("--engines", default="eager,compiled", help="eager, compiled, lora")
    parser.add_argument("--kv-blocks", type=int, default=24, help="blocks of 32 positions in the KV cache; at least 9")
    parser.add_argument("--ring-mib", type=int, default=4, help="MiB of the ring between the worker and the store")
    parser.add_argument("--requests", type=int, default=32, help="requests of a round")
    parser.add_argument("--span", type=float, default=2.0, help="seconds within which those of a round are sent")
    parser.add_argument("--round", type=int, help="run only this round")
    parser.add_argument("--only", default="", help="send only these requests of a round")
    options = parser.parse_args()
    tally, faults = Tally(), 0
    setups = [
        Setup(model, engine != "compiled", engine == "lora", options.kv_blocks, options.ring_mib)
        for model, engine in itertools.product(options.models.split(","), options.engines.split(","))
    ]
    for setup in setups:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, serving(setup, Path(folder), options.seed) as served:
            print(f"{setup}: serving after {time.monotonic() - began:.0f} s", flush=True)  # noqa: T201
            run(
                served,
                options.seed,
                tally,
                rounds=1 if options.round is not None else 10**6,
                requests=options.requests,
                span=options.span,
                seconds=60 * options.minutes / len(setups),
                only={int(number) for number in options.only.split(",") if number},
                first_round=options.round or 0,
            )
        print(f"{setup}: {tally.counts['rounds']} rounds, {len(tally.faults) - faults} faults", flush=True)  # noqa: T201
        faults = len(tally.faults)
    print(tally.report())  # noqa: T201
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
