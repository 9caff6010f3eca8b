"""Restores dataclasses from plain data that `dataclasses.asdict` and JSON made."""

from __future__ import annotations

import dataclasses
import types
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


def restore(kind: type[_T], data: Any) -> _T:
    """Return the dataclass with the fields in this data, including nested enumerations, tuples and dataclasses."""
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in data.items()})


def _value(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if value is None or origin in {Union, types.UnionType}:
        return value  # an optional number or string
    if origin is tuple:
        return tuple(_value(arguments[0], item) for item in value)
    if dataclasses.is_dataclass(kind):
        return restore(kind, value)  # type: ignore[arg-type]
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum) else value
