"""Running a model with hooks before it is compiled, to see how its tensors flow."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.utils.hooks import RemovableHandle


_TINY = 1e-20


class CannotTapError(RuntimeError):
    """The model has no place where the taps could go. The message says what was looked for."""


def run_hooked(run: Callable[[], object], handles: Iterable[RemovableHandle]) -> None:
    """Run a model, and remove its hooks."""
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def fixed_attention(model: nn.Module, is_attention: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Have attention give the same numbers in every run.

    In a run without requests, attention computes nothing. Then its output is memory that was never written, which may
    hold any numbers, and others in the next run.
    """
    handles = [
        module.register_forward_hook(_give_numbers, with_kwargs=True)
        for module in model.modules()
        if is_attention(module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _give_numbers(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    if output is not None:
        return numbers(output) if isinstance(output, Tensor) else type(output)(map(_numbers_if_tensor, output))
    # It writes into an argument, which vLLM's linear attention and state spaces call so.
    written = inspect.signature(module.forward).bind(*args, **kwargs).arguments.get("output")
    if isinstance(written, Tensor):
        written.copy_(numbers(written))
    return None


def _numbers_if_tensor(value: Any) -> Any:
    return numbers(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def numbers(like: Tensor) -> Tensor:
    """Return a tensor of the same kind whose values, between -1 and 1, are the same in every run."""
    return torch.arange(like.numel(), device=like.device, dtype=torch.float32).cos().to(like.dtype).view(like.shape)


def is_sequence(values: Any) -> bool:
    """Tell whether a module returned several values."""
    return isinstance(values, (list, tuple))


def is_pair(output: Any) -> bool:
    """Tell whether a layer returned two tensors."""
    return is_sequence(output) and len(output) == 2 and isinstance(output[1], Tensor)  # noqa: PLR2004 - a pair


def relative_error(other: Tensor, value: Tensor) -> float:
    """Return by how much a value differs from another, relative to its norm; the largest of all rows."""
    return float(((other - value).norm(dim=-1) / value.norm(dim=-1).clamp_min(_TINY)).max())
