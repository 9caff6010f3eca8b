"""What is done to the rows of a request: steering operations, and scores."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from residuum.v1 import capture_pb2, selection_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping


class Kind(IntEnum):
    """The kinds of steering operations, as numbers for the device tables."""

    ADD = 0
    ABLATE = 1
    CAP = 2
    """Also used to set a projection to a value: a cap whose bounds are equal."""
    SET = 3
    MULTIPLY = 4
    SCORE = 5
    """Changes nothing: writes the inner product of the row and the vector into a column of the row's scores."""
    CLAMP = 6
    """Keeps a feature of a sparse autoencoder within bounds. Its gate has the measure FEATURE; no other one has it."""


STEERING_KINDS = tuple(kind for kind in Kind if kind not in (Kind.SCORE, Kind.CLAMP))
"""The kinds that change rows, and that may have a gate or none."""


class Measure(IntEnum):
    """What a gate measures of a row, as numbers for the device tables."""

    PROJECTION = 0
    INNER_PRODUCT = 1
    COSINE = 2
    FEATURE = 3
    """The value of a feature: x . g + bias if that is above the threshold, and otherwise 0. The gate has the bias in
    place of its sharpness, and how far it is open is this value."""


class Gate(NamedTuple):
    """How far an operation applies to a row: sigmoid(sharpness * (measure - threshold)).

    steering.proto defines it; infinite sharpness makes the gate hard.
    """

    row: int
    """The gate vector's row in the bank."""
    threshold: float
    """The measure above which the gate is open. The bias is subtracted already."""
    sharpness: float = float("inf")
    """Infinite: the gate is open or closed. Negative: it is open below the threshold. FEATURE: the bias."""
    measure: Measure = Measure.PROJECTION


@dataclass(frozen=True)
class Operation:
    """One steering operation with its vector resolved to a row of the bank."""

    kind: Kind
    row: int
    """The vector's row in the bank."""
    layers: tuple[int, ...]
    """The layers at which it is applied, ascending."""
    positions: selection_pb2.PositionSelection
    """The positions to which it is applied."""
    scale: float = 1.0
    """Factor of ADD and ABLATE."""
    low: float = float("-inf")
    """Lower bound of CAP and CLAMP."""
    high: float = float("inf")
    """Upper bound of CAP and CLAMP."""
    keep_norm: bool = False
    """Rescale the row to the norm that it had before."""
    site: capture_pb2.Site.ValueType = capture_pb2.SITE_RESID_POST
    """The site at which it is applied."""
    gate: Gate | None = None
    """How far it applies to each row; None: completely."""
    column: int = 0
    """For SCORE, the column of the row's scores."""

    def to_data(self) -> dict[str, Any]:
        """Return the operation as plain data, for `from_data`."""
        return {
            **vars(self),
            "kind": int(self.kind),
            "site": int(self.site),
            "layers": list(self.layers),
            "positions": self.positions.SerializeToString(),
            "gate": [*self.gate[:-1], int(self.gate.measure)] if self.gate else None,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Operation:
        """Return the operation that `to_data` converted."""
        gate = None
        if data["gate"]:
            row, threshold, sharpness, measure = data["gate"]
            gate = Gate(row, threshold, sharpness, Measure(measure))
        return cls(**{**with_selection(data), "kind": Kind(data["kind"]), "gate": gate})


def with_selection(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an operation or a capture, with layers and positions made from plain data."""
    return {**item, "layers": tuple(item["layers"]), "positions": _selection(item["positions"])}


@lru_cache(maxsize=256)
def _selection(data: bytes) -> selection_pb2.PositionSelection:
    """Return a selection. Operations and captures with equal ones share it, also of other requests: never change it."""
    return selection_pb2.PositionSelection.FromString(data)
