"""The interface of peers, and a base class for those that use vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from bench.capture.child import check_layers, settings_of
from bench.capture.subjects import Batch, StockSubject, timed_batch
from bench.capture.workload import Job, Mode
from bench.peers.child import PeerJob
from inference_svc.settings import InferenceSettings

Array = npt.NDArray[Any]


class PeerUnavailableError(RuntimeError):
    """A peer cannot run here. The message says why."""


class Peer(Protocol):
    """A system that generates, captures every token at some layers, and returns the captured rows."""

    num_layers: int
    vocab_size: int
    model_runner: str
    """The model runner of vLLM that it uses; "none" without vLLM."""
    device: str

    async def generate(self, prompts: Mapping[str, Sequence[int]]) -> Batch:
        """Generate for all prompts together. Each reply has exactly the workload's length."""

    async def fetch(self, names: Sequence[str]) -> list[list[Array]]:
        """Return the captured rows of requests, and drop them.

        Returns:
            For each request, an array for each captured layer, or one for all layers: [..., positions, hidden].
        """

    async def synchronise(self) -> None:
        """Wait until the device is idle."""

    def shutdown(self) -> None:
        """Stop its processes."""


class VllmPeer:
    """Base class of peers that use vLLM; see `Peer`."""

    def __init__(self, stock: StockSubject, job: PeerJob) -> None:
        """Wrap a running engine."""
        from vllm.platforms import current_platform

        check_layers(job.layers, stock.num_layers)
        self._stock = stock
        self._workload = job.workload
        self.num_layers = stock.num_layers
        self.vocab_size = stock.vocab_size
        self.model_runner = stock.model_runner
        self.device = str(current_platform.device_name)

    async def generate(self, prompts: Mapping[str, Sequence[int]]) -> Batch:
        """See `Peer`."""
        requests = (self._generate(name, prompt) for name, prompt in prompts.items())
        return await timed_batch(requests, self._workload.decode)

    async def synchronise(self) -> None:
        """See `Peer`."""
        await self._stock.call("bench_synchronise")

    def shutdown(self) -> None:
        """See `Peer`."""
        self._stock.shutdown()

    async def _generate(self, name: str, prompt: Sequence[int]) -> list[int]:
        """Return the reply to one request."""
        raise NotImplementedError

    def _outputs(
        self, name: str, prompt: Sequence[int], kind: RequestOutputKind, **extra: object
    ) -> AsyncGenerator[Any, None]:
        """Return vLLM's outputs for one request, greedy and of the exact length, with these extra arguments."""
        sampling = SamplingParams(
            max_tokens=self._workload.decode,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=kind,
            extra_args=extra,
        )
        outputs: AsyncGenerator[Any, None] = self._stock.llm.generate(
            {"prompt_token_ids": list(prompt)}, sampling, name
        )
        return outputs


def settings_of_peer(job: PeerJob, **more: object) -> InferenceSettings:
    """Return the settings for stock vLLM's `engine_arguments`: those of the service, with these changes."""
    settings = settings_of(Job((Mode.STOCK,), job.round, job.workload, job.folder, job.runner))
    return settings.model_copy(update={"engine_args": {**settings.engine_args, **more}})
