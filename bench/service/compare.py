"""Runs loads through gRPC, and directly on the service's engine, alternately."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import residuum
from bench.capture.processes import environment_of
from bench.capture.workload import Runner
from bench.output import Bar, table
from bench.processes import Helper, RunFailedError, running_store
from bench.service.load import Load, Measured, Start, run_load

WAYS = ("AsyncLLM", "residuum")
"""The two ways: vLLM's engine, called within its process, and `residuum.AsyncClient` in another process."""
MORE = ("captures", "probes", "features")
"""What requests of further ways have, if the job has it. Each is compared with `residuum` without it."""

_ADDED = ("first_token_ms", "token_ms", "request_ms", "request_cpu_ms", "token_cpu_us")
"""The figures whose difference is reported. The last two are the CPU time of the service's process for a request of one
token, and for each further token."""

_BAR_STREAMS = 32
_LEAST_RATE, _MOST_TOKEN_MS, _MOST_FIRST_MS = 0.95, 0.2, 5.0
"""The bars: the least share of vLLM's tokens per second, and the most added time in ms, for each token and to the first
one."""
_MOST_TOKEN_RATIO = {"probes": 1.01, "features": 1.05}
"""The bars for probes and features: the time of each token, over that without them."""
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
    """Whether to measure requests that capture the last token of each prompt and the reply, at all layers."""
    probes: int = 0
    """How many linear probes the requests of another way have; 0: there is no such way."""
    features: int = 0
    """The features of an autoencoder at a layer, of which another way captures the strongest 32 of each token; 0: there
    is no such way."""
    runner: Runner = Runner.DEFAULT
    shown: dict[str, Any] = field(default_factory=dict)
    """Further fields of the workload for the result."""


async def measure(job: ServiceJob, folder: Path, data: Path) -> dict[str, Any]:
    """Measure, and return the part of the result. The store's data is in `data`."""
    with ExitStack() as stack:
        flags = list(job.flags)
        if job.captures or job.features:
            flags += ["--store", stack.enter_context(running_store(data)).endpoint]
        host = Helper("bench.service.host", flags, folder / "service.log", environment_of(folder, job.runner))
        stack.callback(host.stop)
        async with residuum.AsyncClient(f"127.0.0.1:{host.first['port']}", timeout=None) as client:
            ways = {WAYS[1]: _through(client), **_more_ways(job, client, await client.info())}
            levels = []
            for streams in job.streams:
                levels.append(await _level(job, streams, host, ways))
                print(*show({"levels": levels[-1:]}), sep="\n", flush=True)  # a run that is stopped shows these
    return {
        "parameters": {**{name: value for name, value in asdict(job).items() if name not in _UNSHOWN}, **job.shown},
        "model_runner": host.first["model_runner"],
        "levels": levels,
    }


_UNSHOWN = {"flags", "shown", "runner"}
_CAPTURE = residuum.Capture(layers="all", positions=[(-1, None)])
_STRONGEST = 32


def _more_ways(job: ServiceJob, client: residuum.AsyncClient, info: residuum.ModelInfo) -> dict[str, Start]:
    """Return the further ways of a job, by the names in MORE."""
    ways = {}
    if job.captures:
        ways["captures"] = _through(client, capture=_CAPTURE)
    if job.probes:
        ways["probes"] = _through(client, probes=make_probes(info, job.probes))
    if job.features:
        sae, layer = make_sae(info, job.features), info.num_layers // 2
        capture = residuum.Capture(layers=[layer], positions=_CAPTURE.positions, sae=sae, dimensions=_STRONGEST)
        ways["features"] = _through(client, capture=capture)
    return ways


def make_probes(info: residuum.ModelInfo, number: int) -> list[residuum.Probe]:
    """Return linear probes of random weights, spread over the layers."""
    source = np.random.default_rng(5)
    return [
        residuum.Probe(
            source.standard_normal(info.hidden_size), layer=at * info.num_layers // number, name=f"probe-{at}"
        )
        for at in range(number)
    ]


def make_sae(info: residuum.ModelInfo, features: int) -> residuum.SAE:
    """Return a ReLU autoencoder of random weights in 16 bits, as published ones have."""
    source = np.random.default_rng(6)
    weights = source.standard_normal((features, info.hidden_size), dtype=np.float32).astype(ml_dtypes.bfloat16)
    return residuum.SAE(weights, weights)


