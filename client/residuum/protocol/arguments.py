"""Checks the types of a user's arguments. An error names the argument, and shows what was given. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from residuum.exceptions import InvalidRequest


def short(value: object) -> str:
    """Return a value for an error message. A long value is truncated."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - enough to recognise the value


def check_text(name: str, value: str) -> str:
    """Return a text after checking its type.

    Raises:
        TypeError: It is no text.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, not {short(value)}.")
    return value


def check_texts(name: str, value: str | Iterable[str]) -> list[str]:
    """Return a text, or several, as a list after checking their types.

    Raises:
        TypeError: It is neither a text nor a list of texts.
    """
    items = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    if not all(isinstance(item, str) for item in items):
        raise TypeError(f"{name} must be a text or a list of texts, not {short(value)}.")
    return items


def check_list(name: str, value: Iterable[Any], what: str) -> list[Any]:
    """Return a list after checking that it is one. Its items are not checked.

    Args:
        name: The argument.
        value: What the user gave.
        what: What it is a list of, for the error, such as "prompts".

    Raises:
        TypeError: It is no list, or a text.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of {what}, not {short(value)}.")
    return list(value)


def is_flag(value: object) -> bool:
    """Tell whether a value can only mean true or false: a bool, also one of numpy, or the number 0 or 1."""
    return isinstance(value, (int, np.integer, np.bool_)) and value in (0, 1)


def check_flag(name: str, value: bool) -> bool:  # noqa: FBT001 - as the user wrote it
    """Return a bool after checking that the value can only mean true or false. "no" would otherwise count as true.

    Raises:
        TypeError: It is something else.
    """
    if not is_flag(value):
        raise TypeError(f"{name} must be True or False, not {short(value)}.")
    return bool(value)


def check_whole_number(name: str, value: int) -> int:
    """Return a whole number after checking its type.

    Raises:
        TypeError: It is no whole number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be a whole number, not {short(value)}.")
    return int(value)


def check_integer(name: str, value: int, low: int, high: int) -> int:
    """Return a whole number after checking its type and its range.

    Raises:
        TypeError: It is no whole number.
        InvalidRequest: It is below `low` or above `high`.
    """
    if not low <= check_whole_number(name, value) <= high:
        raise InvalidRequest(
            f"{name} must be from {low} to {high}, not {value}.", reason="INVALID_FIELD", metadata={"field": name}
        )
    return int(value)
