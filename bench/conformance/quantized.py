"""Quantises the weights of a tiny model: round to nearest, in the formats of checkpoints that vLLM loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_GROUP = 64
"""Input channels that share a scale, for 4 bits."""
_PACKED = 8
"""4-bit values in one int32."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INPUT_SCALE = 0.03
"""The scale of static 8-bit inputs: they may reach 0.03 × 448."""


@dataclass(frozen=True)
class Quantization:
    """A format of weights."""

    pack: Callable[[Tensor], Mapping[str, Tensor]] | None = None
    """Returns the tensors of a linear layer by their last names, from its weight, [out, in]. None: vLLM quantises the
    weights when it loads them."""
    config: dict[str, Any] = field(default_factory=dict)
    """The model's `quantization_config`."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Arguments for vLLM's engine."""
    needs_gpu: bool = False
    """Whether vLLM has kernels for it on GPUs only."""


def _fp8(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn),
        "weight_scale": scale.reshape(1),
        "input_scale": torch.tensor([_INPUT_SCALE]),
    }


def _int8(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / torch.iinfo(torch.int8).max
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _four_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return values from 0 to 15, with 8 for zero, [in, out], and scales, [groups, out]."""
    groups = weight.T.reshape(-1, _GROUP, len(weight))
    scales = groups.abs().amax(1) / 7
    values = (groups / scales[:, None]).round().clamp(-8, 7) + 8
    return values.reshape(-1, len(weight)).to(torch.int64), scales.to(torch.float16)


def _packed(values: Tensor, order: tuple[int, ...] = tuple(range(_PACKED))) -> Tensor:
    """Return 4-bit values, eight neighbours of the last dimension in one int32."""
    groups = values.reshape(*values.shape[:-1], -1, _PACKED)
    words = sum(groups[..., index] << (4 * place) for place, index in enumerate(order))
    assert isinstance(words, Tensor)  # noqa: S101 - not the start of the sum
    return words.to(torch.int32)


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    values, scales = _four_bits(weight)
    return {
        "qweight": _packed(values.T).T.contiguous(),
        "qzeros": _packed(torch.full(scales.shape, 7, dtype=torch.int64)),  # the format adds 1
        "scales": scales,
        "g_idx": (torch.arange(len(values)) // _GROUP).to(torch.int32),
    }


def _awq(weight: Tensor) -> dict[str, Tensor]:
    values, scales = _four_bits(weight)
    zeros = torch.full(scales.shape, 8, dtype=torch.int64)
    return {"qweight": _packed(values, _AWQ_ORDER), "qzeros": _packed(zeros, _AWQ_ORDER), "scales": scales}


def _compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    bits: dict[str, Any] = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**bits, **weights}, "input_activations": {**bits, **inputs}}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_WHOLE = {"strategy": "tensor", "dynamic": False}
_EACH_TOKEN = {"strategy": "token", "dynamic": True}
QUANTIZATIONS = {
    "fp8-dynamic": Quantization(engine_args={"quantization": "fp8"}, needs_gpu=True),
    "fp8-static": Quantization(_fp8, _compressed("float", _WHOLE, _WHOLE), needs_gpu=True),
    "int8": Quantization(_int8, _compressed("int", {"strategy": "channel", "dynamic": False}, _EACH_TOKEN)),
    "gptq": Quantization(
        _gptq, {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True}
    ),
    "awq": Quantization(
        _awq, {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"}
    ),
}
"""The formats, by their names on the command line."""


def quantize(folder: Path, quantization: Quantization) -> None:
    """Quantise the linear layers of a model in place, but not its embeddings and norms."""
    if quantization.pack is None:
        return
    file = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        layer, _, last = name.rpartition(".")
        if last == "weight" and layer.endswith("_proj"):
            packed = quantization.pack(tensor.float())
            tensors |= {f"{layer}.{part}": value.contiguous() for part, value in packed.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization.config}))
