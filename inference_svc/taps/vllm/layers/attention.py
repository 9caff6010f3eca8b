"""What determines the attention weights of a layer, read from vLLM's attention module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType

from inference_svc.taps.vllm.layers.tensor_parallel import copies_of_keys, join_numbers, num_ranks

if TYPE_CHECKING:
    from torch import nn


_NAMES = ("scale", "logits_soft_cap", "sinks", "alibi_slopes", "kv_sharing_target_layer_name")
"""What the implementation of an attention must have. Some of vLLM's backends lack one of these."""


def attention_of(layer: nn.Module, config: Any) -> dict[str, Any]:
    """Return the fields of the contract's `AttentionLayer` for a decoder layer, as plain data.

    They describe the heads of all ranks that share the layer. Every rank must call this.

    Args:
        layer: The decoder layer.
        config: vLLM's `VllmConfig`.

    Returns:
        Empty if the layer has no attention, several, or one of a kind whose weights do not follow from these fields:
        latent attention, attention in chunks, or a layer that takes the keys of another one.
    """
    found = [module for module in layer.modules() if isinstance(module, Attention)]
    if len(found) != 1 or type(found[0]) is not Attention:
        return {}
    (module,) = found
    impl = module.impl
    if (
        not all(hasattr(impl, name) for name in _NAMES)
        or module.attn_type != AttentionType.DECODER
        or impl.kv_sharing_target_layer_name is not None
    ):
        return {}
    copies = copies_of_keys(config, module)
    if copies is None:
        return {}
    return {
        "num_heads": module.num_heads * num_ranks(),
        "num_kv_heads": module.num_kv_heads * num_ranks() // copies,
        "scale": impl.scale,
        "sliding_window": module.sliding_window or 0,
        "logits_soft_cap": impl.logits_soft_cap or 0.0,
        "sinks": _numbers(impl.sinks),
        "alibi_slopes": _numbers(impl.alibi_slopes),
    }


def _numbers(values: Any) -> list[float]:
    """Return one number for each head of all ranks; empty for None."""
    if values is None:
        return []
    numbers = torch.as_tensor(values, dtype=torch.float32).flatten()
    return [float(value) for value in join_numbers(numbers).tolist()]
