"""vllm-lens: a plugin that makes vLLM eager and hooks its layers; rows come with the last output of a request."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from bench.capture.child import check_layers
from bench.capture.subjects import Batch, StockSubject, timed_batch
from bench.peers.peer import PeerUnavailableError
from bench.peers.vllm_settings import settings_of_peer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.peers.child import PeerJob
    from bench.peers.peer import Array


class Lens:
    """See `Peer`."""

    def __init__(self, stock: StockSubject, job: PeerJob, device: str) -> None:
        """Wrap a running engine; see `start`."""
        self._stock = stock
        self._workload = job.workload
        self._captured: dict[str, torch.Tensor] = {}
        self.num_layers = stock.num_layers
        self.vocab_size = stock.vocab_size
        self.model_runner = stock.model_runner
        self.device = device

    async def generate(self, prompts: Mapping[str, Sequence[int]]) -> Batch:
        """See `Peer`. A request has ended only when its rows are there: they are fetched with the last token."""
        requests = (self._generate(name, prompt) for name, prompt in prompts.items())
        return await timed_batch(requests, self._workload.decode)

    async def fetch(self, names: Sequence[str]) -> list[list[Array]]:
        """See `Peer`. Rows are bytes: numpy has no bfloat16."""
        tensors = [self._captured.pop(name) for name in names]
        return [[tensor.contiguous().view(torch.uint8).numpy()] for tensor in tensors]

    async def synchronise(self) -> None:
        """See `Peer`. Its worker extension leaves no room for ours; its rows are on the host when a request ends."""

    def shutdown(self) -> None:
        """See `Peer`."""
        self._stock.shutdown()

    async def _generate(self, name: str, prompt: Sequence[int]) -> list[int]:
        layers = list(self._workload.layers or range(self.num_layers))
        sampling = SamplingParams(
            max_tokens=self._workload.decode,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"output_residual_stream": layers},
        )
        last: Any = None
        async for output in self._stock.llm.generate({"prompt_token_ids": list(prompt)}, sampling, name):
            last = output
        activations = getattr(last, "activations", None)
        if activations is None:
            raise PeerUnavailableError("vllm-lens captured nothing with this version of vLLM")
        self._captured[name] = activations["residual_stream"]
        return list(last.outputs[0].token_ids)


async def start(job: PeerJob) -> Lens:
    """Start it. vLLM finds it as a plugin, and registers it; a second time would make its patches call themselves."""
    from vllm.platforms import current_platform

    plugins = [plugin for plugin in entry_points(group="vllm.general_plugins") if plugin.module.startswith("vllm_lens")]
    if not plugins:
        raise PeerUnavailableError("vllm-lens is not installed; see bench/README.md")
    try:
        plugins[0].load()  # vLLM does so, too, but goes on without one that cannot be loaded
    except ImportError as error:
        raise PeerUnavailableError(f"vllm-lens is not all there ({error}); see bench/README.md") from error
    settings = settings_of_peer(job, worker_extension_cls="")  # else it would leave its own out
    stock = await StockSubject.start(settings)
    check_layers(job.layers, stock.num_layers)
    return Lens(stock, job, str(current_platform.device_name))
