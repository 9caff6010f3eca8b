"""LoRA adapters in PEFT's format, made on the spot, and the same adapters merged into transformers' models.

The merge adds `scaling * B @ A` to the weights of a module. Here scaling is `lora_alpha / r`, or `lora_alpha / sqrt(r)`
with rsLoRA. `tests/inference/engine/test_reference_adapters.py` compares it with PEFT.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn

EVERY_MODULE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_PREFIX = "base_model.model."
_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"


def make_adapter(
    folder: Path,
    model: Path,
    seed: int,
    *,
    rank: int,
    alpha: int,
    modules: Iterable[str] = EVERY_MODULE,
    rslora: bool = False,
) -> Path:
    """Write a random adapter of a model, whose rows differ from the model's well beyond rounding.

    Args:
        folder: The adapter's folder, which is made.
        model: The model's folder.
        seed: The seed of the adapter's weights.
        rank: PEFT's `r`.
        alpha: PEFT's `lora_alpha`.
        modules: The names of the modules that it changes, in every layer.
        rslora: PEFT's `use_rslora`.
    """
    names = tuple(modules)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, module in AutoModelForCausalLM.from_pretrained(model).named_modules():
        if path.endswith(names):
            out, into = module.weight.shape
            tensors[f"{_PREFIX}{path}.lora_A.weight"] = torch.randn(rank, into, generator=random) / into**0.5
            tensors[f"{_PREFIX}{path}.lora_B.weight"] = torch.randn(out, rank, generator=random) / rank**0.5
    folder.mkdir(parents=True)
    save_file(tensors, folder / _WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": names, "use_rslora": rslora}
    (folder / _CONFIG).write_text(json.dumps(config))
    return folder


def merge(model: nn.Module, adapter: Path) -> None:
    """Add an adapter to the weights of a transformers model."""
    config, tensors = json.loads((adapter / _CONFIG).read_text()), load_file(adapter / _WEIGHTS)
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    for name, down in tensors.items():
        path, is_down, _ = name.removeprefix(_PREFIX).partition(".lora_A.weight")
        if is_down:
            up = tensors[f"{_PREFIX}{path}.lora_B.weight"]
            with torch.no_grad():
                model.get_submodule(path).weight += scaling * up @ down
