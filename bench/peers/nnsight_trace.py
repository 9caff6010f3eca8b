"""nnsight with transformers: one trace of `generate` that saves each layer's output in each step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bench.capture.child import check_layers
from bench.capture.subjects import Batch
from bench.peers.child import PeerJob
from bench.peers.hugging_face import HuggingFace, load
from bench.peers.peer import PeerUnavailableError


class Nnsight(HuggingFace):
    """See `Peer`. Differs from `HuggingFace` only in how it gets the output of a layer."""

    def __init__(self, model: Any, traced: Any, job: PeerJob) -> None:
        """Wrap a model and its nnsight wrapper; see `start`."""
        super().__init__(model, job)
        self._traced = traced

    async def generate(self, prompts: Mapping[str, Sequence[int]]) -> Batch:
        """See `Peer`."""
        decode = self._workload.decode
        started = time.perf_counter()
        ids = torch.tensor(list(prompts.values()), device=self._model.device)
        layers = list(self._traced.model.layers)
        chosen = [layers[layer] for layer in self._workload.layers or range(self.num_layers)]
        steps, sequences = trace(self._traced, chosen, ids, decode)
        ended = time.perf_counter()
        # In transformers' form: the layers come after the embeddings, which are not used.
        self._steps = [self._behind_embeddings(step) for step in steps]
        return Batch(self._replies(sequences, ids.shape[1]), started, ended)

    def _behind_embeddings(self, step: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        captured = self._workload.layers or range(self.num_layers)
        places: list[torch.Tensor] = [step[0]] * (self.num_layers + 1)
        for layer, rows in zip(captured, step, strict=True):
            places[layer + 1] = rows
        return places


def trace(model: Any, layers: Sequence[Any], ids: torch.Tensor, decode: int) -> tuple[list[list[torch.Tensor]], Any]:
    """Generate, and return the outputs of the layers in each step, and the sequences.

    nnsight runs the body of the context from its source, so the body can use only names of this function.
    """
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with (
        torch.inference_mode(),
        model.generate(inputs, max_new_tokens=decode, min_new_tokens=decode, do_sample=False, pad_token_id=0) as tracer,
    ):
        steps = list().save()  # type: ignore[attr-defined]  # noqa: C408 - nnsight patches this call
        for _ in tracer.iter[0:decode]:
            steps.append([layer.output[0] if isinstance(layer.output, tuple) else layer.output for layer in layers])
        sequences = tracer.result.save()
    return steps, sequences


async def start(job: PeerJob) -> Nnsight:
    """Load the model as `hugging_face` does."""
    try:
        from nnsight import LanguageModel
    except ImportError as error:
        raise PeerUnavailableError(f"nnsight is not installed ({error}); see bench/README.md") from error
    model = load(job)
    check_layers(job.layers, model.config.num_hidden_layers)
    return Nnsight(model, LanguageModel(model, tokenizer=None), job)
