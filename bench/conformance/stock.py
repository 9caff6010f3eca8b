"""The reference for models that transformers computes otherwise: stock vLLM, eager, with a hook after each layer.

It runs in a separate process, with vLLM's own worker and the hooks of `bench.peers`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.processes import hand_over, run_child

Rows = npt.NDArray[np.float32]
_SECONDS = 300.0


def stock_rows(
    model: Path, engine_args: Mapping[str, Any], sequences: Sequence[Sequence[int]], folder: Path
) -> list[Rows]:
    """Return the residual stream after each layer, as stock vLLM computes it.

    Args:
        model: The model's folder.
        engine_args: Arguments for vLLM's engine.
        sequences: Token IDs, prompt and reply.
        folder: An empty folder.

    Returns:
        For each sequence, [layers, positions, hidden].

    Raises:
        RunFailedError: vLLM failed.
    """
    folder.mkdir()
    job = {"model": str(model), "engine_args": dict(engine_args), "sequences": sequences}
    run_child(__name__, job, folder, {**os.environ, "VLLM_PLUGINS": ""}, "stock vLLM", _SECONDS)
    return [np.load(folder / f"{index}.npy") for index in range(len(sequences))]


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
    for index, token_ids in enumerate(job["sequences"]):
        prompt = {"prompt_token_ids": token_ids}
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        llm.collective_rpc("hooks_write", args=(str(folder), [output.request_id], len(token_ids)))
        raw = np.fromfile(folder / f"{output.request_id}.bin", dtype=np.uint8)
        rows = torch.from_numpy(raw).view(model.dtype).float().reshape(-1, len(token_ids), model.get_hidden_size())
        np.save(folder / f"{index}.npy", rows.numpy())
    hand_over(result_file, {})
