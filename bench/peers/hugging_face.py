"""Hugging Face transformers: `generate` with `output_hidden_states` for one batch.

transformers returns the last layer after the model's final norm, residuum before it. So the rows of the last layer
differ, but they are counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.capture.child import check_layers
from bench.capture.subjects import Batch, WrongTokenCountError
from bench.peers.child import PeerJob
from bench.peers.peer import Array


class HuggingFace:
    """See `Peer`."""

    model_runner = "none"

    def __init__(self, model: Any, job: PeerJob) -> None:
        """Wrap a loaded model; see `start`."""
        self._model = model
        self._workload = job.workload
        self._steps: Sequence[Sequence[torch.Tensor]] = ()
        """For each step, a tensor for the embeddings and one for each layer: [requests, positions, hidden]."""
        self.num_layers: int = model.config.num_hidden_layers
        self.vocab_size: int = model.config.vocab_size
        self.device = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"

    async def generate(self, prompts: Mapping[str, Sequence[int]]) -> Batch:
        """See `Peer`."""
        decode = self._workload.decode
        started = time.perf_counter()
        ids = torch.tensor(list(prompts.values()), device=self._model.device)
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=decode,
                min_new_tokens=decode,
                do_sample=False,
                output_hidden_states=True,
                return_dict_in_generate=True,
                pad_token_id=0,
            )
        replies = self._replies(output.sequences, ids.shape[1])
        ended = time.perf_counter()
        self._steps = output.hidden_states
        return Batch(replies, started, ended)

    async def fetch(self, names: Sequence[str]) -> list[list[Array]]:
        """See `Peer`. Rows are bytes, because numpy has no bfloat16."""
        layers = self._workload.layers or range(self.num_layers)
        rows = [torch.cat([step[layer + 1] for step in self._steps], dim=1) for layer in layers]
        self._steps = ()
        arrays = [layer.cpu().view(torch.uint8).numpy() for layer in rows]
        return [[array[index] for array in arrays] for index in range(len(names))]

    async def synchronise(self) -> None:
        """See `Peer`."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()

    def shutdown(self) -> None:
        """See `Peer`."""

    def _replies(self, sequences: torch.Tensor, prompt_tokens: int) -> list[list[int]]:
        replies: list[list[int]] = sequences[:, prompt_tokens:].tolist()
        lengths = {len(reply) for reply in replies}
        if lengths != {self._workload.decode}:
            raise WrongTokenCountError(f"replies of {sorted(lengths)} tokens instead of {self._workload.decode}")
        return replies


async def start(job: PeerJob) -> HuggingFace:
    """Load the model, with random weights if vLLM would use dummy weights."""
    model = load(job)
    check_layers(job.layers, model.config.num_hidden_layers)
    return HuggingFace(model, job)


def load(job: PeerJob) -> Any:
    """Return the model in its own dtype, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.from_pretrained(job.workload.model)
    if job.workload.engine_args.get("load_format") == "dummy":
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(job.workload.model, dtype="auto")
    return model.to(device).eval()
