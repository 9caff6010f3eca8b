"""The ways to run a load: through gRPC with what requests may ask for, and through HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import ml_dtypes
import numpy as np

import residuum
from bench.processes import RunFailedError
from bench.service.http_client import through_http
from bench.service.load import Start
from bench.service.served import CAPTURES, STOCK, TAPS, HttpServer

if TYPE_CHECKING:
    from bench.service.compare import ServiceJob

WAYS = ("AsyncLLM", "residuum")
"""The two ways: vLLM's engine, called within its process, and `residuum.AsyncClient` in another process."""
MORE = ("captures", "probes", "features")
"""What requests of further ways have, if the job has it. Each is compared with `residuum` without it."""

ADDED = ("first_token_ms", "token_ms", "request_ms", "request_cpu_ms", "token_cpu_us")
"""The figures whose difference is reported. The last two are the CPU time of the service's process for a request of one
token, and for each further token."""

_CAPTURE = residuum.Capture(layers="all", positions=[(-1, None)])
_STRONGEST = 32


@dataclass(frozen=True)
class Way:
    """A way to run a load."""

    pid: int
    """The process whose CPU time is measured."""
    start: Start | None
    """Starts a request; None: the service's process calls its engine directly."""
    capture_id: str | None = None
    """The ID of a request's capture, with {} for the request's name; None if its requests capture nothing."""


def more_ways(job: ServiceJob, client: residuum.AsyncClient, pid: int, info: residuum.ModelInfo) -> dict[str, Way]:
    """Return the further ways of a job, by the names in MORE. `pid` is the service's process."""
    ways = {}
    if job.captures:
        ways["captures"] = Way(pid, through_grpc(client, capture=_CAPTURE), "{}")
    if job.probes:
        ways["probes"] = Way(pid, through_grpc(client, probes=make_probes(info, job.probes)))
    if job.features:
        sae, layer = make_sae(info, job.features), info.num_layers // 2
        capture = residuum.Capture(layers=[layer], positions=_CAPTURE.positions, sae=sae, dimensions=_STRONGEST)
        ways["features"] = Way(pid, through_grpc(client, capture=capture), "{}")
    return ways


def http_ways(
    servers: Mapping[str, HttpServer], session: aiohttp.ClientSession, *, has_captures: bool
) -> dict[str, Way]:
    """Return the ways through HTTP to the servers of `starting_servers`; none if there are none."""
    ways = {}
    for name, kind in ((STOCK, "stock"), (TAPS, "taps")) if servers else ():
        ways[name] = Way(servers[kind].process.pid, through_http(session, servers[kind].url, {"model": "bench"}))
    if servers and has_captures:
        more = {"model": "bench", "vllm_xargs": residuum.vllm_xargs(_CAPTURE)}
        taps = servers["taps"]
        ways[CAPTURES] = Way(taps.process.pid, through_http(session, taps.url, more), "cmpl-{}")
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


def through_grpc(
    client: residuum.AsyncClient, capture: residuum.Capture | None = None, probes: Sequence[residuum.Probe] = ()
) -> Start:
    """Return what starts requests with `residuum.AsyncClient`."""

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
