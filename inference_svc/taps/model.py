"""Finding a model's decoder layers by structure, and hooking the op to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from inference_svc.taps import op

if TYPE_CHECKING:
    from collections.abc import Sequence


class CannotTapError(RuntimeError):
    """The model has no place where the taps could go. The message says what was looked for."""


def find_decoder_layers(model: nn.Module, num_layers: int) -> dict[int, nn.Module]:
    """Return this rank's decoder layers by their index in the whole model.

    Decoder layers are the one `nn.ModuleList` of the model that has as many members as the configuration has layers.
    Members that another pipeline stage holds are vLLM's `PPMissingLayer`, and left out.

    Args:
        model: The model as vLLM loaded it.
        num_layers: Decoder layers of the whole model.

    Raises:
        CannotTapError: There is no such list, or more than one.
    """
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    }
    outermost = {
        name: found for name, found in lists.items() if not any(name.startswith(f"{other}.") for other in lists)
    }
    if len(outermost) != 1:
        raise CannotTapError(
            f"{type(model).__name__} cannot be tapped: looked for one nn.ModuleList of {num_layers} decoder layers, "
            f"found {sorted(outermost) or 'none'}."
        )
    (layers,) = outermost.values()
    return {index: layer for index, layer in enumerate(layers) if type(layer).__name__ != "PPMissingLayer"}


def hook_layers(layers: dict[int, nn.Module]) -> None:
    """Call the op after each layer. Must come before vLLM's first run of the model, which traces it."""
    for index, layer in layers.items():
        layer.register_forward_hook(_make_hook(index))


def _make_hook(index: int) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor | Sequence[Tensor]) -> None:
        del module, arguments
        if isinstance(output, Tensor):
            op.call(output, None, index)
        else:
            op.call(output[0], output[1], index)

    return hook
