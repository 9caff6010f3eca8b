"""The structure of a model, found by running it once.

Names of modules differ from model to model, so code that relies on names breaks with the next model. The flow of
tensors is the same in all models: the next layer, and the norm before it, take what a layer returns. So the model runs
a few tokens before it is compiled, and each call of a module is recorded with the tensors that go in and come out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from inference_svc.taps.model.hooked_runs import (
    CannotTapError,
    fixed_attention,
    is_pair,
    is_sequence,
    name_of,
    numbers,
    run_hooked,
    written_by,
)
from inference_svc.taps.model.residual import adds_residual

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


class Argument(NamedTuple):
    """An argument of a call: the index of a positional argument, or a keyword."""

    key: int | str

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the value of the argument in a call."""
        return args[self.key] if isinstance(self.key, int) else kwargs.get(self.key)


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


def observe(
    model: nn.Module,
    layers: Mapping[int, nn.Module],
    is_attention: Callable[[nn.Module], bool],
    run: Callable[[], object],
) -> Structure:
    """Run a model and return its structure.

    Args:
        model: The model.
        layers: Its decoder layers by index.
        is_attention: Returns whether a module combines the tokens of a sequence: attention, or a state space.
        run: Runs the model once, uncompiled.

    Raises:
        CannotTapError: A layer does not return one row for each token, or the experiment of `residual` has no clear
            result.
    """
    calls: list[_Call] = []
    with fixed_attention(model, is_attention):
        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(_enter(calls), with_kwargs=True))
            handles.append(module.register_forward_hook(_leave(calls)))
        run_hooked(run, handles)
        by_layer = {index: call for index, layer in layers.items() for call in calls if call.module is layer}
        _check_shapes(model, by_layer.values())
        structure = Structure(adds_residual=_adds_residual(model, layers, by_layer, run))
    for index, call in by_layer.items():
        _find_next(structure, calls, index, call, by_layer.get(index + 1))
        _find_parts(structure, calls, index, call, is_attention)
    return structure


