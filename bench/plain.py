"""Dataclasses out of plain data, as `dataclasses.asdict` and JSON leave them."""

from __future__ import annotations

import dataclasses
import types
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


def restore(kind: type[_T], data: Any) -> _T:
    """Return the dataclass whose fields this data has; enumerations, tuples and dataclasses within it, too."""
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in data.items()})


def _value(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if value is None or origin in {Union, types.UnionType}:
        return value  # an optional number or word
    if origin is tuple:
        return tuple(_value(arguments[0], item) for item in value)
    if dataclasses.is_dataclass(kind):
        return restore(kind, value)  # type: ignore[arg-type]
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum) else value
