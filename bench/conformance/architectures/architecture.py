"""The architectures: for each, the configuration of a tiny model with all of its special features.

All have four layers, head size 32 (the smallest for vLLM's attention on a CPU), windows and chunks shorter than the
prompts, and eight query heads with four key heads, so that two ranks can share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LAYERS = 4
HIDDEN = 256
VOCABULARY = 512
MAX_LENGTH = 256
"""The most tokens of prompt and reply together."""

_WINDOW = 40
"""The window of sliding attention: shorter than most prompts."""


@dataclass(frozen=True)
class Architecture:
    """The configuration of a tiny model of one architecture, and the names of its parts in transformers."""

    name: str
    """Its name on the command line."""
    config_class: str
    """The name of its configuration class in transformers."""
    values: dict[str, Any]
    """The arguments of the configuration."""
    attention: tuple[str, ...] = ("self_attn",)
    """The submodule of a decoder layer whose output the attention block (or its replacement) adds to the residual
    stream: the first of these that the layer has. A norm after the attention is part of the block."""
    mlp: tuple[str, ...] = ("mlp",)
    """The same for the MLP."""
    residual_scale: str = ""
    """The attribute of a decoder layer with a factor for both, applied before they are added."""
    routed: bool = False
    """Whether it routes rows to experts."""
    needs_gpu: bool = False
    """Whether vLLM can run it only on a GPU."""
    everyday: bool = True
    """Whether the tests run it. For the taps, each of the others is equivalent to one that the tests run."""

    @property
    def layers(self) -> int:
        """Its decoder layers."""
        return LAYERS


_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "max_position_embeddings": MAX_LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LLAMA = {**_COMMON, "intermediate_size": 320, "num_key_value_heads": 4}
_GEMMA = {
    **_LLAMA,
    "head_dim": 32,
    "query_pre_attn_scalar": 48,  # deliberately not the head size, which is the usual value
    "sliding_window": _WINDOW,
    "tie_word_embeddings": True,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
_AFTER_ATTENTION, _AFTER_MLP = ("post_attention_layernorm",), ("post_feedforward_layernorm",)
_MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2}
_HYBRID = ["linear_attention", "full_attention"] * (LAYERS // 2)

_ALL = (
    Architecture("llama", "LlamaConfig", _LLAMA),
    Architecture("qwen2", "Qwen2Config", _LLAMA),
    Architecture("qwen3", "Qwen3Config", {**_LLAMA, "head_dim": 32}),
    Architecture("mistral", "MistralConfig", {**_LLAMA, "head_dim": 32, "sliding_window": _WINDOW}),
    Architecture("gemma2", "Gemma2Config", {**_GEMMA, **_MIXED}, _AFTER_ATTENTION, _AFTER_MLP),
    Architecture("gemma3", "Gemma3TextConfig", {**_GEMMA, **_MIXED}, _AFTER_ATTENTION, _AFTER_MLP),
    Architecture("phi3", "Phi3Config", {**_LLAMA, "sliding_window": _WINDOW}),
    Architecture(
        "gpt2",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_positions": MAX_LENGTH,
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        attention=("attn",),
    ),
    Architecture(
        "gpt_neox",
        "GPTNeoXConfig",
        {**_COMMON, "intermediate_size": 320, "rotary_pct": 0.5, "use_parallel_residual": True},
        attention=("attention",),
    ),
    Architecture(
        "opt",
        "OPTConfig",
        {**_COMMON, "ffn_dim": 320, "word_embed_proj_dim": HIDDEN, "tie_word_embeddings": True},
        mlp=("fc2",),
    ),
    Architecture(
        "mixtral",
        "MixtralConfig",
        {**_LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        mlp=("mlp", "block_sparse_moe"),
        routed=True,
    ),
    Architecture(
        "qwen2_moe",
        "Qwen2MoeConfig",
        {**_LLAMA, **_MOE, "shared_expert_intermediate_size": 128, "decoder_sparse_step": 2},
        routed=True,
    ),
    Architecture("qwen3_moe", "Qwen3MoeConfig", {**_LLAMA, **_MOE, "head_dim": 32}, routed=True),
    Architecture(
        "mamba",
        "MambaConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "state_size": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        attention=("mixer",),
        mlp=(),
        needs_gpu=True,  # its scan is a CUDA kernel
        everyday=False,
    ),
    Architecture(
        "cohere",
        "CohereConfig",
        {**_LLAMA, "tie_word_embeddings": True},
    ),
    Architecture("stablelm", "StableLmConfig", {**_LLAMA, "partial_rotary_factor": 0.5}, everyday=False),
    Architecture("olmo2", "Olmo2Config", _LLAMA, _AFTER_ATTENTION, _AFTER_MLP, everyday=False),
    Architecture(
        "exaone4", "Exaone4Config", {**_LLAMA, **_MIXED, "sliding_window": _WINDOW}, _AFTER_ATTENTION, _AFTER_MLP
    ),
    Architecture(
        "granite_hybrid",
        "GraniteMoeHybridConfig",
        {
            **_LLAMA,
            **_MAMBA2,
            "layer_types": _HYBRID,
            "num_local_experts": 0,
            "shared_intermediate_size": 320,
            "residual_multiplier": 0.5,
        },
        attention=("mamba", "self_attn"),
        mlp=("shared_mlp",),
        residual_scale="residual_multiplier",
    ),
)

ARCHITECTURES = {architecture.name: architecture for architecture in _ALL}
"""All architectures by name, in the order of the runs."""
