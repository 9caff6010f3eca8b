"""Models that route rows to experts."""

from __future__ import annotations

from bench.conformance.architectures.architecture import (
    HEADS,
    LLAMA,
    MAX_LENGTH,
    MIXED,
    MOE,
    NEURONS,
    PARTIAL_ROPE,
    ROUTER,
    SCALED,
    TRITON_ATTENTION,
    WINDOW,
    Architecture,
)

_MLA = {  # vLLM has kernels for these sizes only
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": MAX_LENGTH // 4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_GROUPS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}

ROUTED = (
    Architecture(
        "mixtral",
        "MixtralConfig",
        {**LLAMA, **_EXPERTS, "sliding_window": None},
        mlp=("mlp", "block_sparse_moe"),
        routed=True,
        everyday=True,
    ),
    Architecture(
        "qwen2_moe",
        "Qwen2MoeConfig",
        {**LLAMA, **MOE, "shared_expert_intermediate_size": 128, "decoder_sparse_step": 2},
        routed=True,
        everyday=True,
        partial=NEURONS | ROUTER,
    ),
    Architecture("qwen3_moe", "Qwen3MoeConfig", {**LLAMA, **MOE, "head_dim": 32}, routed=True, everyday=True),
    Architecture("olmoe", "OlmoeConfig", {**LLAMA, "num_experts": 8, "num_experts_per_tok": 2}, routed=True),
    Architecture(
        "phimoe",
        "PhimoeConfig",
        # Without a bias of the unembedding: vLLM 0.32 does not add it.
        {**LLAMA, **_EXPERTS, "attention_bias": True, "lm_head_bias": False, "sliding_window": WINDOW},
        vllm_class="PhiMoEForCausalLM",
        gpu_args=TRITON_ATTENTION,
        routed=True,
    ),
    Architecture(
        "granitemoe",
        "GraniteMoeConfig",
        {
            **LLAMA,
            **_EXPERTS,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        mlp=("block_sparse_moe",),
        residual_scale="residual_multiplier",
        routed=True,
        refused=SCALED,
    ),
    Architecture(
        "deepseek_v2",
        "DeepseekV2Config",
        {
            **LLAMA,
            **_MLA,
            **_GROUPS,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
        routed=True,
        lacks=HEADS,
        partial=NEURONS | ROUTER,
    ),
    Architecture(
        "deepseek_v3",
        "DeepseekV3Config",
        {
            **LLAMA,
            **_MLA,
            **_GROUPS,
            "q_lora_rank": 128,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "num_mtp_layers": 0,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        routed=True,
        lacks=HEADS,
        partial=NEURONS | ROUTER,
    ),
    Architecture(
        "glm4_moe",
        "Glm4MoeConfig",
        {
            **LLAMA,
            **_GROUPS,
            **PARTIAL_ROPE,
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
        },
        routed=True,
        partial=NEURONS | ROUTER,
    ),
    Architecture(
        "gpt_oss",
        "GptOssConfig",
        {
            **LLAMA,
            **_EXPERTS,
            **MIXED,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "rope_parameters": {**_YARN, "truncate": False},
        },
        routed=True,
    ),
    Architecture(
        "llama4",
        "Llama4TextConfig",
        {
            **LLAMA,
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "head_dim": 32,
            "intermediate_size_mlp": 320,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 128,  # a block of the KV cache on a CPU
            "attn_temperature_tuning": False,  # as in vLLM, up to 32768 tokens
        },
        mlp=("feed_forward",),
        routed=True,
        partial=NEURONS | ROUTER,
        unseen=HEADS - {"v"},  # vLLM orders the elements of a head otherwise
    ),
    Architecture(
        "hunyuan_v1_moe", "HunYuanMoEV1Config", {**LLAMA, "head_dim": 32, "num_experts": 8, "moe_topk": 2}, routed=True
    ),
    Architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeConfig",
        {
            **LLAMA,
            "head_dim": 32,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 96,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
        unchanged=("e_score_correction_bias",),  # on a CPU, vLLM ignores it
        routed=True,
        partial=NEURONS | ROUTER,
    ),
)
"""Mixtures of experts."""
