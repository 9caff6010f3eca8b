"""What captures must share so that their rows can be in one array."""

from __future__ import annotations

from residuum.exceptions import InvalidRequest
from residuum.values.captures.manifest import Manifest

_FIELDS = (
    "model", "adapter", "hidden_size", "encoding", "dimensions", "seed", "axis", "projected_onto", "sae", "features",
    "reduction", "before_steering",
)  # fmt: skip
"""Manifest fields that all captures must share, so that an element means the same in all rows."""

_LONG = ("projected_onto", "sae", "features")
"""Fields whose values are too long for a message."""


class Kind:
    """What the captures of one array share, taken from the first of them."""

    def __init__(self, first: Manifest) -> None:
        self.first = first.capture_id
        """The first capture."""
        self._values = _values(first)

    def check(self, other: Manifest, what: str) -> None:
        """Check that another capture is of the same kind.

        Args:
            other: Its manifest.
            what: What the captures make together, such as "dataset".

        Raises:
            InvalidRequest: It is not; the message names the field.
        """
        for name, first, now in zip(_FIELDS, self._values, _values(other), strict=True):
            if first != now:
                values = "" if name in _LONG else f" ({_shown(first)} and {_shown(now)})"
                raise InvalidRequest(
                    f"{self.first} and {other.capture_id} differ in {name}{values}. The captures of one {what} must "
                    "share model, adapter, encoding, reduction and before_steering, so that their rows mean the same. "
                    f"Make one {what} for each kind.",
                    reason="INVALID_FIELD",
                )


def _values(manifest: Manifest) -> tuple[object, ...]:
    return tuple(getattr(manifest, name) for name in _FIELDS)


def _shown(value: object) -> object:
    return "none" if value in (None, "") else value
