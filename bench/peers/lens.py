"""vllm-lens: a plugin that makes vLLM eager and hooks its layers. Rows come with the last output of a request."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import torch
from vllm.sampling_params import RequestOutputKind

from bench.capture.subjects import StockSubject
from bench.peers.child import PeerJob
from bench.peers.peer import Array, PeerUnavailableError, VllmPeer, settings_of_peer


class Lens(VllmPeer):
    """See `Peer`. A request ends only when its rows have arrived, so the generation time includes the fetch."""

    def __init__(self, stock: StockSubject, job: PeerJob) -> None:
        """Wrap a running engine; see `start`."""
        super().__init__(stock, job)
        self._captured: dict[str, torch.Tensor] = {}

    async def fetch(self, names: Sequence[str]) -> list[list[Array]]:
        """See `Peer`. Rows are bytes, because numpy has no bfloat16."""
        tensors = [self._captured.pop(name) for name in names]
        return [[tensor.contiguous().view(torch.uint8).numpy()] for tensor in tensors]

    async def capture(self, name: str, prompt: Sequence[int]) -> torch.Tensor:
        """Run one request, and return its rows: [layers, positions, hidden]."""
        await self._generate(name, prompt)
        return self._captured.pop(name)

    async def synchronise(self) -> None:
        """See `Peer`. Does nothing: vllm-lens occupies the worker extension, and its rows are already on the host."""

    async def _generate(self, name: str, prompt: Sequence[int]) -> list[int]:
        layers = list(self._workload.layers or range(self.num_layers))
        last: Any = None
        kind = RequestOutputKind.FINAL_ONLY
        async for output in self._outputs(name, prompt, kind, output_residual_stream=layers):
            last = output
        activations = getattr(last, "activations", None)
        if activations is None:
            raise PeerUnavailableError("vllm-lens captured nothing with this version of vLLM")
        self._captured[name] = activations["residual_stream"]
        return list(last.outputs[0].token_ids)


async def start(job: PeerJob) -> Lens:
    """Start the engine. vLLM registers the plugin. A second registration would make its patches call themselves."""
    plugins = [plugin for plugin in entry_points(group="vllm.general_plugins") if plugin.module.startswith("vllm_lens")]
    if not plugins:
        raise PeerUnavailableError("vllm-lens is not installed; see bench/README.md")
    try:
        plugins[0].load()  # vLLM also loads it, but ignores a plugin that fails to load
    except ImportError as error:
        raise PeerUnavailableError(f"vllm-lens cannot be loaded ({error}); see bench/README.md") from error
    settings = settings_of_peer(job, worker_extension_cls="")  # otherwise vllm-lens would not set its own
    return Lens(await StockSubject.start(settings), job)
