"""Memory that is filled with garbage on purpose: what PyTorch hands out uninitialised holds the worst that it could.

vLLM mixes `Garbage` into its workers (`worker_extension_cls`). From then on, each uninitialised tensor of that process
holds numbers that are huge, not finite or plausible, and others the next time. Code that reads memory before it writes
it gives wrong results at once, instead of by chance.
"""

from __future__ import annotations

import os
import random
from typing import Any

import torch

_VALUES = (1e31, -1e31, float("nan"), float("inf"), 1.0, -3.0, 0.0)
_random = random.Random(os.urandom(8))  # noqa: S311 - no secret; another one in each process


def fill(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor of floating-point numbers with garbage; leave others as they are."""
    if tensor.dtype in {torch.float32, torch.bfloat16, torch.float16} and tensor.numel():
        value = _random.choice(_VALUES)
        if abs(value) > torch.finfo(tensor.dtype).max:
            value = float("inf")
        tensor.fill_(value)
        if tensor.is_contiguous() and _random.random() < 0.5:  # noqa: PLR2004 - half of them
            tensor.view(-1)[:: _random.randint(2, 7)] = _random.uniform(-2.0, 2.0)
    return tensor


class Garbage:
    """Nothing is added to a worker; what counts is that its process imports this module."""


def _filling(allocate: Any) -> Any:
    def garbage(*args: Any, **kwargs: Any) -> Any:
        tensor = allocate(*args, **kwargs)
        return tensor if torch.compiler.is_compiling() else fill(tensor)

    return garbage


torch.empty = _filling(torch.empty)
torch.empty_like = _filling(torch.empty_like)
torch.Tensor.new_empty = _filling(torch.Tensor.new_empty)
