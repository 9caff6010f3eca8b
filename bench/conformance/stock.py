"""The reference for models that transformers computes otherwise: stock vLLM, eager, with a hook after each layer.

It runs in a separate process, with vLLM's own worker and the hooks of `bench.peers`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.processes import hand_over, run_child

Rows = npt.NDArray[np.float32]
_SECONDS = 300.0


@dataclass(frozen=True)
class StockReply:
    """What stock vLLM computed for a prompt."""

    generated: tuple[int, ...]
    """The token IDs of the reply."""
    rows: Rows
    """The residual stream after each layer, [layers, positions, hidden], without the last token of the reply."""


def run_stock(
    model: Path, engine_args: Mapping[str, Any], prompts: Sequence[Sequence[int]], new_tokens: int, folder: Path
) -> list[StockReply]:
    """Return the greedy replies of stock vLLM to prompts that run one after the other.

    Args:
        model: The model's folder.
        engine_args: Arguments for vLLM's engine.
        prompts: Token IDs.
        new_tokens: Tokens of each reply.
        folder: A folder that does not exist yet.

    Raises:
        RunFailedError: vLLM failed.
    """
    folder.mkdir()
    job = {"model": str(model), "engine_args": dict(engine_args), "prompts": prompts, "new_tokens": new_tokens}
    result = run_child(__name__, job, folder, {**os.environ, "VLLM_PLUGINS": ""}, "stock vLLM", _SECONDS)
    return [
        StockReply(tuple(generated), np.load(folder / f"{index}.npy"))
        for index, generated in enumerate(result["generated"])
    ]


def main() -> None:
    """Run the job in the first file, and write its result to the second; see `bench.child`."""
    from vllm import LLM, SamplingParams

    from bench.peers.hook_worker import EXTENSION

    job_file, result_file = map(Path, sys.argv[1:])
    job, folder = json.loads(job_file.read_text()), job_file.parent
    llm = LLM(
        job["model"],
        enforce_eager=True,
        enable_prefix_caching=False,
        worker_extension_cls=EXTENSION,
        **job["engine_args"],
    )
    llm.collective_rpc("hooks_install", args=([], 1))
    model = llm.llm_engine.vllm_config.model_config
    replies = []
    sampling = SamplingParams(max_tokens=job["new_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(job["prompts"]):
        (output,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        generated = list(output.outputs[0].token_ids)
        positions = len(prompt) + len(generated) - 1
        llm.collective_rpc("hooks_write", args=(str(folder), [output.request_id], positions))
        raw = np.fromfile(folder / f"{output.request_id}.bin", dtype=np.uint8)
        rows = torch.from_numpy(raw).view(model.dtype).float().reshape(-1, positions, model.get_hidden_size())
        np.save(folder / f"{index}.npy", rows.numpy())
        replies.append(generated)
    hand_over(result_file, {"generated": replies})
