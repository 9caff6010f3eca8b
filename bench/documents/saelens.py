"""SAELens' CacheActivationsRunner around a transformers model, once for each layer, because it takes one hook point.

Only the loading of the model is replaced, because a shape has no weights and no tokenizer. It happens before the clock
starts. SAELens runs the whole model, with logits, and its host copies are float32. Its files are Arrow files of a
Hugging Face dataset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.capture.child import check_layers
from bench.documents.job import DocumentsJob, Written
from bench.peers.hugging_face import load
from bench.peers.peer import PeerUnavailableError

_DTYPE = "float16"
"""The dtype of its files: half the bytes of its default, float32. Arrow has no bfloat16."""
_BUFFER_GB = 1.9
"""SAELens advises less than 2 GB for a shard."""


class SAELens:
    """See `DocumentsWay`."""

    def __init__(self, runner: Any, config: Any, model: Any, job: DocumentsJob) -> None:
        """Keep SAELens' runner and configuration, and the model in its wrapper."""
        self._runner = runner
        self._config = config
        self._model = model
        self._job = job

    async def extract(self, prompts: Sequence[Sequence[int]], folder: Path) -> None:
        """See `DocumentsWay`."""
        from datasets import Dataset

        documents = Dataset.from_dict({"input_ids": [list(prompt) for prompt in prompts]})
        for layer in self._job.layers:
            self._runner(self._settings(layer, len(prompts), folder / str(layer)), override_dataset=documents).run()

    def read(self, folder: Path) -> Written:
        """See `DocumentsWay`."""
        from datasets import Dataset

        tokens: list[list[int]] = []
        sample: dict[int, torch.Tensor] = {}
        size = 0
        for layer in self._job.layers:
            found = Dataset.load_from_disk(str(folder / str(layer))).with_format("torch")
            tokens = [item.tolist() for item in found["token_ids"]]
            sample[layer] = found[0][_hook(layer)]
            size += len(found) * sample[layer].numel() * torch.float16.itemsize  # torch's format is float32
        return Written(sum(map(len, tokens)), size, tokens, sample)

    def shutdown(self) -> None:
        """See `DocumentsWay`."""

    def _settings(self, layer: int, documents: int, folder: Path) -> Any:
        job = self._job
        width = self._model.model.config.hidden_size
        document_bytes = job.prefill * width * torch.float16.itemsize
        batch = math.gcd(job.batch, documents)
        batches = documents // batch
        # A buffer that is not full at the end is dropped, so all buffers have the same number of batches.
        at_once = max(n for n in range(1, batches + 1) if not batches % n and n * batch * document_bytes <= _most(n))
        return self._config(
            dataset_path="documents",
            model_name=job.model,
            model_class_name="AutoModelForCausalLM",
            model_batch_size=batch,
            hook_name=_hook(layer),
            d_in=width,
            training_tokens=documents * job.prefill,
            context_size=job.prefill,
            new_cached_activations_path=str(folder),
            shuffle=False,
            dtype=_DTYPE,
            device=str(self._model.model.device),
            buffer_size_gb=(at_once * batch * document_bytes + 1) / 1e9,
            prepend_bos=False,
            streaming=False,
        )


def _most(batches: int) -> float:
    return _BUFFER_GB * 1e9 if batches > 1 else float("inf")


def _hook(layer: int) -> str:
    return f"model.layers.{layer}"


async def start(job: DocumentsJob) -> SAELens:
    """Load the model."""
    try:
        from sae_lens import cache_activations_runner
        from sae_lens.config import CacheActivationsRunnerConfig
        from sae_lens.load_model import HookedProxyLM
    except ImportError as error:
        raise PeerUnavailableError(f"sae-lens is not installed ({error}); see bench/README.md") from error
    model = load(job.peer())
    check_layers(job.layers, model.config.num_hidden_layers)
    wrapped = HookedProxyLM(model, None)
    cache_activations_runner.load_model = lambda **_: wrapped
    return SAELens(cache_activations_runner.CacheActivationsRunner, CacheActivationsRunnerConfig, wrapped, job)
