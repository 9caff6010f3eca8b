"""Items that users give one at a time or several at once, as in `steer=` and `probes=`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def item_list(given: Any) -> list[Any]:
    """Return one item, several, or None as a list. A mapping or a text counts as one item."""
    if given is None:
        return []
    single = isinstance(given, (Mapping, str)) or not isinstance(given, Iterable)
    return [given] if single else list(given)
