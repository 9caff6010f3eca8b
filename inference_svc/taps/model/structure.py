"""The structure of a model, found by running it once.

Names of modules differ from model to model, so code that relies on names breaks with the next model. The flow of
tensors is the same in all models: the next layer, and the norm before it, take what a layer returns. So the model runs
a few tokens before it is compiled, and each call of a module is recorded with the tensors that go in and come out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor

from inference_svc.taps.model.calls import Argument, Call, has_parameters, is_norm, recorded_calls
from inference_svc.taps.model.hooked_runs import CannotTapError, calling, fixed_attention, is_sequence, name_of
from inference_svc.taps.model.residual import adds_residual
from inference_svc.taps.model.wide_places import (
    HEADS,
    PROJECTED,
    WideEntry,
    before_projection,
    find_heads,
    find_projected,
    find_router,
)
from inference_svc.taps.points import WIDE_SITES
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

    from inference_svc.taps.points import Site


class Entry(NamedTuple):
    """A place just before a call of a module: one of its arguments, or the sum of two."""

    module: nn.Module
    hidden: Argument
    residual: Argument | None = None


@dataclass
class Structure:
    """The structure of a pipeline stage's layers. Dictionaries are by layer index, and lack modules not found."""

    adds_residual: bool = True
    """Whether the residual stream is the sum of the two tensors that a layer returns. If not, it is the first one, and
    nothing reads the second. Without meaning for layers that return one tensor."""
    norms: dict[int, nn.Module] = field(default_factory=dict)
    """The first module after the layer that takes both its tensors, if nothing takes one of them before. The next layer
    itself does not count."""
    inputs: tuple[Argument, Argument | None] | None = None
    """The arguments of a layer's call that carry hidden and residual; no residual if layers pass on one tensor."""
    attention: dict[int, nn.Module] = field(default_factory=dict)
    """The module whose output the layer's attention adds to the residual stream."""
    mlp: dict[int, nn.Module] = field(default_factory=dict)
    """The module whose output the layer's MLP adds to the residual stream."""
    written: dict[nn.Module, Argument] = field(default_factory=dict)
    """For each of these modules that returns nothing: the argument into which it writes its output."""
    attention_inputs: dict[int, Entry] = field(default_factory=dict)
    """What the layer's attention takes."""
    mlp_inputs: dict[int, Entry] = field(default_factory=dict)
    """What the layer's MLP takes."""
    middles: dict[int, Entry] = field(default_factory=dict)
    """The residual stream between the layer's attention and its MLP."""
    middle_moves: bool = True
    """Whether the stream after each layer follows a change that is made between its attention and its MLP."""
    wide: dict[Site.ValueType, dict[int, WideEntry]] = field(default_factory=lambda: {site: {} for site in WIDE_SITES})
    """The places whose rows have a width of their own, by site and layer."""
    final_norm: nn.Module | None = None
    """The norm after the last layer whose rows the model returns. Other stages than the last one have none."""


def observe(
    model: nn.Module,
    layers: Mapping[int, nn.Module],
    is_attention: Callable[[nn.Module], bool],
    run: Callable[[], object],
    num_experts: int = 0,
) -> Structure:
    """Run a model and return its structure.

    Args:
        model: The model.
        layers: Its decoder layers by index.
        is_attention: Returns whether a module combines the tokens of a sequence: attention, or a state space.
        run: Runs the model once, uncompiled.
        num_experts: How many experts a router chooses among; 0 if the model has none.

    Raises:
        CannotTapError: A layer does not return one row for each token, or the experiment of `residual` has no clear
            result.
    """
    with fixed_attention(model, is_attention):
        calls, returned = _run(model, run)
        by_layer = {index: call for index, layer in layers.items() for call in calls if call.module is layer}
        _check_shapes(model, by_layer.values())
        structure = Structure(adds_residual=_adds_residual(model, layers, by_layer, run))
    for index, call in by_layer.items():
        _find_next(structure, calls, index, call, by_layer.get(index + 1))
        attention = _find_parts(structure, calls, index, call, is_attention)
        router = find_router(calls, call, attention, num_experts) if num_experts else None
        if router is not None:
            structure.wide[capture_pb2.SITE_ROUTER_LOGITS][index] = router
    structure.final_norm = _final_norm(calls, by_layer[max(layers)], returned)
    _drop_shared(structure, calls)
    return structure


