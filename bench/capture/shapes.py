"""Configurations of models with random weights: no weights, tokenizer or network needed."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.fetch_model import cache


@dataclass(frozen=True)
class Shape:
    """A model's configuration, and the arguments of vLLM that it needs."""

    config: dict[str, Any]
    """The model's config.json."""
    engine_args: dict[str, Any] = field(default_factory=dict)


_NO_WEIGHTS = {"load_format": "dummy", "skip_tokenizer_init": True}

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}

SHAPES = {
    # Few sizes of CUDA graphs, because each slows every start. A batch uses the next larger size.
    "qwen2.5-3b": Shape(
        {
            **_QWEN2,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
        },
        {**_NO_WEIGHTS, "compilation_config": {"cudagraph_capture_sizes": [1, 8, 16, 32, 64]}},
    ),
    # DeepSeek-R1-Distill-Qwen-1.5B has the same shape.
    "qwen2.5-1.5b": Shape(
        {
            **_QWEN2,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_attention_heads": 12,
            "num_hidden_layers": 28,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
        },
        {**_NO_WEIGHTS, "compilation_config": {"cudagraph_capture_sizes": [1, 8, 16, 32, 64, 128, 256]}},
    ),
    # For tests of the benchmark itself, also on a CPU. As on a GPU, the worker runs in the engine's process: in one of
    # its own, it would import vLLM first, which takes longer than the work.
    "tiny": Shape(
        {
            **_QWEN2,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "vocab_size": 1024,
        },
        {**_NO_WEIGHTS, "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"},
    ),
}


def write_shape(name: str, folder: Path | None = None) -> str:
    """Write the config.json of a shape, and return its folder.

    The folder is always the same, because its path is part of the key of vLLM's compile cache.
    """
    target = (folder or cache() / "shapes") / name
    target.mkdir(parents=True, exist_ok=True)
    descriptor, written = tempfile.mkstemp(dir=target)
    with os.fdopen(descriptor, "w") as file:
        json.dump(SHAPES[name].config, file, indent=1)
    Path(written).replace(target / "config.json")  # atomic, because another process may read it
    return str(target)
