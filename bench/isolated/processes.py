"""Running a configuration in a fresh process, ours or a peer's."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.capture.processes import environment_of, run_turn
from bench.capture.results import Run
from bench.capture.workload import Runner, Turn
from bench.children import RunFailedError, run_child
from bench.isolated.configuration import Peer
from bench.machine import ROOT

if TYPE_CHECKING:
    from bench.capture.workload import Workload
    from bench.isolated.configuration import Configuration

PEERS_FOLDER = ROOT / ".peers"
"""Where peers lie that are not among our own dependencies; see bench/README.md."""


@dataclass(frozen=True)
class Surroundings:
    """What a process is given beside its configuration."""

    runner: Runner = Runner.DEFAULT
    store_folder: Path | None = None
    """Where the store's data lie; None: where temporary files do."""
    peers_folder: Path = PEERS_FOLDER
    """Where packages lie that peers alone need."""
    profile: Path | None = None
    """The folder for a trace of torch's profiler; None: none is made."""
    peer_seconds: float = 900.0
    """What a peer may take: some hang where they do not work."""


def measure(configuration: Configuration, workload: Workload, surroundings: Surroundings, round_number: int = 0) -> Run:
    """Measure a configuration in a process of its own.

    Raises:
        RunFailedError: It failed, or cannot run here. The message says why.
        ServiceFailedError: Its store did not come up.
    """
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
    assert peer is not None  # noqa: S101 - the caller looked
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
        return Run.from_json(run_child("bench.peers.child", job, Path(scratch), environment, peer.value, seconds))


def _memory_folder() -> str | None:
    """Return a folder whose files lie in memory; None, where temporary files do, if there is none."""
    shared = Path("/dev/shm")  # noqa: S108 - a folder of chance is made in it
    return str(shared) if shared.is_dir() else None