def _run(model: nn.Module, run: Callable[[], object]) -> tuple[list[Call], list[Tensor]]:
    """Run a model; return the calls of its modules, and the tensors that it returned itself."""
    forward, returned = model.forward, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        first = output[0] if is_sequence(output) else output
        if isinstance(first, Tensor):
            returned.append(first)
        return output

    with calling(model, noting):
        calls = recorded_calls(model, run)
    return calls, returned


def _final_norm(calls: list[Call], last: Call, returned: list[Tensor]) -> nn.Module | None:
    """Return the norm after the last layer whose rows the model returns, if there is one."""
    found = [
        call
        for call in calls[last.left :]
        if is_norm(call.module) and call.output and any(_are_same(call.output[0], tensor) for tensor in returned)
    ]
    return found[0].module if len(found) == 1 else None


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same rows; one may be a view, [1, tokens, hidden]."""
    return (one.data_ptr(), one.numel(), one.dtype) == (other.data_ptr(), other.numel(), other.dtype)


def _check_shapes(model: nn.Module, calls: Iterable[Call]) -> None:
    for call in calls:
        if len(call.output) > 2:  # noqa: PLR2004 - hidden and residual
            raise CannotTapError(
                f"{type(model).__name__} cannot be tapped: looked for layers that return the residual stream, or two "
                f"tensors that add up to it; {name_of(model, call.module)} returns {len(call.output)}. residuum does "
                "not support this model; please report it."
            )
        shapes = [tuple(tensor.shape) for tensor in call.output[:1]]
        if not shapes or not (len(shapes[0]) == 2 or (len(shapes[0]) == 3 and shapes[0][0] == 1)):  # noqa: PLR2004
            raise CannotTapError(
                f"{type(model).__name__} cannot be tapped: looked for a row of the residual stream for each token, "
                f"[tokens, hidden] or [1, tokens, hidden]; {name_of(model, call.module)} returns "
                f"{shapes[0] if shapes else 'no tensor'}. residuum does not support this model; please report it."
            )


def _adds_residual(
    model: nn.Module, layers: Mapping[int, nn.Module], calls: Mapping[int, Call], run: Callable[[], object]
) -> bool:
    pairs = {index: layers[index] for index, call in calls.items() if len(call.output) == 2}  # noqa: PLR2004 - a pair
    if any(calls[index].output[0].shape != calls[index].output[1].shape for index in pairs):
        return False  # tensors of different shapes cannot be added
    return adds_residual(model, pairs, run) if pairs else True


def _find_next(structure: Structure, calls: list[Call], index: int, call: Call, following: Call | None) -> None:
    """Find the arguments in which the next layer takes this layer's tensors, and the norm that takes them first."""
    if following is not None and call.output:
        hidden = following.argument(call.output[0])
        residual = following.argument(call.output[1]) if len(call.output) > 1 and structure.adds_residual else None
        if hidden is not None:
            structure.inputs = (hidden, residual)
    if len(call.output) != 2 or not structure.adds_residual:  # noqa: PLR2004 - hidden and residual
        return
    users = (
        later
        for later in calls[call.left :]
        if later is not following and any(later.argument(tensor) for tensor in call.output)
    )
    first = next(users, None)
    calls_of_first = [other for other in calls if first is not None and other.module is first.module]
    if first and not first.kwargs and len(first.args) == 2 and len(calls_of_first) == 1:  # noqa: PLR2004 - see above
        takes_both = all(given is tensor for given, tensor in zip(first.args, call.output, strict=True))
        if takes_both:
            structure.norms[index] = first.module


