"""Warnings that name the line of the user's program that called this package."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

_BETWEEN = frozenset({"asyncio", "concurrent", "contextlib", "residuum", "threading"})
"""The packages whose lines are not the user's: this one, and those that run its tasks, threads and contexts."""

Place = tuple[str, int, str, dict[Any, Any]]
"""A line, as `warnings.warn_explicit` takes it: file, number, module, and the warnings that the module has shown."""

_noted: ContextVar[Place | None] = ContextVar("residuum_caller", default=None)


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the caller's line."""
    warnings.warn_explicit(text, category, *callers_place())


def callers_place() -> Place:
    """Return the line that `note_caller` has noted, or that called this package.

    In a thread that runs only this package, it is the line of this package that was called first.
    """
    if noted := _noted.get():
        return noted
    frame: FrameType | None
    frame = own = sys._getframe(1)  # noqa: SLF001 - as in the standard library's warnings
    while frame is not None and (package := _module(frame).partition(".")[0]) in _BETWEEN:
        own = frame if package == "residuum" else own
        frame = frame.f_back
    place = frame or own
    shown = place.f_globals.setdefault("__warningregistry__", {})
    return place.f_code.co_filename, place.f_lineno, _module(place), shown


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "<string>"))


@contextlib.contextmanager
def note_caller() -> Iterator[None]:
    """Note the caller's line for the tasks and event loops that start in this context: they do not know it."""
    token = _noted.set(callers_place())
    try:
        yield
    finally:
        _noted.reset(token)
