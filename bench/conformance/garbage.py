"""Fills the memory of PyTorch's uninitialised tensors with garbage, to expose code that reads it.

vLLM mixes `Garbage` into its workers (`worker_extension_cls`). From then on, each uninitialised tensor of the process
has random values: huge, not finite, or plausible. Code that reads memory before writing it then fails reliably instead
of rarely.
"""

from __future__ import annotations

import os
import random
from typing import Any

import torch

_VALUES = (1e31, -1e31, float("nan"), float("inf"), 1.0, -3.0, 0.0)
_random = random.Random(os.urandom(8))  # noqa: S311 - not secret; different in each process


def fill(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a floating-point tensor with garbage; leave other tensors unchanged."""
    if tensor.dtype in {torch.float32, torch.bfloat16, torch.float16} and tensor.numel():
        value = _random.choice(_VALUES)
        if abs(value) > torch.finfo(tensor.dtype).max:
            value = float("inf")
        tensor.fill_(value)
        if tensor.is_contiguous() and _random.random() < 0.5:  # noqa: PLR2004 - half of them
            tensor.view(-1)[:: _random.randint(2, 7)] = _random.uniform(-2.0, 2.0)
    return tensor


class Garbage:
    """Adds nothing to a worker. Importing this module has the effect."""


def _filling(allocate: Any) -> Any:
    def garbage(*args: Any, **kwargs: Any) -> Any:
        tensor = allocate(*args, **kwargs)
        return tensor if torch.compiler.is_compiling() else fill(tensor)

    return garbage


torch.empty = _filling(torch.empty)
torch.empty_like = _filling(torch.empty_like)
torch.Tensor.new_empty = _filling(torch.Tensor.new_empty)
