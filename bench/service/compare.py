"""Runs loads through gRPC, and directly on the service's engine, alternately."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import residuum
from bench.capture.processes import environment_of
from bench.capture.workload import Runner
from bench.output import Bar, table
from bench.processes import Helper, RunFailedError, running_store
from bench.service.load import Load, Measured, Start, run_load

WAYS = ("AsyncLLM", "residuum")
"""The two ways: vLLM's engine, called within its process, and `residuum.AsyncClient` in another process."""
PROBED = "residuum with probes"
"""The third way, if the job has probes."""

_ADDED = ("first_token_ms", "token_ms", "request_ms", "request_cpu_ms", "token_cpu_us")
"""The figures whose difference is reported. The last two are the CPU time of the service's process for a request of one
token, and for each further token."""

_BAR_STREAMS = 32
_LEAST_RATE, _MOST_TOKEN_MS, _MOST_FIRST_MS = 0.95, 0.2, 5.0
"""The bars: the least share of vLLM's tokens per second, and the most added time in ms, for each token and to the first
one."""
_MOST_PROBED_RATIO = 1.01
"""The bar for probes: the time of each token, over that without probes."""
_MOST_FIRST_RATIO = 1.05
"""The bar if prompts share their start: the time to the first token, over vLLM's. The cache makes it short."""


@dataclass(frozen=True)
class ServiceJob:
    """What to measure."""

    flags: tuple[str, ...]
    """The service's flags."""
    streams: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    requests_per_stream: int = 3
    rounds: int = 5
    prefill: int = 64
    decode: int = 128
    shared_prefix: int = 0
    """Tokens that all prompts begin with, read from the prefix cache."""
    captures: bool = False
    """Whether `residuum` captures the last token of each prompt and the reply, at all layers."""
    probes: int = 0
    """How many probes each request has in the third way; 0: there are only two ways."""
    runner: Runner = Runner.DEFAULT
    shown: dict[str, Any] = field(default_factory=dict)
    """Further fields of the workload for the result."""


async def measure(job: ServiceJob, folder: Path, data: Path) -> dict[str, Any]:
    """Measure, and return the part of the result. The store's data is in `data`."""
    with ExitStack() as stack:
        flags = list(job.flags)
        if job.captures:
            flags += ["--store", stack.enter_context(running_store(data)).endpoint]
        host = Helper("bench.service.host", flags, folder / "service.log", environment_of(folder, job.runner))
        stack.callback(host.stop)
        async with residuum.AsyncClient(f"127.0.0.1:{host.first['port']}", timeout=None) as client:
            probes = make_probes(await client.info(), job.probes)
            levels = [await _level(job, streams, host, client, probes) for streams in job.streams]
    return {
        "parameters": {**{name: value for name, value in asdict(job).items() if name not in _UNSHOWN}, **job.shown},
        "model_runner": host.first["model_runner"],
        "levels": levels,
    }


_UNSHOWN = {"flags", "shown", "runner"}
_CAPTURE = residuum.Capture(layers="all", positions=[(-1, None)])


def make_probes(info: residuum.ModelInfo, number: int) -> list[residuum.Probe]:
    """Return linear probes of random weights, spread over the layers."""
    source = np.random.default_rng(5)
    return [
        residuum.Probe(
            source.standard_normal(info.hidden_size), layer=at * info.num_layers // number, name=f"probe-{at}"
        )
        for at in range(number)
    ]


async def _level(
    job: ServiceJob, streams: int, host: Helper, client: residuum.AsyncClient, probes: Sequence[residuum.Probe]
) -> dict[str, Any]:
    ways = (*WAYS, PROBED) if probes else WAYS
    summaries: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(-1, job.rounds):  # round -1 is a warm-up: threads start, buffers are allocated
        for way in ways if number % 2 == 0 else ways[::-1]:
            requests = job.requests_per_stream * streams if number >= 0 else streams
            load = Load(
                f"{ways.index(way)}-{streams}-{number}", streams, requests, job.prefill, job.decode,
                host.first["vocab_size"], job.shared_prefix,
            )  # fmt: skip
            start = None
            if way != WAYS[0]:
                start = _through(client, _CAPTURE if job.captures else None, probes if way == PROBED else ())
            measured, cpu_seconds = await _run(load, host, start)
            _, short_cpu_seconds = await _run(load.shortened(), host, start)
            if number >= 0:
                summaries[way].append({**measured.summary(), **cpu_of(load, cpu_seconds, short_cpu_seconds)})
    level = {"streams": streams, **summaries, "difference": difference(summaries)}
    return {**level, "probes": difference(summaries, WAYS[1], PROBED)} if probes else level


