"""Models whose layers compute attention and MLP from the same input."""

from __future__ import annotations

from typing import Any

from bench.conformance.architectures.architecture import (
    BEFORE_MLP,
    COMMON,
    GPT,
    HEADS,
    LLAMA,
    MIDDLE,
    MIXED,
    NO_MIDDLE,
    PARTIAL_ROPE,
    SCALED,
    TRITON_ATTENTION,
    WINDOW,
    Architecture,
)

_REFUSED: dict[str, Any] = {"refused": NO_MIDDLE, "refused_sites": MIDDLE}

PARALLEL = (
    Architecture(
        "gpt_neox",
        "GPTNeoXConfig",
        {**COMMON, "intermediate_size": 320, "rotary_pct": 0.5, "use_parallel_residual": True},
        attention=("attention",),
        everyday=True,
        **_REFUSED,
        lacks=HEADS,
    ),
    Architecture(
        "gptj",
        "GPTJConfig",
        {**GPT, "rotary_dim": 16, "tie_word_embeddings": False},
        attention=("attn",),
        **_REFUSED,
        unseen=HEADS,
    ),
    Architecture("phi", "PhiConfig", {**LLAMA, **PARTIAL_ROPE, "qk_layernorm": True}, lacks=HEADS, **_REFUSED),
    Architecture(
        "falcon",
        "FalconConfig",
        {**COMMON, "num_kv_heads": 4, "new_decoder_architecture": True, "tie_word_embeddings": True},
        attention=("self_attention",),
        **_REFUSED,
        unseen=HEADS,
    ),
    Architecture(
        "falcon_rw",
        "FalconConfig",
        {**COMMON, "multi_query": False, "parallel_attn": False, "bias": True},
        attention=("self_attention",),
        gpu_args=TRITON_ATTENTION,
        middle=BEFORE_MLP,
        refused=SCALED,  # vLLM's layer adds the biases of its parts
        unseen=HEADS,
    ),
    Architecture("cohere", "CohereConfig", {**LLAMA, "tie_word_embeddings": True}, everyday=True, **_REFUSED),
    Architecture(
        "cohere2",
        "Cohere2Config",
        {**LLAMA, **MIXED, "sliding_window": WINDOW, "tie_word_embeddings": True, "logit_scale": 0.25},
        reference={"sliding_window": WINDOW + 1},  # vLLM adds 1
        **_REFUSED,
    ),
)
"""Models with parallel layers."""
