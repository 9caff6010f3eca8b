"""One process of bench.isolated that measures a peer; see `bench.child`."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.capture.results import Iteration, Memory, Run
from bench.capture.workload import Mode, Runner, Workload
from bench.isolated.configuration import Peer as PeerName
from bench.machine import used_mib
from bench.memory import peak_mib
from bench.plain import restore
from bench.processes import hand_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.peers.peer import Array, Peer

_MODULES = {
    PeerName.HOOKS: "hooks",
    PeerName.HOOKS_32: "hooks",
    PeerName.EXTRACT: "extract",
    PeerName.TRANSFORMERS: "hugging_face",
    PeerName.NNSIGHT: "nnsight_trace",
    PeerName.VLLM_LENS: "lens",
}


class WrongRowsError(RuntimeError):
    """A peer returned other rows than requested, so the run is invalid."""


@dataclass(frozen=True)
class PeerJob:
    """The task of this process, which it gets as JSON."""

    peer: PeerName
    mode: Mode
    round: int
    runner: Runner
    workload: Workload
    folder: str

    @property
    def layers(self) -> tuple[int, ...]:
        """The captured layers; empty for all."""
        return self.workload.layers


def main() -> None:
    """Run the job in the first file, and write its measurements to the second."""
    job_file, result_file = map(Path, sys.argv[1:])
    job = restore(PeerJob, json.loads(job_file.read_text()))
    asyncio.run(run(job, result_file))


async def run(job: PeerJob, result_file: Path) -> None:
    """Run a job; does not return unless it fails."""
    started = time.perf_counter()
    peer: Peer = await importlib.import_module(f"bench.peers.{_MODULES[job.peer]}").start(job)
    try:
        hand_over(result_file, asdict(await measure(job, peer, started)))
    finally:
        peer.shutdown()


async def measure(job: PeerJob, peer: Peer, started: float) -> Run:
    """Measure a peer whose start began at `started`, on `time.perf_counter`."""
    ready = time.perf_counter()
    count = job.workload.warmups + job.workload.iterations
    iterations = [await _iterate(job, peer, number) for number in range(count)]
    return Run(
        mode=job.mode,
        round=job.round,
        runner=job.runner,
        model_runner=peer.model_runner,
        shared=False,
        device=peer.device,
        num_layers=peer.num_layers,
        start_seconds=ready - started,
        memory=Memory(peak_mib=peak_mib(), gpus_used_mib=used_mib()),
        iterations=tuple(iterations[job.workload.warmups :]),
    )


async def _iterate(job: PeerJob, peer: Peer, number: int) -> Iteration:
    workload = job.workload
    prompts = {
        f"{job.peer.value}-{number}-{index}": prompt
        for index, prompt in enumerate(workload.prompts(number, peer.vocab_size))
    }
    await peer.synchronise()
    batch = await peer.generate(prompts)
    await peer.synchronise()
    ended = time.perf_counter()
    held = await peer.fetch(list(prompts))
    fetched = time.perf_counter()
    layers = workload.captured_layers(job.mode, peer.num_layers)
    rows, num_bytes = count_rows(held, len(prompts), len(layers), workload.rows_per_request)
    return Iteration(
        generation_seconds=ended - batch.started,
        settled_seconds=ended - batch.started,
        prompt_tokens=sum(map(len, prompts.values())),
        generated_tokens=sum(map(len, batch.replies)),
        rows=rows,
        num_bytes=num_bytes,
        replies=(),
        completed_seconds=fetched - batch.started,
        fetched_seconds=fetched - batch.started,
    )


def count_rows(held: Sequence[Sequence[Array]], num_requests: int, num_layers: int, positions: int) -> tuple[int, int]:
    """Return the number of rows of some requests, and their size in bytes.

    Raises:
        WrongRowsError: A request has too few or too many rows, or only zeros.
    """
    if len(held) != num_requests:
        raise WrongRowsError(f"rows of {len(held)} requests were returned instead of {num_requests}")
    for arrays in held:
        rows = sum(math.prod(array.shape[:-1]) for array in arrays)
        if rows != num_layers * positions:
            shapes = sorted({array.shape for array in arrays})
            raise WrongRowsError(f"a request has {rows} rows ({shapes}) instead of {num_layers} x {positions}")
        if not all(np.any(array) for array in arrays):
            raise WrongRowsError("a request has rows with only zeros")
    return num_requests * num_layers * positions, sum(array.nbytes for arrays in held for array in arrays)
