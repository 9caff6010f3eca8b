"""What an architecture is, and the values that many configurations share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

LAYERS = 4
HIDDEN = 256
VOCABULARY = 512
PARTS = frozenset({"attn_out", "mlp_out"})
"""The sites that a model lacks if it scales or merges what the parts of a layer add."""
MIDDLE = frozenset({"resid_mid"})
"""The site that layers lack if they compute attention and MLP from the same input."""
HEADS, NEURONS, ROUTER = (
    frozenset({"q", "k", "v", "q_pre", "k_pre"}),
    frozenset({"mlp_act"}),
    frozenset({"router_logits", "routing_weights"}),
)
"""The sites that a model lacks if its attention takes something else, if its MLP is a mixture of experts, and if it is
none."""
PROJECTED = frozenset({"q_pre", "k_pre"})
"""The sites that a model lacks if no projection returns queries, keys and values as the attention takes the values."""
FINAL = frozenset({"final_norm"})
"""The site that only the last layer has."""
INNER = PARTS | MIDDLE | {"attn_in", "mlp_in"}
"""The sites that layers lack if they have no attention and MLP after each other."""
MAX_LENGTH = 256
"""The most tokens of prompt and reply together."""

WINDOW = 40
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
    """The path of the submodule of a decoder layer whose output the attention block (or its replacement) adds to the
    residual stream: the first of these that the layer has. A norm after the attention is part of the block. Empty
    if no module has this output. Then attn_out and mlp_out are refused."""
    mlp: tuple[str, ...] = ("mlp",)
    """The same for the MLP."""
    mlp_in: tuple[str, ...] = ()
    """The path of the submodule that takes what the MLP takes; empty for a usual name."""
    middle: tuple[str, ...] = ()
    """The path of the submodule that takes the residual stream between attention and MLP. Empty: that stream is what
    enters the layer and what its attention adds."""
    residual_scale: str = ""
    """The attribute of a decoder layer with a factor for both, applied before they are added."""
    routed: bool = False
    """Whether it routes rows to experts."""
    needs_gpu: bool = False
    """Whether vLLM can run it only on a GPU."""
    reference: dict[str, Any] = field(default_factory=dict)
    """Values of the configuration that must be different in transformers, because vLLM reads them differently."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Arguments for vLLM's engine."""
    gpu_args: dict[str, Any] = field(default_factory=dict)
    """More of them, on a GPU."""
    vllm_class: str = ""
    """The name of its class in vLLM, if it is not the name in transformers."""
    unchanged: tuple[str, ...] = ()
    """The names of weights that keep their defaults."""
    max_error: float = 0.0
    """The largest allowed error of a row in float32, if vLLM's arithmetic differs from transformers'."""
    refused: str = ""
    """Part of the reason with which the service refuses `refused_sites`; empty if it captures all."""
    refused_sites: frozenset[str] = PARTS
    lacks: frozenset[str] = frozenset()
    """Further sites that the service refuses, because no module of its own takes their rows."""
    partial: frozenset[str] = frozenset()
    """Sites that only some of its layers have, besides that of the final norm."""
    unseen: frozenset[str] = frozenset()
    """Sites that are not compared, because transformers computes them inside a function."""
    refused_stream: bool = False
    """Whether it refuses resid_post and resid_pre too, so that it does not serve the architecture."""
    everyday: bool = False
    """Whether the tests run it. For the taps, each of the others is equivalent to one that the tests run."""

    @property
    def lacking(self) -> frozenset[str]:
        """`lacks`, with the neurons of a mixture of experts, which has no module that takes them."""
        return self.lacks | ((NEURONS if self.routed else frozenset()) - self.partial)

    @property
    def layers(self) -> int:
        """Its decoder layers."""
        return LAYERS

    def arguments(self, *, gpu: bool) -> dict[str, Any]:
        """Return its arguments for vLLM's engine."""
        return {**self.engine_args, **self.gpu_args} if gpu else self.engine_args

    def compared(self, sites: Sequence[str]) -> tuple[str, ...]:
        """Return those of the sites that are compared. Without experts, there is no router."""
        return tuple(site for site in sites if site not in self.unseen | (frozenset() if self.routed else ROUTER))

    def site_sets(self, sites: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the sites of each check that compares these sites: if some are refused, the others are checked too."""
        lacking = self.lacking | (self.refused_sites if self.refused else frozenset())
        every = self.compared(sites)
        others = tuple(site for site in every if site not in lacking)
        return [every, others] if others and others != every and not self.refused_stream else [every]

    def refusal(self, sites: Iterable[str]) -> str:
        """Return part of the reason with which the service must refuse these sites; empty if it captures them.

        The reason is that of the first sites that the service checks. Without `PARTS`, it is that of another of
        `refused_sites`, which this does not know.
        """
        first = self.refused_sites & PARTS or self.refused_sites
        if self.refused_stream or not first.isdisjoint(sites):
            return self.refused
        if self.refused and not self.refused_sites.isdisjoint(sites):
            return ""
        lacking = self.lacking.intersection(sites)
        return NO_FINAL_NORM if FINAL & lacking else NO_ROWS if lacking else ""


COMMON = {
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
PARTIAL_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
GPT = {
    "vocab_size": VOCABULARY,
    "n_positions": MAX_LENGTH,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {**COMMON, "intermediate_size": 320, "num_key_value_heads": 4}
GEMMA = {
    **LLAMA,
    "head_dim": 32,
    "query_pre_attn_scalar": 48,  # deliberately not the head size, which is the usual value
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
AFTER_ATTENTION, AFTER_MLP = ("post_attention_layernorm",), ("post_feedforward_layernorm",)
MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2}
TRITON_ATTENTION = {"attention_backend": "TRITON_ATTN"}
"""With its default kernels for attention on Hopper, vLLM 0.32 starts no model with ALiBi, and computes wrong rows if
every layer has the same sliding window. Those of Gemma 4 need an optional package."""
NO_ROPE_KERNEL = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""Avoids vLLM's rotary kernel for CPUs, which computes other values if heads have a dimension of their own."""
SCALED, NO_PARTS = "scales or merges", "for an attention block and for an MLP after it"
"""Parts of the two reasons for which attn_out and mlp_out are refused."""
NO_ROWS = "for modules of the attention or the MLP that take or return rows of this kind"
"""Part of the reason for which a site is refused whose rows have a width of their own."""
NO_MIDDLE = "resid_mid cannot be captured"
NO_FINAL_NORM = "final_norm cannot be captured"
BEFORE_MLP = ("post_attention_layernorm",)
"""The norm that takes the stream between attention and MLP, in most models."""
HYBRID = ["linear_attention", "full_attention"] * (LAYERS // 2)