async def _run(load: Load, host: Helper, start: Start | None) -> tuple[Measured, float]:
    """Return the measurements of a load, and the CPU seconds of the service's process meanwhile.

    Args:
        load: The load.
        host: The process of the service.
        start: Starts a request; None: the host calls its engine directly.
    """
    before = processor_seconds(host.process.pid)
    measured = Measured(**host.call(asdict(load))) if start is None else await run_load(load, start)
    return measured, processor_seconds(host.process.pid) - before


def processor_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, all threads together; see clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)


def cpu_of(load: Load, seconds: float, short_seconds: float) -> dict[str, float]:
    """Return the CPU cost of a request and of each further token for the service's process.

    Args:
        load: A load.
        seconds: The CPU seconds of the load.
        short_seconds: The CPU seconds of as many replies with one token.
    """
    further_tokens = load.requests * max(load.decode - 1, 1)
    return {
        "request_cpu_ms": round(short_seconds / load.requests * 1e3, 4),
        "token_cpu_us": round((seconds - short_seconds) / further_tokens * 1e6, 3),
    }


def _through(client: residuum.AsyncClient, capture: residuum.Capture | None, probes: Sequence[residuum.Probe]) -> Start:
    async def start(name: str, prompt: Sequence[int], decode: int) -> AsyncGenerator[int, None]:
        stream = client.stream(
            list(prompt), request_id=name, max_tokens=decode, temperature=0.0, ignore_eos=True, capture=capture,
            probes=probes,
        )  # fmt: skip
        async with stream:
            async for delta in stream:
                if {len(scores) for scores in (delta.scores or {}).values()} - {len(delta.token_ids)}:
                    raise RunFailedError(f"a message of {name} lacks scores of its tokens")
                yield len(delta.token_ids)

    return start


def difference(
    summaries: Mapping[str, Sequence[Mapping[str, float]]], base: str = WAYS[0], other: str = WAYS[1]
) -> dict[str, float]:
    """Return the overhead of a way over another: medians over the rounds of the difference between them."""
    pairs = list(zip(summaries[base], summaries[other], strict=True))

    def median(values: Iterator[float]) -> float:
        return round(statistics.median(values), 4)

    return {
        "tokens_per_second_ratio": median(
            ours["tokens_per_second"] / vllm["tokens_per_second"] for vllm, ours in pairs
        ),
        "first_token_ratio": median(ours["first_token_ms"] / vllm["first_token_ms"] for vllm, ours in pairs),
        "token_ratio": median(ours["token_ms"] / vllm["token_ms"] for vllm, ours in pairs),
        **{f"added_{name}": median(ours[name] - vllm[name] for vllm, ours in pairs) for name in _ADDED},
    }


def bars(part: Mapping[str, Any]) -> list[Bar]:
    """Return the bars for 32 streams; none if 32 streams were not measured."""
    found = []
    for level in part["levels"]:
        if level["streams"] == _BAR_STREAMS:
            more, streams = level["difference"], f"{_BAR_STREAMS} streams"
            rate = more["tokens_per_second_ratio"]
            found.append(Bar(f"tokens/s of {streams}, over AsyncLLM's", rate, _LEAST_RATE, at_most=False))
            found.append(Bar(f"ms more a token, of {streams}", more["added_token_ms"], _MOST_TOKEN_MS))
            if part["parameters"]["shared_prefix"]:
                ratio = more["first_token_ratio"]
                found.append(Bar(f"to the first token, of {streams}, over AsyncLLM's", ratio, _MOST_FIRST_RATIO))
            else:
                found.append(
                    Bar(f"ms more to the first token, of {streams}", more["added_first_token_ms"], _MOST_FIRST_MS)
                )
            if "probes" in level:
                ratio, number = level["probes"]["token_ratio"], part["parameters"]["probes"]
                found.append(
                    Bar(f"each token with {number} probes, over without, {streams}", ratio, _MOST_PROBED_RATIO)
                )
    return found


def show(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table."""
    head = [
        *("streams", "way", "tokens/s", "requests/s", "first token, ms", "each token, ms", "request, ms"),
        *("CPU of a request, ms", "of a token, us"),
    ]
    rows = []
    for level in part["levels"]:
        for way in (way for way in (*WAYS, PROBED) if way in level):
            columns = ("tokens_per_second", "requests_per_second", *_ADDED)
            medians = [statistics.median(summary[name] for summary in level[way]) for name in columns]
            rows.append([str(level["streams"]), way, *(f"{value:.4g}" for value in medians)])
        rows += [_difference_row(name, level[name]) for name in ("difference", "probes") if name in level]
    yield table(head, rows)


def _difference_row(name: str, more: Mapping[str, float]) -> list[str]:
    return [
        *("", name, f"x{more['tokens_per_second_ratio']:.3f}", ""),
        *(f"{more[f'added_{figure}']:+.3f}" for figure in _ADDED),
    ]
