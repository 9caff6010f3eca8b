"""The check that an adapter was made for the served model. vLLM serves some adapters of other models without an error.

It pads matrices that are too small, and ignores layers that the model does not have. PEFT refuses the one and warns of
the other, by comparing with the modules of transformers' model. This module refuses both, if transformers knows the
model.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SIZES = {".lora_A.weight": ("in_features", 1), ".lora_B.weight": ("out_features", 0)}
"""By the ends of names of an adapter's matrices, [rank, in] and [out, rank]: the attribute of a linear module that has
the same size, and the dimension."""


def model_of(config: Any) -> nn.Module | None:
    """Return transformers' model of a configuration, without memory for its weights; None if it knows none."""
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(deepcopy(config))
    except Exception:  # noqa: BLE001 - it raises exceptions of many types, and the check is then not possible
        return None
    return model


def contradiction(folder: Path, model: nn.Module) -> str:
    """Return why an adapter cannot be for a model, as the end of a sentence; empty if nothing says so.

    Modules of other names are not compared, because versions of transformers name some modules differently.

    Args:
        folder: The folder of the adapter. Without safetensors, nothing is compared.
        model: The model, from `model_of`.
    """
    modules = dict(model.named_modules())
    for path, name, size in _sizes(folder / _WEIGHTS):
        module = modules.get(path)
        if isinstance(module, nn.Linear) and getattr(module, name) != size:
            return f"its {path} has {name}={size}, and that of the model {name}={getattr(module, name)}"
        parent, layer = _layer_of(path)
        layers = modules.get(parent)
        if isinstance(layers, nn.ModuleList) and layer >= len(layers):
            return f"it has {parent}.{layer}, and the last one of the model is {parent}.{len(layers) - 1}"
    return ""


def _sizes(file: Path) -> Iterator[tuple[str, str, int]]:
    """Yield each matrix's module, the attribute of the module that must be its size, and that size."""
    if not file.is_file():
        return
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
            for end, (attribute, dimension) in _SIZES.items():
                if name.endswith(end):
                    path = name.removeprefix(_PREFIX).removesuffix(end)
                    yield path, attribute, tensors.get_slice(name).get_shape()[dimension]


def _layer_of(path: str) -> tuple[str, int]:
    """Return the list of layers that a module is in, and its layer; no list and 0 for a module outside of layers."""
    parts = path.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return ("", 0) if at is None else (".".join(parts[:at]), int(parts[at]))
