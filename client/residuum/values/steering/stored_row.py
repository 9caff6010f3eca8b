"""A row of a capture, as the value of a steering operation."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any

from residuum.exceptions import InvalidRequest
from residuum.values.selections.points import site_numbers
from residuum.values.tensors.vector import Vector

if TYPE_CHECKING:
    from residuum.values.captures.activations import Activations


@dataclass(frozen=True)
class StoredRow:
    """A row of a capture, as the value of a steering operation. The client reads the row when it sends the request.

    Operations take it in place of a `Vector`. `Set` puts the row into another request (activation patching). A row of
    "z" or another site beside the residual stream is only for operations at that site.

    Attributes:
        capture: The capture: a request ID, or an object that has one, such as a reply.
        layer: The layer of the row.
        position: Its position. A number below 0 counts from the prompt's end, as in `Capture(positions=...)`.
        site: Its site.
        sequence: Its sequence.

    Raises:
        InvalidRequest: A field is invalid; UnknownSite if the site does not exist.
        TypeError: The capture has no ID, or a number is not an integer.

    Example:
        >>> row = residuum.StoredRow("clean", layer=12, position=4)
        >>> client.generate(corrupted, steer=residuum.Set(row, layer=12, positions=[4]))
    """

    capture: Any
    _: KW_ONLY
    layer: int
    position: int = -1
    site: str = "resid_post"
    sequence: int = 0

    def __post_init__(self) -> None:
        name = self.capture
        if not isinstance(name, str):
            name = getattr(name, "request_id", None) or getattr(name, "capture_id", None)
        if not isinstance(name, str):
            raise TypeError(f"StoredRow takes a request ID, or an object that has one, not {self.capture!r}.")
        object.__setattr__(self, "capture", name)
        for field in ("layer", "position", "sequence"):
            value = getattr(self, field)
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"StoredRow: {field} must be an integer, not {value!r}.")
            object.__setattr__(self, field, operator.index(value))
        for field in ("layer", "sequence"):
            if getattr(self, field) < 0:
                raise InvalidRequest(f"StoredRow: {field} must not be negative.", reason="INVALID_FIELD")
        site_numbers([self.site])

    def found_in(self, acts: Activations, model: str) -> Vector:
        """Return the row as a vector.

        Args:
            acts: What the capture has of this row, read with its site, sequence and position, and its layer among
                others.
            model: The name of the model that the row is for.

        Raises:
            InvalidRequest: The capture is of another model, does not have the row or is reduced, or its rows are not of
                the full width.
        """
        if acts.manifest.model != model:
            raise InvalidRequest(
                f"{self} is of the model {acts.manifest.model!r}, and the server has {model!r}: rows of another model "
                "mean something else. If you want this one, read it as a vector: "
                f"client.activations({self.capture!r}).vector({self.layer}, {self.position}, site={self.site!r}).",
                reason="INVALID_FIELD",
            )
        has_layer = self.layer in acts and acts.present[acts.layers.index(self.layer)].any()
        if acts.manifest.state == "open" and not has_layer:
            raise InvalidRequest(
                f"{self} is not stored yet: the capture is open. Wait until it has ended, for example with "
                f"client.manifest({self.capture!r}, wait=True).",
                reason="INVALID_FIELD",
            )
        position = int(acts.positions[0]) if len(acts.positions) else self.position
        return acts.vector(self.layer, position)

    def __str__(self) -> str:
        sequence = f" of sequence {self.sequence}" if self.sequence else ""
        return f"The row at {self.site}.{self.layer}, position {self.position}{sequence} of {self.capture}"


def read_together(rows: Iterable[StoredRow]) -> list[list[StoredRow]]:
    """Return rows in groups that differ only in their layers: one read of a capture has those of a group."""
    groups: dict[StoredRow, list[StoredRow]] = {}
    for row in dict.fromkeys(rows):
        groups.setdefault(replace(row, layer=0), []).append(row)
    return list(groups.values())
