"""The meaning of layer and position selections, shared by the model's process, the store and the client."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from residuum.v1 import capture_pb2, selection_pb2
from residuum.wire.limits import MAX_RANGES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


_BLOCK = 4096
"""Positions that `_last_wanted` evaluates at once."""


def resolve_layers(selection: selection_pb2.LayerSelection, num_layers: int) -> list[int]:
    """Return the layers that a selection names, ascending.

    Raises:
        IndexError: It names a layer that the model does not have; the exception's first argument is that layer.
        ValueError: It names no layer, or its list does not ascend.
    """
    kind = selection.WhichOneof("selection")
    if kind == "all" and selection.all:
        return list(range(num_layers))
    if kind != "list" or not selection.list.layers:
        raise ValueError("name at least one layer, or all")
    layers = list(selection.list.layers)
    for layer in layers:
        if layer >= num_layers:
            raise IndexError(layer)
    if any(a >= b for a, b in itertools.pairwise(layers)):
        raise ValueError("layers must be distinct and ascend")
    return layers


def layers_by_site(spec: capture_pb2.CaptureSpec) -> dict[capture_pb2.Site.ValueType, tuple[int, ...]]:
    """Return the layers that a capture has at each of its sites, in the order of the sites.

    Args:
        spec: A resolved spec, as in a capture's description: its layers are lists.
    """
    if not spec.site_layers:
        return dict.fromkeys(spec.sites, tuple(spec.layers.list.layers))
    lists = (tuple(selection.list.layers) for selection in spec.site_layers)
    return dict(zip(spec.sites, lists, strict=True))


def layers_at(spec: capture_pb2.CaptureSpec, site: int) -> Sequence[int]:
    """Return the layers that a capture has at one of its sites.

    Args:
        spec: A resolved spec; see `layers_by_site`.
        site: One of its sites.
    """
    own = spec.site_layers[list(spec.sites).index(site)] if spec.site_layers else spec.layers  # type: ignore[arg-type]
    return own.list.layers


def check_positions(selection: selection_pb2.PositionSelection) -> None:
    """Check a position selection as far as that needs no request.

    Raises:
        ValueError: The selection is invalid for every request; the message says why.
    """
    for phase in selection.phases:
        if phase not in (selection_pb2.PHASE_PROMPT, selection_pb2.PHASE_GENERATED):
            raise ValueError(f"unknown phase {int(phase)}")
    if len(selection.ranges) > MAX_RANGES:
        raise ValueError(f"at most {MAX_RANGES} ranges are allowed, not {len(selection.ranges)}")
    for item in selection.ranges:
        comparable = item.HasField("last") and (item.first < 0) == (item.last < 0)
        if comparable and item.last < item.first:
            raise ValueError(f"the range from {item.first} to {item.last} is empty. A slice does not include its end")


def wanted_positions(
    selection: selection_pb2.PositionSelection, prompt_tokens: int, first: int, count: int
) -> npt.NDArray[np.bool_]:
    """Return which of some consecutive positions a selection selects.

    Args:
        selection: The selection; an empty one selects every position.
        prompt_tokens: Tokens of the prompt. Negative positions and phases refer to it.
        first: The first position to evaluate.
        count: The number of positions to evaluate.

    Returns:
        bool [count], for the positions first, first + 1, ...
    """
    wanted = np.ones(count, dtype=np.bool_)
    if not (selection.phases or selection.ranges or selection.every > 1):
        return wanted
    positions = np.arange(first, first + count)
    if selection.phases:
        in_prompt = positions < prompt_tokens
        has_prompt = selection_pb2.PHASE_PROMPT in selection.phases
        has_generated = selection_pb2.PHASE_GENERATED in selection.phases
        wanted &= (in_prompt & has_prompt) | (~in_prompt & has_generated)
    if selection.ranges:
        in_ranges = np.zeros(count, dtype=np.bool_)
        for item in selection.ranges:
            low, high = _bounds(item, prompt_tokens)
            in_ranges |= (positions >= low) & (positions <= high)
        wanted &= in_ranges
    if selection.every > 1:
        wanted &= positions % selection.every == 0
    return wanted


def borders(selection: selection_pb2.PositionSelection, prompt_tokens: int) -> list[int] | None:
    """Return the positions at which a selection may begin or end, in any order.

    Between two borders that follow each other, and after the last one, either all positions are selected or none.

    Returns:
        The borders; None if `every` is above 1, because then each position may differ from the one before it.
    """
    if selection.every > 1:
        return None
    found = [prompt_tokens] if selection.phases else []
    for item in selection.ranges:
        low, high = _bounds(item, prompt_tokens)
        found += [int(low)] if high == np.inf else [int(low), int(high) + 1]
    return found


def selects_any(selection: selection_pb2.PositionSelection, prompt_tokens: int, first: int, count: int) -> bool:
    """Tell whether a selection selects any of some consecutive positions; see `wanted_positions` for the arguments.

    It looks only at the first position and at the borders, so it takes the same time for a prompt of any length.
    """
    if not (selection.phases or selection.ranges or selection.every > 1):
        return count > 0
    found = borders(selection, prompt_tokens)
    if found is None:
        return bool(wanted_positions(selection, prompt_tokens, first, count).any())
    places = [first, *(place for place in found if first < place < first + count)] if count > 0 else []
    bounds = [_bounds(item, prompt_tokens) for item in selection.ranges]
    inside = [(low, high) for low, high in bounds if max(low, first) <= min(high, first + count - 1)]
    if bounds and not inside:
        return False
    phases = selection.phases or (selection_pb2.PHASE_PROMPT, selection_pb2.PHASE_GENERATED)
    return any(
        (selection_pb2.PHASE_PROMPT if place < prompt_tokens else selection_pb2.PHASE_GENERATED) in phases
        and (not bounds or any(low <= place <= high for low, high in inside))
        for place in places
    )


def is_reduced(spec: capture_pb2.CaptureSpec) -> bool:
    """Tell whether a capture is reduced: whether it has one row for all positions of a phase."""
    return spec.reduction not in (capture_pb2.REDUCTION_UNSPECIFIED, capture_pb2.REDUCTION_NONE)


def captured_positions(
    spec: capture_pb2.CaptureSpec, prompt_tokens: int, first: int, count: int, length: int | None = None
) -> npt.NDArray[np.bool_]:
    """Return at which of some consecutive positions a capture has rows.

    These are the selected positions; for a reduced capture, the last selected position of each phase.

    Args:
        spec: The capture's spec.
        prompt_tokens: Tokens of the prompt.
        first: The first position to evaluate.
        count: The number of positions to evaluate.
        length: Rows of the sequence, selected or not; see `expected_rows`. None while it is unknown: any selected
            position of a generated token may then be the last one.

    Returns:
        bool [count], for the positions first, first + 1, ...
    """
    captured = wanted_positions(spec.positions, prompt_tokens, first, count)
    if length is not None:
        captured[max(length - first, 0) :] = False
    if is_reduced(spec):
        borders = (0, prompt_tokens) if length is None else (0, prompt_tokens, max(length, prompt_tokens))
        for start, end in itertools.pairwise(borders):
            last = _last_wanted(spec.positions, prompt_tokens, start, end)
            low, high = max(start - first, 0), max(end - first, 0)
            captured[low:high] &= np.arange(first + low, first + min(high, count)) == last
    return captured


def _last_wanted(selection: selection_pb2.PositionSelection, prompt_tokens: int, start: int, end: int) -> int:
    """Return the last selected position p with start <= p < end; -1 if there is none."""
    while end > start:  # search from the end, where the position usually is
        at = max(end - _BLOCK, start)
        found = np.flatnonzero(wanted_positions(selection, prompt_tokens, at, end - at))
        if len(found):
            return at + int(found[-1])
        end = at
    return -1


def _bounds(item: selection_pb2.PositionRange, prompt_tokens: int) -> tuple[float, float]:
    low = item.first if item.first >= 0 else prompt_tokens + item.first
    if not item.HasField("last"):
        return low, np.inf
    return low, item.last if item.last >= 0 else prompt_tokens + item.last


def expected_rows(prompt_tokens: int, generated_tokens: int) -> int:
    """Return how many rows a sequence has. The last generated token has none: it is never fed to the model."""
    return max(prompt_tokens + generated_tokens - 1, 0) if generated_tokens else prompt_tokens


def to_ranges(positions: npt.NDArray[np.integer]) -> list[tuple[int, int]]:
    """Return ascending positions as runs (first, last), both inclusive."""
    if not len(positions):
        return []
    breaks = np.flatnonzero(np.diff(positions) != 1)
    firsts = np.concatenate(([0], breaks + 1))
    lasts = np.concatenate((breaks, [len(positions) - 1]))
    return [(int(positions[a]), int(positions[b])) for a, b in zip(firsts, lasts, strict=True)]
