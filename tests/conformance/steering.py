"""Steering in two forms: as the client requests it, and as the reference computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

import residuum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.conformance.reference import Change, Changes
    from residuum.values.selections.layers_and_positions import PositionsLike


class Steering(NamedTuple):
    """The same steering in both forms."""

    steer: list[residuum.Add]
    """For the client."""
    changes: Changes
    """For the reference."""


def adding(
    vector: residuum.Vector, *, layer: int = 1, scale: float, positions: PositionsLike = None, start: int = 0
) -> Steering:
    """Return the addition of a vector after a layer.

    Args:
        vector: The vector.
        layer: The layer.
        scale: The factor.
        positions: The positions, for the client.
        start: The first position, for the reference.
    """
    return Steering(
        [residuum.Add(vector, layer=layer, scale=scale, positions=positions)],
        {layer: from_position(start, add(tensor(vector), scale))},
    )


def tensor(vector: residuum.Vector) -> torch.Tensor:
    """Return a vector's values."""
    return torch.from_numpy(vector.values.copy())


def add(v: torch.Tensor, scale: float) -> Change:
    """x + scale·v."""
    return lambda x: x + scale * v


def ablate(v: torch.Tensor) -> Change:
    """Remove the direction of v."""
    unit = v / v.norm()
    return lambda x: x - (x @ unit)[:, None] * unit


def cap(v: torch.Tensor, low: float, high: float) -> Change:
    """Clamp the projection onto v."""
    unit = v / v.norm()
    return lambda x: x + ((x @ unit).clamp(low, high) - x @ unit)[:, None] * unit


def replace(v: torch.Tensor, value: float) -> Change:
    """Set the projection onto v."""
    unit = v / v.norm()
    return lambda x: x + (value - x @ unit)[:, None] * unit


def keeping_norm(change: Change) -> Change:
    """Rescale rows to the norm that they had before a change."""

    def kept(x: torch.Tensor) -> torch.Tensor:
        moved = change(x)
        return moved * (x.norm(dim=-1) / moved.norm(dim=-1))[:, None]

    return kept


def in_turn(changes: Sequence[tuple[int, Change | None]]) -> Change:
    """Apply a change to rows from its position on, up to the next change's position. None changes nothing."""

    def changed(x: torch.Tensor) -> torch.Tensor:
        starts = [start for start, _ in changes]
        parts = [x[: starts[0]]]
        for (start, change), stop in zip(changes, [*starts[1:], len(x)], strict=True):
            parts.append(change(x[start:stop]) if change else x[start:stop])
        return torch.cat(parts)

    return changed


def from_position(start: int, change: Change) -> Callable[[torch.Tensor], torch.Tensor]:
    """Change only the rows from a position on."""
    return lambda x: torch.cat([x[:start], change(x[start:])])
