"""Capture by forward hooks in eager vLLM (`hook_worker`). Rows are fetched through shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.capture.subjects import Batch, StockSubject, generate_batch
from bench.isolated.configuration import Peer as PeerName
from bench.peers.child import PeerJob
from bench.peers.hook_worker import EXTENSION
from bench.peers.peer import Array, VllmPeer, settings_of_peer

_FLUSH_EVERY = {PeerName.HOOKS: 1, PeerName.HOOKS_32: 32}


class Hooks(VllmPeer):
    """See `Peer`."""

    def __init__(self, stock: StockSubject, job: PeerJob) -> None:
        """Wrap a running engine; see `start`."""
        super().__init__(stock, job)
        self._folder = Path(job.folder)

    async def generate(self, prompts: Mapping[str, Sequence[int]]) -> Batch:
        """See `Peer`."""
        return await generate_batch(self._stock, prompts, dict.fromkeys(prompts), self._workload.decode)

    async def fetch(self, names: Sequence[str]) -> list[list[Array]]:
        """See `Peer`. Rows are bytes, because numpy has no bfloat16."""
        positions = self._workload.rows_per_request
        await self._stock.call("hooks_write", str(self._folder), list(names), positions)
        return [[self._load(name, positions)] for name in names]

    def _load(self, name: str, positions: int) -> Array:
        file = self._folder / f"{name}.bin"
        values = np.fromfile(file, dtype=np.uint8)
        file.unlink()
        layers = len(self._workload.layers) or self.num_layers
        return values.reshape(layers, positions, -1)


async def start(job: PeerJob) -> Hooks:
    """Start the engine."""
    settings = settings_of_peer(job, worker_extension_cls=EXTENSION).model_copy(update={"enforce_eager": True})
    stock = await StockSubject.start(settings)
    hooks = Hooks(stock, job)
    await stock.call("hooks_install", list(job.layers), _FLUSH_EVERY[job.peer])
    return hooks
