"""Upper bounds on the room that a request takes in the program tables, computed before it runs.

The tables have room for one program per row of a step, and for `MAX_ENTRIES` entries per running request. So the tables
cannot overflow during a step, even if requests change their steering.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residuum.v1 import selection_pb2

MAX_PROGRAMS = 256
"""Most different programs of one request."""

MAX_ENTRIES = 8192
"""Most table entries of one request: those of all its programs. Points with the same operations share them."""


class Demand(NamedTuple):
    """An upper bound on what a request takes in the tables."""

    programs: int
    """Different programs."""
    entries: int
    """Table entries of all programs together."""


def entries_of(operations: int, *, has_gates: bool) -> int:
    """Return how many table entries the operations at a point take; see `tables.ProgramTable`."""
    return 2 * operations if has_gates else operations


def demand_of(
    operations: Sequence[tuple[Sequence[tuple[int, int]], selection_pb2.PositionSelection, bool]],
    captured: selection_pb2.PositionSelection | None,
) -> Demand:
    """Return an upper bound on what a request takes in the tables.

    Args:
        operations: For each operation, its points (see `point_name`), its positions, and whether it has a gate.
        captured: The captured positions. None: nothing is captured.
    """
    selections = [positions for _, positions, _ in operations] + ([captured] if captured else [])
    # A selection of all positions does not divide them into different programs.
    distinct = {positions.SerializeToString(): positions for positions in selections if _divides(positions)}.values()
    # The smaller of two bounds. First, each of n selections takes a position or not: 2**n programs. Second, the ends of
    # all ranges, and of the prompt, divide the positions into stretches. Within a stretch, only selections of every
    # k-th position distinguish positions: 2**(number of different k) programs per stretch.
    ranges = sum(len(positions.ranges) for positions in distinct)
    periods = len({positions.every for positions in distinct if positions.every > 1})
    programs = min(2 ** min(len(distinct), 32), (2 * ranges + 2) * 2 ** min(periods, 32))
    by_point: dict[tuple[int, int], list[int]] = {}
    for index, (places, _, _) in enumerate(operations):
        for place in places:
            by_point.setdefault(place, []).append(index)
    runs = {tuple(indices) for indices in by_point.values()}
    entries = sum(entries_of(len(run), has_gates=any(operations[index][2] for index in run)) for run in runs)
    return Demand(programs, programs * entries)


def point_name(site: int, layer: int) -> tuple[int, int]:
    """Return a name of the point that sees a site of a layer: `resid_post` of a layer is `resid_pre` of the next."""
    if site == capture_pb2.SITE_RESID_PRE:
        return capture_pb2.SITE_RESID_POST, layer - 1
    return site or capture_pb2.SITE_RESID_POST, layer


def _divides(positions: selection_pb2.PositionSelection) -> bool:
    return bool(positions.phases or positions.ranges or positions.every > 1)
