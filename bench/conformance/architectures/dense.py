"""Models whose layers have attention, and after it an MLP."""

from __future__ import annotations

from bench.conformance.architectures.architecture import (
    AFTER_ATTENTION,
    AFTER_MLP,
    COMMON,
    FINAL,
    GEMMA,
    GPT,
    HEADS,
    HIDDEN,
    LAYERS,
    LLAMA,
    MAX_LENGTH,
    MIDDLE,
    MIXED,
    PARTIAL_ROPE,
    PARTS,
    PROJECTED,
    SCALED,
    TRITON_ATTENTION,
    VOCABULARY,
    WINDOW,
    Architecture,
)

_BIASES = {"attention_bias": True, "mlp_bias": True}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": MAX_LENGTH // 4,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_MLA = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}

DENSE = (
    Architecture("llama", "LlamaConfig", LLAMA, everyday=True),
    Architecture("qwen2", "Qwen2Config", LLAMA, everyday=True),
    Architecture("qwen3", "Qwen3Config", {**LLAMA, "head_dim": 32}, everyday=True),
    Architecture(
        "mistral",
        "MistralConfig",
        {**LLAMA, "head_dim": 32, "sliding_window": WINDOW},
        gpu_args=TRITON_ATTENTION,
        everyday=True,
    ),
    Architecture("gemma", "GemmaConfig", {**LLAMA, "head_dim": 32, "tie_word_embeddings": True}),
    Architecture("gemma2", "Gemma2Config", {**GEMMA, **MIXED}, AFTER_ATTENTION, AFTER_MLP, everyday=True),
    Architecture("gemma3", "Gemma3TextConfig", {**GEMMA, **MIXED}, AFTER_ATTENTION, AFTER_MLP, everyday=True),
    Architecture(
        "gemma3n",
        "Gemma3nTextConfig",
        {
            **GEMMA,
            **MIXED,
            "intermediate_size": [320] * LAYERS,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
            "laurel_rank": 16,
            "activation_sparsity_pattern": [0.0] * LAYERS,
        },
        attention=(),
        mlp=(),
        refused="looked for a row of the residual stream for each token",  # it has four streams
        refused_stream=True,
    ),
    Architecture(
        "gemma4",
        "Gemma4TextConfig",
        {
            **LLAMA,
            **MIXED,
            "head_dim": 32,
            "global_head_dim": 64,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
            "final_logit_softcapping": 30.0,
        },
        gpu_args=TRITON_ATTENTION,
        attention=(),
        mlp=(),
        refused=SCALED,
        refused_sites=PARTS
        | MIDDLE,  # a third part adds the token's own embedding, and a factor scales the layer's output
        lacks=PROJECTED,  # it normalises the values
    ),
    Architecture("phi3", "Phi3Config", {**LLAMA, "sliding_window": WINDOW}, gpu_args=TRITON_ATTENTION, everyday=True),
    Architecture("gpt2", "GPT2Config", GPT, attention=("attn",), everyday=True),
    Architecture("gpt_bigcode", "GPTBigCodeConfig", {**GPT, "multi_query": True}, attention=("attn",), lacks=HEADS),
    Architecture(
        "opt",
        "OPTConfig",
        {**COMMON, "ffn_dim": 320, "word_embed_proj_dim": HIDDEN, "tie_word_embeddings": True},
        mlp=("fc2",),
        everyday=True,
    ),
    Architecture(
        "bloom",
        "BloomConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "n_layer": LAYERS,
            "n_head": 8,
            "seq_length": MAX_LENGTH,
            "pad_token_id": 0,
        },
        gpu_args=TRITON_ATTENTION,
        attention=("self_attention.dense",),  # the blocks' own outputs contain the stream
        mlp=("mlp.dense_4h_to_h",),
        max_error=1e-3,  # transformers approximates GELU with tanh
        unseen=HEADS,
    ),
    Architecture(
        "starcoder2",
        "Starcoder2Config",
        {**LLAMA, "use_bias": True, "sliding_window": WINDOW},
        gpu_args=TRITON_ATTENTION,
        lacks=HEADS,
    ),
    Architecture("stablelm", "StableLmConfig", {**LLAMA, "partial_rotary_factor": 0.5}),
    Architecture("olmo2", "Olmo2Config", LLAMA, AFTER_ATTENTION, AFTER_MLP, lacks=HEADS),
    Architecture(
        "olmo3",
        "Olmo3Config",
        {**LLAMA, **MIXED, "sliding_window": WINDOW},
        AFTER_ATTENTION,
        AFTER_MLP,
        lacks=HEADS,
    ),
    Architecture(
        "exaone4",
        "Exaone4Config",
        {**LLAMA, **MIXED, "sliding_window": WINDOW},
        AFTER_ATTENTION,
        AFTER_MLP,
        everyday=True,
    ),
    Architecture(
        "glm4",
        "Glm4Config",
        {**LLAMA, **PARTIAL_ROPE, "head_dim": 32, "attention_bias": True},
        attention=("post_self_attn_layernorm",),
        mlp=("post_mlp_layernorm",),
    ),
    Architecture(
        "granite",
        "GraniteConfig",
        {
            **LLAMA,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        residual_scale="residual_multiplier",
        refused=SCALED,
    ),
    Architecture(
        "minicpm3",
        "MiniCPM3Config",
        {**LLAMA, **_MLA, "num_key_value_heads": 8, "scale_emb": 2.0, "scale_depth": 1.4, "dim_model_base": 128},
        residual_scale="residual_scale",
        refused=SCALED,
        lacks=FINAL | PROJECTED,  # it scales the rows of its final norm, and compresses queries and keys
    ),
    Architecture("nemotron", "NemotronConfig", {**LLAMA, **PARTIAL_ROPE, **_BIASES, "head_dim": 32}),
    Architecture("arcee", "ArceeConfig", {**LLAMA, **_BIASES, "head_dim": 32}, lacks=HEADS),
    Architecture(
        "apertus",
        "ApertusConfig",
        {**LLAMA, "rope_parameters": _LLAMA3_ROPE},
        max_error=5e-3,  # vLLM computes two of its factors in bfloat16
    ),
    Architecture(
        "seed_oss", "SeedOssConfig", {**LLAMA, "head_dim": 32, "attention_bias": True, "residual_dropout": 0.0}
    ),
    Architecture(
        "smollm3",
        "SmolLM3Config",
        {**LLAMA, **MIXED, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    Architecture("hunyuan_v1_dense", "HunYuanDenseV1Config", {**LLAMA, "head_dim": 32}),
    Architecture("ernie4_5", "Ernie4_5Config", {**LLAMA, "head_dim": 32}),
)
"""Dense models."""
