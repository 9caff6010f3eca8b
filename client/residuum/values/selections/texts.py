"""Selections of layers and positions written as text, such as "0,5,10-20" and "-4:", in Python and on the command line.

Everything here is checked before any number is expanded, so a short text cannot fill the memory.
"""

from __future__ import annotations

import re

from residuum.exceptions import InvalidRequest

_LAYER = re.compile(r"[0-9]{1,5}")
"""A layer's number. The digits are limited because a range with more would exceed the size of a message."""
_POSITION = re.compile(
    r"(?P<start>-?[0-9]{1,10})?(?:(?P<colon>:)(?P<stop>-?[0-9]{1,10})?(?::(?P<step>[0-9]{1,10})?)?)?"
)


def parse_layers(text: str) -> list[int]:
    """Return the layers of a text such as "12" or "0,5,10-20"; both ends of a range count.

    Raises:
        InvalidRequest: The text has another form.
    """
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _LAYER.fullmatch(first) or (dash and not _LAYER.fullmatch(last)):
            raise InvalidRequest(
                f"{text[:80]!r} does not name layers; use 'all', '12' or '0,5,10-20'.", reason="INVALID_FIELD"
            )
        if dash and int(last) < int(first):
            raise InvalidRequest(
                f"{part.strip()!r} counts down and names no layer; use '{last}-{first}'.", reason="INVALID_FIELD"
            )
        layers.extend(range(int(first), int(last or first) + 1))
    return layers


def parse_positions(text: str) -> int | slice | range | list[int | slice | range]:
    """Return the positions of a text: numbers and slices as in Python, separated by commas: "5", "-4:", "0,8:16".

    Raises:
        InvalidRequest: The text has another form.
    """
    items = [_position(text, part.strip()) for part in text.split(",")]
    return items[0] if len(items) == 1 else items


def _position(text: str, part: str) -> int | slice | range:
    found = _POSITION.fullmatch(part)
    if not part or found is None:
        raise InvalidRequest(
            f"positions={text[:80]!r} is unknown; use 'all', 'prompt', 'generated', 'last_prompt', or numbers and "
            "slices such as '5', '-4:', '0:16' or '0,8:16'.",
            reason="INVALID_FIELD",
        )
    start, stop, step = (None if found[name] is None else int(found[name]) for name in ("start", "stop", "step"))
    if not found["colon"]:
        assert start is not None  # noqa: S101 - the part is not empty and has no colon
        return start
    if start is not None and start < 0 and stop == 0 and step is None:
        return range(start, 0)  # up to the prompt's end; a slice cannot say this
    return slice(start, stop, step)