class _Call:
    """One call of a module. `entered` and `left` are the numbers of calls that had started by then."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], entered: int) -> None:
        self.module = module
        self.args = args
        self.kwargs = kwargs
        self.entered = entered
        self.left = 0
        self.output: tuple[Tensor, ...] = ()
        self.written: Argument | None = None
        """The argument that holds the output, if the call returned nothing."""

    def tensors(self) -> Iterator[tuple[Argument, Tensor]]:
        keys: list[int | str] = [*range(len(self.args)), *self.kwargs]
        for argument in map(Argument, keys):
            value = argument.of(self.args, self.kwargs)
            if isinstance(value, Tensor):
                yield argument, value

    def argument(self, tensor: Tensor) -> Argument | None:
        return next((argument for argument, value in self.tensors() if value is tensor), None)


def _enter(calls: list[_Call]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_Call(module, args, kwargs, len(calls)))

    return hook


def _leave(calls: list[_Call]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del args
        call = next(call for call in reversed(calls) if call.module is module and not call.left)
        call.left = len(calls)
        values = [output] if isinstance(output, Tensor) else output
        call.output = tuple(value for value in values if isinstance(value, Tensor)) if is_sequence(values) else ()
        if output is None and (written := written_by(module, call.args, call.kwargs)) is not None:
            call.output, call.written = (written,), call.argument(written)

    return hook


def _check_shapes(model: nn.Module, calls: Iterable[_Call]) -> None:
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
    model: nn.Module, layers: Mapping[int, nn.Module], calls: Mapping[int, _Call], run: Callable[[], object]
) -> bool:
    pairs = {index: layers[index] for index, call in calls.items() if len(call.output) == 2}  # noqa: PLR2004 - a pair
    if any(calls[index].output[0].shape != calls[index].output[1].shape for index in pairs):
        return False  # tensors of different shapes cannot be added
    return adds_residual(model, pairs, run) if pairs else True


def _find_next(structure: Structure, calls: list[_Call], index: int, call: _Call, following: _Call | None) -> None:
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
    structure: Structure, calls: list[_Call], index: int, call: _Call, is_attention: Callable[[nn.Module], bool]
) -> None:
    """Find the two parts of a layer that add to the residual stream: attention, and the last part besides it."""
    children = list(call.module.children())
    inside = [other for other in calls[call.entered : call.left] if any(other.module is child for child in children)]
    parts = [part for part in inside if part.output and not is_norm(part.module) and _has_parameters(part.module)]
    attention = next((part for part in parts if any(is_attention(module) for module in part.module.modules())), None)
    others = [part for part in parts if attention is not None and part.module is not attention.module]
    if attention is not None and others:
        structure.attention[index] = _after_norm(inside, attention)
        structure.mlp[index] = _after_norm(inside, others[-1])
        structure.written |= {part.module: part.written for part in (attention, others[-1]) if part.written}


def _after_norm(inside: list[_Call], part: _Call) -> nn.Module:
    """Return the norm that takes only a part's output, if there is one; otherwise the part.

    With such a norm, the layer adds the norm's output to the residual stream, not the part's.
    """
    for other in inside:
        given = [value for _, value in other.tensors()]
        if other.entered >= part.left and is_norm(other.module) and len(given) == 1 and given[0] is part.output[0]:
            return other.module
    return part.module


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm."""
    return type(module).__name__.lower().endswith("norm")


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def sum_error(
    model: nn.Module,
    layers: Mapping[int, nn.Module],
    is_attention: Callable[[nn.Module], bool],
    structure: Structure,
    run: Callable[[], object],
) -> dict[int, float]:
    """Return for each layer the relative error of attention + MLP against the layer's change. Runs the model again.

    A model may scale the outputs of its parts before it adds them, or change them in other ways. Then the found modules
    are not the sites attn_out and mlp_out. The outputs of both parts are replaced by fixed numbers for this: without
    requests attention computes nothing, and an MLP may add almost nothing. So are other modules that combine tokens,
    such as a state space beside the attention, and biases that the parts leave to their layer.

    Args:
        model: The model.
        layers: The decoder layers by index, whose attention and MLP were found.
        is_attention: Returns whether a module combines the tokens of a sequence.
        structure: The structure that was found.
        run: Runs the model once, uncompiled.

    Returns:
        For each layer |before + attention + mlp - after| / (|attention + mlp| + |after| / 10), for the row with the
        largest error. The term |after| / 10 allows for rounding: next to a long stream, the parts are small.
    """
    assert structure.inputs is not None  # noqa: S101 - `check_parts` checked it
    seen: dict[int, list[Tensor]] = {index: [] for index in layers}
    handles = []
    for index, layer in layers.items():
        note = seen[index].append
        handles.append(layer.register_forward_pre_hook(_note_input(note, *structure.inputs), with_kwargs=True))
        for part, values in ((structure.attention[index], numbers), (structure.mlp[index], _reversed_numbers)):
            written = structure.written.get(part)
            handles.append(part.register_forward_hook(_give(values, written), with_kwargs=True))
            handles.append(part.register_forward_hook(_note_output(note, written=written), with_kwargs=True))
        whole = _note_output(note, whole=structure.adds_residual)
        handles.append(layer.register_forward_hook(whole, with_kwargs=True))
    with fixed_attention(model, is_attention):
        run_hooked(run, handles)
    return {index: _sum_error(*values) for index, values in seen.items()}


def _sum_error(before: Tensor, one: Tensor, other: Tensor, after: Tensor) -> float:
    error, parts = before + one + other - after, one + other
    return float((error.norm(dim=-1) / (parts.norm(dim=-1) + after.norm(dim=-1) / 10)).max())


def _note_input(note: Callable[[Tensor], None], hidden: Argument, residual: Argument | None) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        rest = residual.of(args, kwargs) if residual else None
        note(hidden.of(args, kwargs).float() + (0.0 if rest is None else rest.float()))

    return hook


def _note_output(note: Callable[[Tensor], None], *, whole: bool = False, written: Argument | None = None) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        del module
        output = written.of(args, kwargs) if written else output
        first = output if isinstance(output, Tensor) else output[0]
        note(first.float() + (output[1].float() if whole and is_pair(output) else 0.0))

    return hook


def _give(values: Callable[[Tensor], Tensor], written: Argument | None) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        del module
        if written:
            given = written.of(args, kwargs)
            given.copy_(values(given))
            return None
        return values(output) if isinstance(output, Tensor) else (values(output[0]), *map(_if_bias, output[1:]))

    return hook


def _if_bias(value: Any) -> Any:
    """Return numbers in place of a bias. One that is small could pass for rounding."""
    return numbers(value) if isinstance(value, Tensor) and value.dim() == 1 else value


def _reversed_numbers(like: Tensor) -> Tensor:
    return numbers(like).flip(-1)
