"""How much room of the program tables a request may take, told before it runs.

The tables hold a program for each row that a step can have, and `MAX_ENTRIES` of every running request. So no request
that was taken on can find them full in the middle of a step, nor can one whose steering is changed while it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residuum.v1 import selection_pb2

MAX_PROGRAMS = 256
"""Different treatments of a request's positions."""

MAX_ENTRIES = 8192
"""Operations of all of these, those of layers with the same operations counted once."""


class Demand(NamedTuple):
    """What a request takes at most."""

    programs: int
    entries: int


def demand_of(
    operations: Sequence[tuple[Sequence[int], selection_pb2.PositionSelection]],
    captured: selection_pb2.PositionSelection | None,
) -> Demand:
    """Return what a request takes at most.

    Args:
        operations: Of each steering operation its layers and its positions.
        captured: The positions that are captured; None: none.
    """
    selections = [positions for _, positions in operations] + ([captured] if captured else [])
    # One that takes every position divides none from others.
    distinct = {positions.SerializeToString(): positions for positions in selections if _divides(positions)}.values()
    # Two bounds. Each selection takes a position or not. And between the borders of all ranges, and of the prompt, it
    # does so for all positions alike, but for those that count every k-th.
    ranges = sum(len(positions.ranges) for positions in distinct)
    periods = len({positions.every for positions in distinct if positions.every > 1})
    programs = min(2 ** min(len(distinct), 32), (2 * ranges + 2) * 2 ** min(periods, 32))
    by_layer: dict[int, list[int]] = {}
    for index, (layers, _) in enumerate(operations):
        for layer in layers:
            by_layer.setdefault(layer, []).append(index)
    entries = sum(len(indices) for indices in {tuple(indices) for indices in by_layer.values()})
    return Demand(programs, programs * entries)


def _divides(positions: selection_pb2.PositionSelection) -> bool:
    return bool(positions.phases or positions.ranges or positions.every > 1)
