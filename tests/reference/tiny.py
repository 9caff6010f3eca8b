"""A tiny random model, made on the spot: small enough to compile in seconds, and exact in float32."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch
import transformers

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 4
HIDDEN = 128
EOS = 2
"""The token that ends a reply."""


def make_tiny_llama(folder: Path, tokenizer_from: Path) -> Path:
    """Write a Llama of 4 layers, hidden size 128, with random float32 weights, and another model's tokenizer."""
    torch.manual_seed(20)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=HIDDEN,
        intermediate_size=320,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,  # large enough that the layers differ well beyond rounding
        eos_token_id=EOS,
    )
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (tokenizer_from / name).exists():
            shutil.copy(tokenizer_from / name, folder / name)
    return folder
