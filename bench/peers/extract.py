"""vLLM's own capture: `extract_hidden_states` with its example connector and files in memory.

In the step after a request's last one, vLLM writes the request's rows to a safetensors file. It holds a lock file until
the rows are complete. An engine in the caller's process makes no step after the last request, so this engine runs in a
separate process. `vllm...load_hidden_states` waits for the lock without a timeout. Here the wait has a timeout, so that
missing rows cause an error and not a hang.
"""

from __future__ import annotations

import asyncio
import fcntl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.sampling_params import RequestOutputKind

from bench.capture.subjects import StockSubject
from bench.capture.workload import Workload
from bench.peers.child import PeerJob
from bench.peers.peer import Array, PeerUnavailableError, VllmPeer, settings_of_peer

_FILE_SECONDS = 20.0
_POLL_SECONDS = 0.0005
_VALUE_BYTES = 4
"""The largest size of a value in bytes."""
_ROOM = 2.0
"""Spare factor for the cache, because vLLM allocates it in pages of one size and wastes some."""


class Extract(VllmPeer):
    """See `Peer`."""

    def __init__(self, stock: StockSubject, job: PeerJob) -> None:
        """Wrap a running engine; see `start`."""
        super().__init__(stock, job)
        self._files: dict[str, str] = {}

    async def fetch(self, names: Sequence[str]) -> list[list[Array]]:
        """See `Peer`."""
        paths = [self._files.pop(name) for name in names]
        for path in paths:
            await _unlocked(Path(f"{path}.lock"))
        return [[_take(path)] for path in paths]

    async def _generate(self, name: str, prompt: Sequence[int]) -> list[int]:
        reply: list[int] = []
        parameters: dict[str, Any] = {}
        with_reply = {"include_output_tokens": True}
        async for output in self._outputs(name, prompt, RequestOutputKind.DELTA, kv_transfer_params=with_reply):
            reply.extend(output.outputs[0].token_ids)
            parameters = output.kv_transfer_params or parameters
        if "hidden_states_path" not in parameters:
            raise PeerUnavailableError("vLLM did not say where it put the hidden states")
        self._files[name] = parameters["hidden_states_path"]
        return reply


def _take(path: str) -> Array:
    """Return a file's rows, [positions, layers, hidden] as bytes because numpy has no bfloat16, and remove the file."""
    with safe_open(path, framework="pt") as file:
        array: Array = file.get_tensor("hidden_states").contiguous().view(torch.uint8).numpy()
    for written in (Path(path), Path(f"{path}.lock")):
        written.unlink(missing_ok=True)
    return array


async def _unlocked(lock: Path) -> None:
    """Wait until the writer of a file has released its lock.

    Raises:
        PeerUnavailableError: The lock was not released in time.
    """
    deadline = time.monotonic() + _FILE_SECONDS
    with lock.open() as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PeerUnavailableError(
                        f"the file of an ended request was still locked after {_FILE_SECONDS:.0f} s"
                    ) from None
                await asyncio.sleep(_POLL_SECONDS)
            else:
                return


async def start(job: PeerJob) -> Extract:
    """Start the engine. The output of layer k is the drafter's hidden state k + 1."""
    from transformers import AutoConfig
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        raise PeerUnavailableError("vLLM's example connector copies through pinned memory, which needs a GPU")
    config = AutoConfig.from_pretrained(job.workload.model)
    layers = job.layers or range(config.num_hidden_layers)
    own = settings_of_peer(
        job,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers]}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": job.folder},
        },
    )
    more = _cache_gib(job.workload, len(layers) * config.hidden_size)
    settings = own.model_copy(update={"kv_cache_gib": own.kv_cache_gib + more})
    return Extract(await StockSubject.start(settings), job)


def _cache_gib(workload: Workload, values: int) -> float:
    """Return the GiB that the KV cache needs for hidden states, which vLLM keeps there until a request ends.

    Args:
        workload: The workload.
        values: The number of values in the hidden states of one token. All requests must fit at the same time;
            otherwise they would wait for each other.
    """
    tokens = workload.batch_size * (workload.prefill + workload.decode)
    return _ROOM * tokens * values * _VALUE_BYTES / (1 << 30)
