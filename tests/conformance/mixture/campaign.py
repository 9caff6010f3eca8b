"""Serves one tiny model, and sends it rounds of random requests."""

from __future__ import annotations

import asyncio
import json
import os
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import torch

import residuum
from bench.conformance.architectures import ARCHITECTURES
from bench.conformance.models import make_model
from bench.conformance.reference import ALL_SITES, Reference
from svc_common.launcher import running_services
from tests import one_process, warm_start
from tests.conformance.journal import Journal
from tests.conformance.mixture.cases import draw_round
from tests.conformance.mixture.check import Checker
from tests.conformance.mixture.lives import live_all
from tests.conformance.mixture.tally import Tally
from tests.conformance.mixture.world import StoredPrompt, World, make_world
from tests.reference.adapters import make_adapter, merge

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from bench.conformance.architectures import Architecture
    from tests.conformance.journal import Step

CHUNK = 48
"""Most tokens of a step, so that most prompts are computed in chunks, next to replies."""
KV_BLOCK = 32
"""Positions in a block of the KV cache."""
RUNNING = 12
"""Most requests at a time."""

_ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Threads that wait for each other take most of the time of such small models, on a busy machine."""


@dataclass(frozen=True)
class Setup:
    """What is served."""

    model: str = "llama"
    """The name of an architecture of `bench.conformance`."""
    eager: bool = True
    lora: bool = False
    """Whether requests may use one of two LoRA adapters. On a CPU, vLLM compiles no model with LoRA."""
    kv_blocks: int = 24
    """Blocks of the KV cache. By default it holds three of the longest requests: those that run at once preempt each
    other."""
    ring_mib: int = 4
    """MiB of the ring. A capture that may shed rows loses some if it is full."""


@dataclass
class Served:
    """A running service, and what its requests are compared with."""

    world: World
    references: dict[str | None, Reference]
    journal: Journal
    client: residuum.Client
    folder: Path
    setup: Setup


def _sites(architecture: Architecture) -> tuple[str, ...]:
    refused = architecture.refused_sites if architecture.refused else frozenset()
    return tuple(site for site in architecture.compared(ALL_SITES) if site not in architecture.lacking | refused)


@contextmanager
def serving(setup: Setup, folder: Path, seed: int) -> Iterator[Served]:
    """Serve a model for as long as the context lasts."""
    torch.set_num_threads(1)  # the model is tiny, and the engine uses the other cores
    architecture = ARCHITECTURES[setup.model]
    model = make_model(architecture, folder / setup.model)
    sites = _sites(architecture)
    adapters: dict[str, Path] = {}
    if setup.lora:
        adapters["wide"] = make_adapter(folder / "wide", model, 1, rank=12, alpha=6)
        modules = ("q_proj", "v_proj", "down_proj")
        adapters["narrow"] = make_adapter(folder / "narrow", model, 2, rank=4, alpha=2, modules=modules, rslora=True)
    engine_args = {
        "scheduler_cls": "tests.conformance.scheduler.JournalScheduler",
        "block_size": KV_BLOCK,
        "num_gpu_blocks_override": setup.kv_blocks,
        **architecture.arguments(gpu=False),
        **one_process.ENGINE_ARGS,
    }
    arguments = [
        "--dtype=float32",
        f"--max-num-batched-tokens={CHUNK}",
        f"--max-num-seqs={RUNNING}",
        "--kv-cache-gib=0.1",
        f"--ring-mib={setup.ring_mib}",
        "--sae-mib=1",
        "--max-vectors=600",  # few, so that those of other requests take the place of vectors that were used
        "--max-active-vectors=256",
        f"--capture-sites={','.join(sites)}",
        f"--engine-args={json.dumps(engine_args)}",
        *(["--enforce-eager", "--no-fold-norms"] if setup.eager else ["--fold-norms"]),
        *([f"--lora-modules={','.join(f'{name}={place}' for name, place in adapters.items())}"] if adapters else []),
    ]
    journal = folder / "journal.jsonl"
    with (
        patch.dict(os.environ, {"RESIDUUM_TEST_JOURNAL": str(journal), **_ONE_THREAD}),
        running_services(str(model), inference_arguments=arguments, launch=warm_start.launch) as (_, inference),
        residuum.Client(inference.endpoint) as client,
    ):
        info = client.info()
        references: dict[str | None, Reference] = {name: Reference(architecture, model) for name in (None, *adapters)}
        for name, place in adapters.items():
            merge(references[name].model, place)
        for reference in references.values():
            reference.widths = info.site_widths
        top = int(architecture.values.get("num_experts_per_tok", 0)) if architecture.routed else 0
        world = make_world(info, references[None], sites, seed, top)
        yield Served(world, references, Journal(journal), client, folder, setup)


def run(
    served: Served,
    seed: int,
    tally: Tally,
    *,
    rounds: int,
    requests: int = 32,
    span: float = 2.0,
    seconds: float = 1e9,
    only: Collection[int] = (),
    first_round: int = 0,
) -> None:
    """Send rounds of random requests, and check each.

    Args:
        served: The service.
        seed: The seed of all rounds. The requests of a round depend on nothing else.
        tally: Where counts and faults are kept.
        rounds: The most rounds.
        requests: The requests of a round.
        span: Seconds within which they are sent.
        seconds: Start no round after this time.
        only: Send only these requests of a round, to find the cause of a fault.
        first_round: The number of the first round.
    """
    end, steps_before = time.monotonic() + seconds, len(served.journal.steps())
    for number in range(first_round, first_round + rounds):
        if time.monotonic() > end:
            break
        before, began = len(tally.faults), time.monotonic()
        asyncio.run(_round(served, seed, number, tally, requests, span, only))
        tally.counts["rounds"] += 1
        print(f"round {number}: {time.monotonic() - began:.0f} s", flush=True)  # noqa: T201 - a command prints
        for fault in tally.faults[before:]:
            print(f"FAULT {served.setup} round {number}: {fault}", flush=True)  # noqa: T201 - a command prints
    _count_steps(served.journal.steps()[steps_before:], tally)


async def _round(
    served: Served, seed: int, number: int, tally: Tally, requests: int, span: float, only: Collection[int]
) -> None:
    rng, world = np.random.default_rng([seed, number, 2]), served.world
    prefix = f"mix-{seed}-{number}"
    warnings.simplefilter("ignore", residuum.EmptyCaptureWarning)  # some selections have no position of a prompt
    async with residuum.AsyncClient(served.client.endpoint) as client:
        world = replace(world, stored=await _store(client, world, f"{prefix}-stored", rng))
        cases = [case for case in draw_round(rng, world, prefix, requests, span) if not only or case.number in only]
        began = time.monotonic()
        outcomes = await live_all(client, cases, world)
        tally.seconds["requests"] += time.monotonic() - began
        checker = Checker(client, served.client, served.references, world, served.folder, tally)
        for case in cases:
            await checker.check(case, outcomes[case.number])
        await checker.finish()
        tally.seconds["requests and checks"] += time.monotonic() - began
        await client.delete(prefix=prefix)


async def _store(client: residuum.AsyncClient, world: World, name: str, rng: np.random.Generator) -> StoredPrompt:
    """Capture a prompt at all steerable sites; other requests set its rows."""
    prompt = [int(token) for token in rng.integers(3, world.tokens, size=24)]
    points = [f"{site}.{layer}" for site in world.steerable for layer in world.layers[site]]
    await client.generate(prompt, max_tokens=0, request_id=name, capture=residuum.Capture(points=points))
    acts = await client.activations(name)
    rows = {site: {layer: acts.select(site=site)[layer] for layer in world.layers[site]} for site in world.steerable}
    return StoredPrompt(name, len(prompt), rows)


def _count_steps(steps: Sequence[Step], tally: Tally) -> None:
    """Count what the engine did: hits of the prefix cache, preemptions, steps that decoded and prefilled together."""
    seen: set[str] = set()
    for step in steps:
        tally.counts["steps"] += 1
        tally.counts["steps that prefilled and decoded"] += step.is_mixed
        tally.counts["preemptions"] += len(step.preempted)
        for name, (first, _) in step.chunks.items():
            if name not in seen and first > 0:
                tally.counts["sequences that began in the prefix cache"] += 1
                tally.counts["positions read from the prefix cache"] += first
            seen.add(name)
    tally.counts["requests in the largest step"] = max(
        tally.counts["requests in the largest step"], *(len(step.chunks) for step in steps)
    )
