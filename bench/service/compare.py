"""Runs loads through gRPC, and directly on the service's engine, alternately."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import residuum
from bench.capture.processes import environment_of
from bench.capture.workload import Runner
from bench.processes import Helper, RunFailedError, running_store
from bench.service.http_client import new_session
from bench.service.load import Load, Measured, run_load
from bench.service.report import show
from bench.service.served import STOCK, starting_servers
from bench.service.ways import ADDED, MORE, WAYS, Way, http_ways, more_ways, through_grpc


@dataclass(frozen=True)
class ServiceJob:
    """What to measure."""

    flags: tuple[str, ...]
    """The service's flags."""
    streams: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    requests_per_stream: int = 3
    least_requests: int = 12
    """The fewest requests of a load. The first-token times of one stream vary, so a median of three says little."""
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
    served: Mapping[str, Any] | None = None
    """vLLM's arguments for `vllm serve`, if that is compared, too."""
    runner: Runner = Runner.DEFAULT
    shown: dict[str, Any] = field(default_factory=dict)
    """Further fields of the workload for the result."""

    def requests(self, streams: int) -> int:
        """Return the requests of a load with this number of streams."""
        return max(self.requests_per_stream * streams, self.least_requests)


async def measure(job: ServiceJob, folder: Path, data: Path) -> dict[str, Any]:
    """Measure, and return the part of the result. The store's data is in `data`."""
    environment = environment_of(folder, job.runner)
    async with AsyncExitStack() as stack:
        flags, store, servers = list(job.flags), "", {}
        if job.captures or job.features:
            store = stack.enter_context(running_store(data)).endpoint
            flags += ["--store", store]
        if job.served is not None:  # all engines start at the same time
            servers = stack.enter_context(starting_servers(job.served, folder, environment, store))
        host = Helper("bench.service.host", flags, folder / "service.log", environment)
        stack.callback(host.stop)
        for server in servers.values():
            server.wait_until_serving()
        client = residuum.AsyncClient(f"127.0.0.1:{host.first['port']}", timeout=None)
        await stack.enter_async_context(client)
        session = await stack.enter_async_context(new_session())
        pid = host.process.pid
        ways = {
            WAYS[0]: Way(pid, None),
            WAYS[1]: Way(pid, through_grpc(client)),
            **more_ways(job, client, pid, await client.info()),
            **http_ways(servers, session, has_captures=job.captures),
        }
        levels = []
        for streams in job.streams:
            levels.append(await _level(job, streams, host, ways, client))
            print(*show({"levels": levels[-1:]}), sep="\n", flush=True)  # a run that is stopped shows these
    return {
        "parameters": {**{name: value for name, value in asdict(job).items() if name not in _UNSHOWN}, **job.shown},
        "model_runner": host.first["model_runner"],
        "levels": levels,
    }


_UNSHOWN = {"flags", "shown", "runner", "served"}


async def _level(
    job: ServiceJob, streams: int, host: Helper, ways: Mapping[str, Way], client: residuum.AsyncClient
) -> dict[str, Any]:
    names = tuple(ways)
    summaries: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(-1, job.rounds):  # round -1 is a warm-up: threads start, buffers are allocated
        for name in names if number % 2 == 0 else names[::-1]:
            requests = job.requests(streams) if number >= 0 else streams
            load = Load(
                f"{names.index(name)}-{streams}-{number}", streams, requests, job.prefill, job.decode,
                host.first["vocab_size"], job.shared_prefix,
            )  # fmt: skip
            run = await run_way(load, host, ways[name], client)
            short = await run_way(load.shortened(), host, ways[name], client)
            if number >= 0:
                _check_spread(run.measured, name)
                stored = {"stored_bytes_per_token": run.stored_bytes / run.measured.tokens} if run.stored_bytes else {}
                cpu = cpu_of(load, run.cpu_seconds, short.cpu_seconds)
                summaries[name].append({**run.measured.summary(), **cpu, **stored})
    return {
        "streams": streams,
        **summaries,
        "difference": difference(summaries, *WAYS),
        "over_vllm": {name: difference(summaries, WAYS[0], name) for name in ways if name in MORE},
        "over_residuum": {name: difference(summaries, WAYS[1], name) for name in ways if name in MORE},
        **({"over_served": over_served(summaries)} if STOCK in ways else {}),
    }


def _check_spread(measured: Measured, way: str) -> None:
    """Check that a load has times between tokens, which other ways are compared with."""
    if not measured.summary()["token_ms"]:
        raise RunFailedError(
            f"most replies of {way} came in one message, so there is no time between tokens: use a longer --decode"
        )


class Run(NamedTuple):
    """A load that has run in one of the ways."""

    measured: Measured
    cpu_seconds: float
    """The CPU seconds of the way's process."""
    stored_bytes: int
    """The bytes of the captures in the store."""


async def run_way(load: Load, host: Helper, way: Way, client: residuum.AsyncClient) -> Run:
    """Run a load.

    If its requests capture, wait until the store has all rows, so that they do not disturb the next load.

    Args:
        load: The load.
        host: The process of the service, which calls its engine directly for the way without a start.
        way: How to run it.
        client: Asks the store for captures.
    """
    before = processor_seconds(way.pid)
    measured = Measured(**host.call(asdict(load))) if way.start is None else await run_load(load, way.start)
    seconds, stored_bytes = processor_seconds(way.pid) - before, 0
    if way.capture_id is not None:
        for index in range(load.requests):
            capture_id = way.capture_id.format(f"{load.name}-{index}")
            manifest = await client.manifest(capture_id, wait=True)
            if manifest.state != "complete":
                raise RunFailedError(f"capture {capture_id} ended {manifest.state}")
            stored_bytes += manifest.num_bytes
    return Run(measured, seconds, stored_bytes)


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
        **{f"added_{name}": median(ours[name] - vllm[name] for vllm, ours in pairs) for name in ADDED},
    }


def over_served(summaries: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, Any]]:
    """Return the overhead of each way over stock `vllm serve`, but of the way without a server.

    `first_token_ratios` has the ratios of the rounds, sorted.
    """
    return {
        name: {
            **difference(summaries, STOCK, name),
            "first_token_ratios": sorted(
                round(ours["first_token_ms"] / stock["first_token_ms"], 4)
                for stock, ours in zip(summaries[STOCK], rounds, strict=True)
            ),
        }
        for name, rounds in summaries.items()
        if name not in {STOCK, WAYS[0]}
    }
