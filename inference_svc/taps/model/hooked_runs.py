"""Runs of a model with hooks, before it is compiled, to find out how its tensors flow."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.utils.hooks import RemovableHandle


TINY = 1e-20
"""Keeps a division by a length defined."""


class CannotTapError(RuntimeError):
    """The taps do not fit the model. The message says what was looked for, and what was found."""


def name_of(model: nn.Module, module: nn.Module) -> str:
    """Return a module's path in the model, and its class: `model.layers.0 (LlamaDecoderLayer)`."""
    path = next((path for path, found in model.named_modules() if found is module), "")
    return f"{path} ({type(module).__name__})" if path else type(module).__name__


@contextmanager
def _hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks when the context ends."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_hooked(run: Callable[[], object], handles: Iterable[RemovableHandle]) -> None:
    """Run a model, then remove the hooks."""
    with _hooked(handles):
        run()


@contextmanager
def calling(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the method `forward` of a module while the context lasts.

    To see the calls of a whole model, hooks are not enough: vLLM's decorator for compilation calls `forward` past the
    hooks of the module that it decorates, which may be the whole model.
    """
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


@contextmanager
def fixed_attention(model: nn.Module, is_attention: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Make attention return the same numbers in every run while the context lasts.

    In a run without requests, attention computes nothing: its output is uninitialised memory, which holds arbitrary
    numbers that differ from run to run.
    """
    attention = [module for module in model.modules() if is_attention(module)]
    with _hooked([module.register_forward_hook(_give_numbers, with_kwargs=True) for module in attention]):
        yield


def _give_numbers(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    if output is not None:
        return numbers(output) if isinstance(output, Tensor) else type(output)(map(_numbers_if_tensor, output))
    written = written_by(module, args, kwargs)
    if written is not None:
        written.copy_(numbers(written))
    return None


def written_by(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the argument into which a module without a result writes, if there is one.

    vLLM's convolutions and state spaces name it `output`.
    """
    written = inspect.signature(module.forward).bind(*args, **kwargs).arguments.get("output")
    return written if isinstance(written, Tensor) else None


def _numbers_if_tensor(value: Any) -> Any:
    return numbers(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def numbers(like: Tensor) -> Tensor:
    """Return a tensor with the shape, dtype and device of `like`, and with fixed values between -1 and 1."""
    return torch.arange(like.numel(), device=like.device, dtype=torch.float32).cos().to(like.dtype).view(like.shape)


def is_sequence(values: Any) -> bool:
    """Return whether a module's output is a sequence of values."""
    return isinstance(values, (list, tuple))


def is_pair(output: Any) -> bool:
    """Return whether a layer's output is a pair of tensors."""
    return is_sequence(output) and len(output) == 2 and isinstance(output[1], Tensor)  # noqa: PLR2004 - a pair


def relative_error(other: Tensor, value: Tensor) -> float:
    """Return the largest relative difference of any row: |other - value| / |value|."""
    return float(((other - value).norm(dim=-1) / value.norm(dim=-1).clamp_min(TINY)).max())
