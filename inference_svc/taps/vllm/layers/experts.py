"""The experts that a mixture of experts chooses for each token, taken from vLLM's own choice.

vLLM's `MoERunner` asks its router for the chosen experts and their weights, and gives both to the experts' kernels. The
tap is between the two, so its rows are right for every kind of router. On a GPU this is within an opaque op of the
compiled graph, and so within CUDA graphs.

Some kernels choose the experts themselves. Then no router is asked, and the site is refused.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from inference_svc.taps import op
from inference_svc.taps.model.hooked_runs import CannotTapError, run_hooked
from inference_svc.taps.model.wide_places import WideEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn


def find_experts(layers: Mapping[int, nn.Module], run: Callable[[], object]) -> dict[int, WideEntry]:
    """Return where the experts of each layer are chosen. Runs the model once.

    Args:
        layers: The decoder layers by index.
        run: Runs the model once, uncompiled.

    Raises:
        CannotTapError: No layer has a router, or kernels choose the experts themselves, or in a way that is not known.
    """
    mixtures = {index: _mixture_of(layer) for index, layer in layers.items()}
    found = {index: mixture for index, mixture in mixtures.items() if mixture is not None}
    if not found:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers.values()}))
        raise CannotTapError(_refusal(f"looked in {kinds} for one mixture of experts in a layer, found none"))
    chosen, tokens = _choices(layers, found, run)
    for index, mixture in found.items():
        if mixture.router.eplb_state is not None:
            raise CannotTapError(_refusal("vLLM moves experts between ranks (enable_eplb), which renumbers them"))
        if index not in chosen:
            method = type(mixture.routed_experts.quant_method).__name__
            raise CannotTapError(
                _refusal(
                    f"in layer {index}, a kernel of {method} chooses the experts itself, and no router returns them. "
                    "vLLM's argument moe_backend chooses another kernel"
                )
            )
        if chosen[index] != tokens[index]:
            raise CannotTapError(
                _refusal(
                    f"the router of layer {index} chooses for {chosen[index]} tokens where this rank has "
                    f"{tokens[index]}: replicas exchange their tokens before it (data_parallel_size)"
                )
            )
    return {
        index: WideEntry(mixture, None, mixture.router.global_num_experts, partial(_tap, mixture))
        for index, mixture in found.items()
    }


def _refusal(reason: str) -> str:
    return f"routing_weights cannot be captured: {reason}. Leave the site out of --capture-sites."


def _mixture_of(layer: nn.Module) -> Any:
    """Return the only mixture of experts of a layer, if it has one."""
    found = [module for module in layer.modules() if isinstance(module, MoERunner)]
    return found[0] if len(found) == 1 else None


def _choices(
    layers: Mapping[int, nn.Module], mixtures: Mapping[int, Any], run: Callable[[], object]
) -> tuple[dict[int, int], dict[int, int]]:
    """Run a model, and return for how many tokens the router of each layer chose, and how many its layer returned.

    A router that is not asked has no number, and one that is asked twice has chosen for the tokens of both.
    """
    counts: dict[int, int] = {}
    returned: dict[int, int] = {}

    def note_rows(index: int, layer: nn.Module, args: object, output: Any) -> None:
        del layer, args
        returned[index] = (output if isinstance(output, Tensor) else output[0]).shape[-2]

    def noting(index: int, weights: Tensor, experts: Tensor) -> None:
        del experts
        counts[index] = counts.get(index, 0) + len(weights)

    for index, mixture in mixtures.items():
        _listen(mixture.router, partial(noting, index))
    try:
        run_hooked(run, [layers[index].register_forward_hook(partial(note_rows, index)) for index in mixtures])
    finally:
        for mixture in mixtures.values():
            del mixture.router.select_experts
    return counts, returned


def _listen(router: Any, see: Callable[[Tensor, Tensor], None]) -> None:
    """Show the weights and the numbers of the experts that a router chooses, each [tokens, chosen]."""
    select = router.select_experts

    def selecting(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights, experts = select(*args, **kwargs)
        see(weights, experts)
        return weights, experts

    router.select_experts = selecting


def _tap(mixture: Any, point: int) -> None:
    """Tap the experts that a mixture of experts chooses, with the weights of its sum."""
    width, scale = mixture.router.global_num_experts, mixture.routed_scaling_factor

    def see(weights: Tensor, experts: Tensor) -> None:
        op.call_experts(weights, experts, width, scale, point)

    _listen(mixture.router, see)
