"""A workaround for LoRA on a CPU: vLLM's code there takes a wrong adapter, or fails, where its kernels for GPUs skip.

* A batch may have requests with adapters and without. vLLM gives the tokens of the latter the index -1 among the loaded
  adapters. Its code for CPUs takes that for the last one (https://github.com/vllm-project/vllm/pull/48421).
* For the log-probabilities of a prompt, vLLM computes logits of many tokens, but gives the adapter only of those that
  it samples. In a batch of several requests, the engine would crash.

This module makes the code see zeros in place of all these tokens, so that no adapter changes them. That is right for
log-probabilities, too, unless an adapter changes the unembedding; then vLLM itself takes wrong adapters for them, on
GPUs too (https://github.com/vllm-project/vllm/issues/16668).

It relies on names of vLLM 0.32: three functions of `lora_ops`, which other functions there call, and which
`punica_cpu` imports. Their arguments begin with inputs, weights, output and indices.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any

import torch

from inference_svc.taps.vllm.missing_names import refuse_missing

if TYPE_CHECKING:
    from collections.abc import Callable

_DEFINED_IN = "vllm.lora.ops.torch_ops.lora_ops"
_USED_IN = "vllm.lora.punica_wrapper.punica_cpu"
_FUNCTIONS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
_NUM_LEADING = 4
_INDICES = "lora_indices_tensor"
"""The last one of the leading parameters."""


def attach(runner: Any, vllm_version: str) -> None:
    """Make vLLM's LoRA code for CPUs skip tokens without an adapter. Calling it again changes nothing.

    Raises:
        IncompatibleEngineError: vLLM lacks a name that this workaround uses.
    """
    modules = [importlib.import_module(name) for name in (_DEFINED_IN, _USED_IN)]
    missing = [f"{module.__name__}.{name}" for module in modules for name in _FUNCTIONS if not _fits(module, name)]
    refuse_missing(runner, vllm_version, missing)
    for name in _FUNCTIONS:
        function = getattr(modules[0], name)
        if not hasattr(function, "__wrapped__"):
            for module in modules:
                setattr(module, name, skipping(function))


def skipping(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function of vLLM's that takes zeros for the inputs whose adapter is -1 or not known."""

    @functools.wraps(function)
    def skip(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *rest: Any,
        **more: Any,
    ) -> None:
        if len(indices) not in {1, len(inputs)}:  # a single index holds for all inputs
            indices = torch.full((len(inputs),), -1)
        function(torch.where((indices < 0)[:, None], 0, inputs), weights, output, indices, *rest, **more)

    return skip


def _fits(module: Any, name: str) -> bool:
    function = getattr(module, name, None)
    return function is not None and [*inspect.signature(function).parameters][_NUM_LEADING - 1 : _NUM_LEADING] == [
        _INDICES
    ]
