"""Programs: what the taps do to one kind of row in a step, on every layer.

Rows with the same treatment share a program, whichever request they belong to. So a layout needs only two things for a
row: its program and its place in a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple
from weakref import WeakValueDictionary

from inference_svc.taps.plan import Gate, Kind
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference_svc.taps.plan import Operation, Places, RequestPlan


class Step(NamedTuple):
    """One operation of a program: an `Operation` without positions, because a layout assigns programs to rows."""

    kind: Kind
    row: int
    """The vector's row in the bank."""
    layers: tuple[int, ...]
    scale: float
    low: float
    high: float
    keep_norm: bool = False
    site: capture_pb2.Site.ValueType = capture_pb2.SITE_RESID_POST
    gate: Gate | None = None
    column: int = 0

    @classmethod
    def of(cls, operation: Operation) -> Step:
        """Return the step of an operation."""
        o = operation
        return cls(o.kind, o.row, o.layers, o.scale, o.low, o.high, o.keep_norm, o.site, o.gate, o.column)


class Program:
    """What is done to a row. Interned: equal programs are the same object, so comparing and hashing are cheap."""

    __slots__ = ("__weakref__", "_units", "before_steering", "places", "steps")

    _known: ClassVar[WeakValueDictionary[tuple[object, ...], Program]] = WeakValueDictionary()

    places: Places
    """Where the row is captured; empty if it is not captured."""
    before_steering: bool
    """Capture the row as it was before steering."""
    steps: tuple[Step, ...]
    """The operations, in the order in which they are applied."""
    _units: dict[tuple[int, int], int]
    """The unit of each captured (site, layer)."""

    @classmethod
    def make(
        cls,
        places: Places = (),
        *,
        before_steering: bool = False,
        steps: Sequence[Step] = (),
    ) -> Program:
        """Return the program with these fields."""
        key = (places, before_steering, tuple(steps))
        known = cls._known.get(key)
        if known is None:
            known = cls()
            known.places, known.before_steering, known.steps = key
            pairs = [(site, layer) for site, layers in places for layer in layers]
            known._units = {pair: unit for unit, pair in enumerate(pairs)}
            cls._known[key] = known
        return known

    @classmethod
    def for_rows(cls, plan: RequestPlan, operations: Sequence[int], *, captured: bool) -> Program | None:
        """Return the program for some rows of a plan; None if the taps do nothing to them.

        Args:
            plan: The plan.
            operations: The indices of the plan's operations that apply to these rows.
            captured: Whether the rows are captured.
        """
        capture = plan.capture if captured else None
        if capture is None and not operations:
            return None
        return cls.make(
            capture.places if capture else (),
            before_steering=bool(capture and capture.before_steering),
            steps=[Step.of(plan.operations[index]) for index in operations],
        )

    def unit(self, site: int, layer: int) -> int | None:
        """Return the unit of a captured position for a site of a layer; None if that is not captured."""
        return self._units.get((site, layer))
