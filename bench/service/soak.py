"""`python -m bench.service.soak`: checks that the memory of no process grows with the number of requests.

It runs both services with a real engine. Requests rotate through all kinds: some capture, some are steered, some are
broken off, some are refused. Captures are read and deleted. Requests start in groups, and the memory of each process is
sampled after each group.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import residuum
from bench.machine import Machine
from bench.options import add_model, add_output, model_of, positive
from bench.output import table
from bench.parts import Part, run_parts
from bench.service.growth import MOST_KIB_PER_REQUEST, WARM_UP, Processes, growth_of
from bench.service.mixture import Mixture
from examples.model import default_model
from svc_common.launcher import Service, running_services

_FLAGS = (
    *("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "32"),
    # Memory that fills up by design must be full when the warm-up ends: KV blocks are reused in rotation, and so is the
    # ring.
    *("--kv-cache-gib", "0.25", "--ring-mib", "32", "--max-vectors", "32"),
    # On CPUs, vLLM caches oneDNN's kernels for each matrix of the model and the last 32 numbers of tokens. With more
    # numbers it would compile again and again, and oneDNN's cache of 1,024 kernels would fill slowly.
    *("--max-num-batched-tokens", "32"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write the result. Exits with an error if the memory of a process is not flat."""
    options = parse(arguments)
    name = options.shape or Path(options.model or default_model()).name
    run_parts("bench.service.soak", Machine.describe(), [name], options.output, lambda _: _measure(options))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.service.soak",
        description=__doc__.partition(": ")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    parser.add_argument("--requests", type=positive, default=2000, help="number of requests")
    parser.add_argument("--crowd", type=positive, default=20, help="requests that start together")
    add_output(parser)
    return parser.parse_args(arguments)


def _measure(options: argparse.Namespace) -> Part:
    model, engine_args = model_of(options)
    more = ["--engine-args", json.dumps(engine_args)] if engine_args else []
    with running_services(model, inference_arguments=[*_FLAGS, *more]) as both:
        part = asyncio.run(soak(*both, options.requests, options.crowd, texts=not options.shape))
    growing = [f"the memory of the {name} is not flat" for name, item in part["processes"].items() if not item["flat"]]
    return Part(part, show(part), failures=growing)


async def soak(store: Service, inference: Service, requests: int, crowd: int, *, texts: bool) -> dict[str, Any]:
    """Send requests to running services; return the part of the result."""
    processes = Processes({"service": inference.process.pid, "store": store.process.pid})
    counts, own = [0], [processes.own_mib()]
    began = time.perf_counter()
    async with residuum.AsyncClient(inference.endpoint, timeout=None) as client:
        mixture = Mixture(client, await client.info(), texts=texts)
        while counts[-1] < requests:
            numbers = range(counts[-1], min(counts[-1] + crowd, requests))
            await asyncio.gather(*map(mixture.run, numbers))
            counts.append(numbers.stop)
            own.append(processes.own_mib())
    mapped = processes.mapped_mib()
    series = {name: [round(sample[name], 2) for sample in own] for name in mapped}
    return {
        "parameters": {"requests": requests, "crowd": crowd, "flags": list(_FLAGS)},
        "requests_per_second": round(requests / (time.perf_counter() - began), 2),
        "made": dict(mixture.made),
        "requests": counts,
        "processes": {
            name: {**growth_of(counts, mib).to_json(), "mapped_mib": round(mapped[name], 2), "own_mib": mib}
            for name, mib in series.items()
        },
    }


def show(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the printed lines."""
    made = ", ".join(f"{count} {kind}" for kind, count in part["made"].items())
    yield f"{part['parameters']['requests']} requests: {made}"
    head = ["process", "at first, MiB", "warm, MiB", "at the end, MiB", "KiB/request", "at most, MiB", "memory is"]
    rows = [
        [
            name,
            *(f"{value:.1f}" for value in (item["own_mib"][0], item["before_mib"], item["after_mib"])),
            f"{item['kib_per_request']:+.2f}",
            f"{item['before_mib'] + item['margin_mib']:.1f}",
            "FLAT" if item["flat"] else "NOT FLAT",
        ]
        for name, item in part["processes"].items()
    ]
    yield table(head, rows)
    yield (
        f"FLAT: after the first {WARM_UP:.0%} of the requests, at most {MOST_KIB_PER_REQUEST:g} KiB for each further "
        "request, and at the end no more than the column before."
    )


if __name__ == "__main__":
    main()