def _find_parts(
    structure: Structure, calls: list[Call], index: int, call: Call, is_attention: Callable[[nn.Module], bool]
) -> Call | None:
    """Find the two parts of a layer that add to the residual stream: attention, and the last part besides it.

    Returns:
        The call of the attention; None if the layer has none.
    """
    children = list(call.module.children())
    inside = [other for other in calls[call.entered : call.left] if any(other.module is child for child in children)]
    parts = [part for part in inside if part.output and not is_norm(part.module) and has_parameters(part.module)]
    combine = [part for part in parts if any(is_attention(module) for module in part.module.modules())]
    attention = next(iter(combine), None)
    others = [part for part in parts if attention is not None and part.module is not attention.module]
    if attention is None or not others:
        return attention
    structure.attention[index] = _after_norm(inside, attention)
    structure.mlp[index] = _after_norm(inside, others[-1])
    structure.written |= {part.module: part.written for part in (attention, others[-1]) if part.written}
    # An MLP without a module of its own begins with its first module after the attention.
    rest = [part for part in others if part not in combine] or others
    first = next((part for part in rest if part.entered >= attention.left), rest[0])
    _find_inputs(structure, inside, index, attention, first, call.output[0])
    # After the MLP, a layer may have a third part, such as Gemma 4's gate for its own embeddings.
    mlp = first if _calls_within(calls, first) else others[-1]
    for site, part in ((capture_pb2.SITE_Z, attention), (capture_pb2.SITE_MLP_ACT, mlp)):
        if (projected := before_projection(calls, part)) is not None:
            structure.wide[site][index] = projected
    heads = find_heads(calls, attention, is_attention)
    if heads is not None:
        for site, (argument, rows) in zip(HEADS, heads.rows, strict=True):
            structure.wide[site][index] = WideEntry(heads.call.module, argument, rows.shape[1])
        for site, projected in zip(PROJECTED, find_projected(calls, attention, heads), strict=False):
            structure.wide[site][index] = projected
    return attention


def _find_inputs(
    structure: Structure, inside: list[Call], index: int, attention: Call, mlp: Call, stream: Tensor
) -> None:
    """Find what both parts of a layer take, and the stream between them. `stream` has its shape."""
    if (taken := _only_like(stream, attention)) is not None:
        structure.attention_inputs[index] = Entry(attention.module, taken[0])
    if (taken := _only_like(stream, mlp)) is None:
        return
    argument, value = taken
    structure.mlp_inputs[index] = Entry(mlp.module, argument)
    # The norm before it, if there is one. Norms may write in place, so an earlier call may have the same tensor.
    norms = (other for other in reversed(inside) if is_norm(other.module) and other.left <= mlp.entered)
    norm = next((other for other in norms if other.output and other.output[0] is value), None)
    before = norm or mlp
    if before.entered < attention.left:
        return  # the MLP takes what the attention takes
    given = [argument for argument, tensor in before.tensors() if tensor.shape == stream.shape]
    if norm is None:
        given = [argument]
    if 1 <= len(given) <= 2:  # noqa: PLR2004 - hidden and residual
        structure.middles[index] = Entry(before.module, *given)


def _calls_within(calls: list[Call], part: Call) -> bool:
    """Return whether a part calls modules with parameters, so that it is more than one projection."""
    return any(has_parameters(other.module) for other in calls[part.entered + 1 : part.left])


def _drop_shared(structure: Structure, calls: list[Call]) -> None:
    """Forget the entries of modules that are called more than once: their taps could not tell the calls apart."""
    times = Counter(call.module for call in calls)
    for found in (structure.attention_inputs, structure.mlp_inputs, structure.middles, *structure.wide.values()):
        places = cast("dict[int, Entry | WideEntry]", found)
        for index in [index for index, entry in places.items() if times[entry.module] > 1]:
            del places[index]


def _only_like(stream: Tensor, call: Call) -> tuple[Argument, Tensor] | None:
    """Return the argument of a call that has a row for each token, as the stream has, if it is the only one."""
    found = [(key, value) for key, value in call.tensors() if value.shape == stream.shape and key != call.written]
    return found[0] if len(found) == 1 else None


def _after_norm(inside: list[Call], part: Call) -> nn.Module:
    """Return the norm that takes only a part's output, if there is one; otherwise the part.

    With such a norm, the layer adds the norm's output to the residual stream, not the part's.
    """
    for other in inside:
        given = [value for _, value in other.tensors()]
        if other.entered >= part.left and is_norm(other.module) and len(given) == 1 and given[0] is part.output[0]:
            return other.module
    return part.module