async def _level(job: ServiceJob, streams: int, host: Helper, ways: Mapping[str, Start]) -> dict[str, Any]:
    names = (WAYS[0], *ways)
    summaries: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(-1, job.rounds):  # round -1 is a warm-up: threads start, buffers are allocated
        for name in names if number % 2 == 0 else names[::-1]:
            requests = job.requests_per_stream * streams if number >= 0 else streams
            load = Load(
                f"{names.index(name)}-{streams}-{number}", streams, requests, job.prefill, job.decode,
                host.first["vocab_size"], job.shared_prefix,
            )  # fmt: skip
            measured, cpu_seconds = await _run(load, host, ways.get(name))
            _, short_cpu_seconds = await _run(load.shortened(), host, ways.get(name))
            if number >= 0:
                summaries[name].append({**measured.summary(), **cpu_of(load, cpu_seconds, short_cpu_seconds)})
    return {
        "streams": streams,
        **summaries,
        "difference": difference(summaries, *WAYS),
        "over_vllm": {name: difference(summaries, WAYS[0], name) for name in ways if name in MORE},
        "over_residuum": {name: difference(summaries, WAYS[1], name) for name in ways if name in MORE},
    }


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


def _through(
    client: residuum.AsyncClient, capture: residuum.Capture | None = None, probes: Sequence[residuum.Probe] = ()
) -> Start:
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


def difference(summaries: Mapping[str, Sequence[Mapping[str, float]]], base: str, other: str) -> dict[str, float]:
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
    level = next((level for level in part["levels"] if level["streams"] == _BAR_STREAMS), None)
    if level is None:
        return []
    streams, more = f"{_BAR_STREAMS} streams", level["difference"]
    rate, added = more["tokens_per_second_ratio"], more["added_token_ms"]
    found = [
        Bar(f"tokens/s of {streams}, over AsyncLLM's", rate, _LEAST_RATE, at_most=False),
        Bar(f"ms more a token, of {streams}", added, _MOST_TOKEN_MS),
    ]
    if part["parameters"]["shared_prefix"]:
        ratio = more["first_token_ratio"]
        found.append(Bar(f"to the first token, of {streams}, over AsyncLLM's", ratio, _MOST_FIRST_RATIO))
        for base in ("over_vllm", "over_residuum") if "captures" in level["over_vllm"] else ():
            than = {"over_vllm": "over AsyncLLM's", "over_residuum": "over without"}[base]
            ratio = level[base]["captures"]["first_token_ratio"]
            found.append(Bar(f"to the first token with captures, of {streams}, {than}", ratio, _MOST_FIRST_RATIO))
    else:
        found.append(Bar(f"ms more to the first token, of {streams}", more["added_first_token_ms"], _MOST_FIRST_MS))
    for name, limit in _MOST_TOKEN_RATIO.items():
        if name in level["over_residuum"]:
            ratio, number = level["over_residuum"][name]["token_ratio"], part["parameters"][name]
            found.append(Bar(f"each token with {number} {name}, over without, {streams}", ratio, limit))
    return found


def show(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table. Further ways have a row of their own, and one with what they add to `residuum`."""
    head = [
        *("streams", "way", "tokens/s", "requests/s", "first token, ms", "each token, ms", "request, ms"),
        *("CPU of a request, ms", "of a token, us"),
    ]
    rows = []
    for level in part["levels"]:
        for way, summaries in ((way, level[way]) for way in (*WAYS, *MORE) if way in level):
            columns = ("tokens_per_second", "requests_per_second", *_ADDED)
            medians = [statistics.median(summary[name] for summary in summaries) for name in columns]
            name = f"residuum, {way}" if way in MORE else way
            rows.append([str(level["streams"]), name, *(f"{value:.4g}" for value in medians)])
        rows.append(_difference_row("residuum - AsyncLLM", level["difference"]))
        rows += [_difference_row(f"{way} - residuum", more) for way, more in level["over_residuum"].items()]
    yield table(head, rows)


def _difference_row(name: str, more: Mapping[str, float]) -> list[str]:
    return [
        *("", name, f"x{more['tokens_per_second_ratio']:.3f}", ""),
        *(f"{more[f'added_{figure}']:+.3f}" for figure in _ADDED),
    ]
