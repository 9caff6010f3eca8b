"""Models with state spaces, linear attention or convolutions."""

from __future__ import annotations

from bench.conformance.architectures.architecture import (
    HEADS,
    HIDDEN,
    HYBRID,
    INNER,
    LAYERS,
    LLAMA,
    MAMBA2,
    MOE,
    NEURONS,
    NO_PARTS,
    NO_ROPE_KERNEL,
    PARTIAL_ROPE,
    PARTS,
    ROUTER,
    SCALED,
    VOCABULARY,
    Architecture,
)

_STATE_SPACE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "state_size": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DELTA = {  # on a CPU, vLLM's linear attention takes only bfloat16
    **PARTIAL_ROPE,
    "layer_types": HYBRID,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_TRITON = {"gdn_prefill_backend": "triton"}
"""vLLM's own kernel for linear attention. On Hopper, vLLM prefers the one of FlashInfer, which may not be installed."""
_SHARED_EXPERT = {"shared_expert_intermediate_size": 128}
_CONVOLUTIONS = {
    "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
    "conv_dim": HIDDEN,
    "block_dim": HIDDEN,
    "tie_word_embeddings": True,  # vLLM ties them in any case
}

HYBRIDS = (
    Architecture(
        "mamba",
        "MambaConfig",
        _STATE_SPACE,
        attention=("mixer",),
        mlp=(),
        needs_gpu=True,  # its scan is a CUDA kernel
        refused=NO_PARTS,
        refused_sites=INNER,
    ),
    Architecture(
        "mamba2",
        "Mamba2Config",
        {**_STATE_SPACE, "num_heads": 16, "head_dim": 32, "n_groups": 1, "expand": 2, "chunk_size": 64},
        attention=("mixer",),
        mlp=(),
        refused=NO_PARTS,
        refused_sites=INNER,
    ),
    Architecture(
        "granite_hybrid",
        "GraniteMoeHybridConfig",
        {
            **LLAMA,
            **MAMBA2,
            "layer_types": HYBRID,
            "num_local_experts": 0,
            "shared_intermediate_size": 320,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
        },
        attention=("mamba", "self_attn"),
        mlp=("shared_mlp",),
        mlp_in=("shared_mlp",),
        residual_scale="residual_multiplier",
        refused=SCALED,
        partial=HEADS | {"z"},  # layers with state spaces have no heads
        everyday=True,
    ),
    Architecture(
        "jamba",
        "JambaConfig",
        {
            **LLAMA,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
        attention=("mamba", "self_attn"),
        mlp=("feed_forward",),
        routed=True,
        needs_gpu=True,  # its scan is a CUDA kernel
        refused=NO_PARTS,
        refused_sites=INNER,  # in vLLM, its layers with attention have no module for the attention block
        lacks=HEADS | {"z"},
        partial=NEURONS | ROUTER,  # every other MLP is a mixture of experts
    ),
    Architecture(
        "falcon_h1",
        "FalconH1Config",
        {
            **LLAMA,
            **MAMBA2,
            "head_dim": 32,
            "mamba_d_ssm": 512,
            "mamba_chunk_size": 64,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
            "key_multiplier": 0.7,
            "mlp_multipliers": [0.8, 0.6],
            "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5],
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.6,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.7,
        },
        attention=(),
        mlp=(),
        middle=("pre_ff_layernorm",),
        refused=SCALED,  # attention and a state space run side by side, each with a factor
        refused_sites=PARTS | {"attn_in"},
        lacks=NEURONS,
    ),
    Architecture(
        "zamba2",
        "Zamba2Config",
        {
            **LLAMA,
            "num_key_value_heads": 8,
            "layers_block_type": ["mamba", "hybrid"] * (LAYERS // 2),
            "n_mamba_heads": 16,
            "mamba_d_state": 16,
            "chunk_size": 64,
            "use_mem_rope": True,
            "num_mem_blocks": 2,  # one for each hybrid layer
            "tie_word_embeddings": True,  # vLLM ties them in any case
        },
        attention=(),
        mlp=(),
        refused=NO_PARTS,
        refused_sites=INNER,
        unseen=HEADS | {"z"},
    ),
    Architecture(
        "nemotron_h",
        "NemotronHConfig",
        {
            **LLAMA,
            "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
            "head_dim": 32,
            "ssm_state_size": 16,
            "mamba_num_heads": 16,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "chunk_size": 64,
        },
        attention=(),
        mlp=(),
        refused=NO_PARTS,
        refused_sites=INNER,
        lacks=HEADS | NEURONS | {"z"},
    ),
    Architecture(
        "qwen3_next",
        "Qwen3NextConfig",
        {**LLAMA, **MOE, **_DELTA, **_SHARED_EXPERT},
        attention=("linear_attn", "self_attn"),
        routed=True,
        needs_gpu=True,
        gpu_args=_TRITON,
        partial=HEADS | {"z"},
    ),
    Architecture(
        "qwen3_5",
        "Qwen3_5TextConfig",
        {**LLAMA, **_DELTA},
        attention=("linear_attn", "self_attn"),
        needs_gpu=True,
        gpu_args=_TRITON,
        partial=HEADS | {"z"},
    ),
    Architecture(
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        {**LLAMA, **MOE, **_DELTA, **_SHARED_EXPERT},
        attention=("linear_attn", "self_attn"),
        routed=True,
        needs_gpu=True,
        gpu_args=_TRITON,
        partial=HEADS | {"z"},
    ),
    Architecture(
        "lfm2",
        "Lfm2Config",
        {**LLAMA, **_CONVOLUTIONS, "conv_bias": True},
        attention=("conv", "self_attn"),
        mlp=("feed_forward",),
        engine_args=NO_ROPE_KERNEL,
        partial=HEADS | {"z"},
    ),
    Architecture(
        "lfm2_moe",
        "Lfm2MoeConfig",
        {
            **LLAMA,
            **MOE,
            **_CONVOLUTIONS,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
        attention=("conv", "self_attn"),
        mlp=("feed_forward",),
        engine_args=NO_ROPE_KERNEL,
        routed=True,
        partial=HEADS | NEURONS | ROUTER | {"z"},
    ),
)
"""Hybrids."""
