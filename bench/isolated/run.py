"""Runs a configuration in a fresh process, with residuum or a peer, and makes its result."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.capture.processes import environment_of, run_turn
from bench.capture.results import Iteration, Run
from bench.capture.workload import Runner, Turn, Workload
from bench.isolated.configuration import Configuration, Peer
from bench.machine import ROOT
from bench.plain import restore
from bench.processes import RunFailedError, run_child

TIMES = ("generation_time", "fetch_time", "total_time", "throughput_tokens_per_sec")
_STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.mean,
    "median": statistics.median,
    "min": min,
    "max": max,
}

PEERS_FOLDER = ROOT / ".peers"
"""The folder of peers that are not dependencies of this project; see bench/README.md."""


@dataclass(frozen=True)
class Surroundings:
    """The inputs of a process that do not affect its configuration."""

    runner: Runner = Runner.DEFAULT
    store_folder: Path | None = None
    """The folder of the store's data; None for the folder of temporary files."""
    peers_folder: Path = PEERS_FOLDER
    """The folder of the packages that only peers need."""
    profile: Path | None = None
    """The folder for a trace of torch's profiler; None for no trace."""
    peer_seconds: float = 900.0
    """The timeout of a peer in seconds. Some peers hang if they do not work."""


def measure(configuration: Configuration, workload: Workload, surroundings: Surroundings, round_number: int = 0) -> Run:
    """Measure a configuration in a separate process."""
    chosen = configuration.workload(workload)
    if configuration.peer:
        return _measure_peer(configuration, chosen, surroundings, round_number)
    turn = Turn(round_number, surroundings.runner, (configuration.mode_of_capture,))
    profile = str(surroundings.profile.absolute()) if surroundings.profile else ""
    (run,) = run_turn(turn, chosen, surroundings.store_folder, profile)
    return run


def _measure_peer(
    configuration: Configuration, workload: Workload, surroundings: Surroundings, round_number: int
) -> Run:
    peer = configuration.peer
    assert peer is not None  # noqa: S101 - the caller has checked
    if surroundings.profile:
        raise RunFailedError("Peers are not profiled; use --profile without --peer.")
    with tempfile.TemporaryDirectory(prefix="residuum-", dir=_memory_folder()) as scratch:
        job = {
            "peer": peer.value,
            "mode": configuration.mode_of_capture.value,
            "round": round_number,
            "runner": surroundings.runner.value,
            "workload": asdict(workload),
            "folder": scratch,
        }
        environment = environment_of(Path(scratch), surroundings.runner)
        if surroundings.peers_folder.is_dir() and peer in {Peer.NNSIGHT, Peer.VLLM_LENS}:
            paths = [*environment.get("PYTHONPATH", "").split(os.pathsep), str(surroundings.peers_folder.absolute())]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        seconds = surroundings.peer_seconds
        return restore(Run, run_child("bench.peers.child", job, Path(scratch), environment, peer.value, seconds))


def _memory_folder() -> str | None:
    """Return a folder with files in memory; None if there is none."""
    shared = Path("/dev/shm")  # noqa: S108 - a folder with a random name is made in it
    return str(shared) if shared.is_dir() else None


def document(configuration: Configuration, workload: Workload, run: Run) -> dict[str, Any]:
    """Return a run as plain data: times in seconds, throughput in tokens per second, including prompts."""
    iterations = [_iteration(number, item) for number, item in enumerate(run.iterations, 1)]
    layers = workload.captured_layers(run.mode, run.num_layers)
    first = run.iterations[0]
    return {
        "mode": configuration.mode.value,
        "peer": configuration.peer.value if configuration.peer else None,
        "capture_machinery": "on" if configuration.machinery else "off",
        "tap": configuration.tap.value,
        "model": Path(workload.model).name,  # the name without the path
        "batch_size": workload.batch_size,
        "prefill_tokens": first.prompt_tokens // workload.batch_size,
        "decode_tokens": first.generated_tokens // workload.batch_size,
        "total_layers": run.num_layers,
        "capture_layers": list(layers),
        "num_captured_layers": len(layers),
        "round": run.round,
        "eager": workload.eager,
        "sink": workload.sink.value,
        "model_runner": run.model_runner,
        "device": run.device,
        "folded_norms": run.folded_norms,
        "start_seconds": run.start_seconds,
        "memory": asdict(run.memory),
        "iterations": iterations,
        "summary": summary(iterations),
    }


def summary(iterations: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return mean, median, min and max of each figure; None for a figure that was not measured."""
    found: dict[str, float | None] = {}
    for name in TIMES:
        values = [item[name] for item in iterations if item[name] is not None]
        for word, of in _STATISTICS.items():
            found[f"{word}_{name}"] = float(of(values)) if values else None
    return found


def _iteration(number: int, measured: Iteration) -> dict[str, Any]:
    generation = measured.generation_seconds
    fetched = measured.fetched_seconds
    # 0 if nothing was captured; None if the rows ended at the ring.
    fetch = (None if measured.rows else 0.0) if fetched is None else fetched - generation
    return {
        "iteration": number,
        "generation_time": generation,
        "fetch_time": fetch,
        "total_time": generation + (fetch or 0.0),
        "throughput_tokens_per_sec": (measured.prompt_tokens + measured.generated_tokens) / generation,
        "completed_time": measured.completed_seconds,
        "rows": measured.rows,
        "bytes": measured.num_bytes,
    }
