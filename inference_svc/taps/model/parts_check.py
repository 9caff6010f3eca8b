"""Experiments that check the sites inside the layers: the model runs with fixed numbers in place of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inference_svc.taps.model.hooked_runs import (
    TINY,
    fixed_attention,
    is_pair,
    numbers,
    relative_error,
    run_hooked,
)
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from inference_svc.taps.model.calls import Argument
    from inference_svc.taps.model.structure import Structure
    from inference_svc.taps.model.wide_places import WideEntry

_CHANGED = 1e-3
"""A larger relative difference between two runs of a few tokens is a change, not noise."""


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


def middle_error(
    model: nn.Module,
    layers: Mapping[int, nn.Module],
    is_attention: Callable[[nn.Module], bool],
    structure: Structure,
    run: Callable[[], object],
    *,
    changed: bool = False,
) -> dict[int, float]:
    """Return how far the stream between attention and MLP is from where it must be. Runs the model again.

    The attention's output is replaced by fixed numbers, and the MLP's by zeros. Then the stream between them is the
    stream after the layer, and not the stream before it.

    Args:
        model: The model.
        layers: The decoder layers by index, whose attention, MLP and middle were found.
        is_attention: Returns whether a module combines the tokens of a sequence.
        structure: The structure that was found.
        run: Runs the model once, uncompiled.
        changed: Change the stream between them, as steering does. Then the stream after the layer must have the change.

    Returns:
        For each layer |middle - after| / (|after - before| + |after| / 10), for the row with the largest error. The
        term |after| / 10 allows for rounding, as in `sum_error`: each layer makes the stream longer.
    """
    assert structure.inputs is not None  # noqa: S101 - `check_middles` checked it
    seen: dict[int, list[Tensor]] = {index: [] for index in layers}
    handles = []
    for index, layer in layers.items():
        note = seen[index].append
        handles.append(layer.register_forward_pre_hook(_note_input(note, *structure.inputs), with_kwargs=True))
        for part, values in ((structure.attention[index], numbers), (structure.mlp[index], torch.zeros_like)):
            written = structure.written.get(part)
            handles.append(part.register_forward_hook(_give(values, written), with_kwargs=True))
        module, hidden, residual = structure.middles[index]
        if changed:
            handles.append(module.register_forward_pre_hook(_change_input(hidden), with_kwargs=True))
        handles.append(module.register_forward_pre_hook(_note_input(note, hidden, residual), with_kwargs=True))
        whole = _note_output(note, whole=structure.adds_residual)
        handles.append(layer.register_forward_hook(whole, with_kwargs=True))
    with fixed_attention(model, is_attention):
        run_hooked(run, handles)
    return {index: _middle_error(*values) for index, values in seen.items()}


def other_projections(
    model: nn.Module,
    is_attention: Callable[[nn.Module], bool],
    structure: Structure,
    run: Callable[[], object],
) -> list[int]:
    """Return the layers in which what was found is not the projection of queries and keys. Runs the model again.

    The columns of the queries are replaced by fixed numbers, and then those of the keys. In the first run only the
    queries that the attention takes may change, and in the second only the keys.

    Args:
        model: The model.
        is_attention: Returns whether a module combines the tokens of a sequence.
        structure: The structure that was found.
        run: Runs the model once, uncompiled.
    """
    projected = structure.wide[capture_pb2.SITE_Q_PRE], structure.wide[capture_pb2.SITE_K_PRE]
    taken = [structure.wide[site] for site in (capture_pb2.SITE_Q, capture_pb2.SITE_K, capture_pb2.SITE_V)]

    def heads(replaced: Mapping[int, WideEntry]) -> dict[int, list[Tensor]]:
        seen: dict[int, list[Tensor]] = {index: [] for index in projected[0]}
        handles = [entry.module.register_forward_hook(_give_columns(entry)) for entry in replaced.values()]
        for index, rows in seen.items():
            for entries in taken:
                module, argument = entries[index].module, entries[index].hidden
                assert argument is not None  # noqa: S101 - the attention takes its heads
                hook = _note_input(rows.append, argument, None)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        with fixed_attention(model, is_attention):
            run_hooked(run, handles)
        return seen

    plain, *changed = heads({}), heads(projected[0]), heads(projected[1])
    wrong = set()
    for which, after in enumerate(changed):
        for index, rows in after.items():
            moved = [relative_error(other, own) > _CHANGED for other, own in zip(rows, plain[index], strict=True)]
            if moved != [which == head for head in range(len(taken))]:
                wrong.add(index)
    return sorted(wrong)


def _give_columns(entry: WideEntry) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del module, args
        first = output if isinstance(output, Tensor) else output[0]
        assert entry.first is not None  # noqa: S101 - the rows are columns of the output
        columns = first[:, entry.first : entry.first + entry.width]
        columns.copy_(numbers(columns))

    return hook


def _middle_error(before: Tensor, middle: Tensor, after: Tensor) -> float:
    allowed = (after - before).norm(dim=-1) + after.norm(dim=-1) / 10
    return float(((middle - after).norm(dim=-1) / allowed.clamp_min(TINY)).max())


def _sum_error(before: Tensor, one: Tensor, other: Tensor, after: Tensor) -> float:
    error, parts = before + one + other - after, one + other
    return float((error.norm(dim=-1) / (parts.norm(dim=-1) + after.norm(dim=-1) / 10)).max())


def _note_input(note: Callable[[Tensor], None], hidden: Argument, residual: Argument | None) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        rest = residual.of(args, kwargs) if residual else None
        note(hidden.of(args, kwargs).float() + (0.0 if rest is None else rest.float()))

    return hook


def _change_input(hidden: Argument) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        tensor = hidden.of(args, kwargs)
        tensor += _reversed_numbers(tensor)

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
        if isinstance(output, Tensor):
            return values(output)
        return (values(output[0]), *(values(value) if _is_bias(value) else value for value in output[1:]))

    return hook


def _is_bias(value: Any) -> bool:
    """Return whether a value is a bias that a part leaves to its layer. A small one could pass for rounding."""
    return isinstance(value, Tensor) and value.dim() == 1


def _reversed_numbers(like: Tensor) -> Tensor:
    return numbers(like).flip(-1)
