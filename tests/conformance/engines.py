"""Both services under test: real processes, vLLM on the CPU, a tiny model in float32."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import residuum
from bench.conformance.reference import FINAL_NORM, SITES
from svc_common.launcher import Service, running_services
from tests import one_process, warm_start
from tests.conformance.journal import Journal, pace_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

CHUNK = 64
"""Most tokens of a step. Longer prompts are computed in several steps."""

KV_BLOCK = 32
"""Positions in a block of vLLM's KV cache. The prefix cache keeps whole blocks."""

KV_BLOCKS = 64
"""Blocks of vLLM's KV cache: few, so that vLLM preempts several long requests at once."""

_KV_GIB = 0.25
_VLLM_ARGUMENTS = {
    "dtype": "float32",
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 32,
    "block_size": KV_BLOCK,
    "num_gpu_blocks_override": KV_BLOCKS,
    **one_process.ENGINE_ARGS,
}
"""The arguments that decide what vLLM compiles, and how it schedules."""

RING_MIB = 4


@dataclass(frozen=True)
class Engine:
    """Both services, and access to them for tests."""

    name: str
    """"compiled", with taps folded into norms, or "eager", with all taps as ops of their own."""
    store: Service
    inference: Service
    client: residuum.Client
    journal: Journal
    """The engine's steps."""

    @contextmanager
    def paced(self, seconds: float = 0.02) -> Iterator[None]:
        """Make each step take at least this long, so that a test can act while a request generates.

        Otherwise the tiny model generates hundreds of tokens before a client on a busy machine reads the first.
        """
        pace = pace_file(self.journal.path)
        whole = pace.with_suffix(".new")
        whole.write_text(str(seconds))
        whole.replace(pace)  # the scheduler reads it at any time, and an empty file would end the engine
        try:
            yield
        finally:
            pace.unlink()

    def serving(self) -> dict[str, Any]:
        """Return the service's log line "serving"."""
        for line in self.inference.log.read_text().splitlines():
            with suppress(ValueError):
                entry: dict[str, Any] = json.loads(line)
                if entry.get("event") == "serving":
                    return entry
        raise LookupError("the service does not serve")

    @contextmanager
    def held(self, *used: residuum.Vector | residuum.Add) -> Iterator[None]:
        """Pause vLLM's engine, so that all requests made in the meantime run at once.

        A paused engine loads no vectors, so the vectors in use must be named here, or operations with them.
        """
        if used:
            steer = [residuum.Add(item, layer=0) if isinstance(item, residuum.Vector) else item for item in used]
            self.client.generate([5], max_tokens=1, steer=steer)
        table = subprocess.run(["ps", "-eo", "pid=,pgid=,args="], check=True, capture_output=True, text=True).stdout
        rows = [line.split(maxsplit=2) for line in table.splitlines()]
        (core,) = [
            int(pid)
            for pid, group, command in rows
            if int(group) == self.inference.process.pid and "EngineCore" in command
        ]
        os.kill(core, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(core, signal.SIGCONT)


def stock_arguments(model: Path) -> dict[str, Any]:
    """Return vLLM's arguments for an engine like the compiled one, but with vLLM's own worker."""
    memory = int(_KV_GIB * (1 << 30))
    return {"model": str(model), "kv_cache_memory_bytes": memory, "disable_log_stats": True, **_VLLM_ARGUMENTS}


@contextmanager
def running_engine(
    name: str,
    model: Path,
    folder: Path,
    cache_root: Path,
    *further_arguments: str,
    engine_args: Mapping[str, Any] | None = None,
) -> Iterator[Engine]:
    """Run both services, with the engine "compiled" or "eager".

    Args:
        name: "compiled" or "eager".
        model: The model's folder.
        folder: The folder for the journal.
        cache_root: The folder of vLLM's cache of compiled graphs.
        further_arguments: Further arguments of the inference service.
        engine_args: Further arguments of vLLM.
    """
    further = ("block_size", "num_gpu_blocks_override", *one_process.ENGINE_ARGS)
    vllm_arguments = {key: _VLLM_ARGUMENTS[key] for key in further}
    vllm_arguments["scheduler_cls"] = "tests.conformance.scheduler.JournalScheduler"
    vllm_arguments.update(engine_args or {})
    arguments = [
        *(f"--{key.replace('_', '-')}={value}" for key, value in _VLLM_ARGUMENTS.items() if key not in further),
        f"--engine-args={json.dumps(vllm_arguments)}",
        f"--kv-cache-gib={_KV_GIB}",
        f"--ring-mib={RING_MIB}",
        f"--capture-sites={','.join([*SITES, FINAL_NORM])}",
        *(["--enforce-eager", "--no-fold-norms"] if name == "eager" else ["--fold-norms"]),
        *further_arguments,
    ]
    journal = folder / f"{name}.jsonl"
    environment = {"RESIDUUM_TEST_JOURNAL": str(journal), "VLLM_CACHE_ROOT": str(cache_root)}
    with (
        patch.dict(os.environ, environment),
        running_services(str(model), inference_arguments=arguments, launch=warm_start.launch) as (store, inference),
        residuum.Client(inference.endpoint) as client,
    ):
        yield Engine(name, store, inference, client, Journal(journal))
