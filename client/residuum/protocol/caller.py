"""Warnings that name the user's line that called this package, not a line of the package."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

_BETWEEN = frozenset({"asyncio", "concurrent", "contextlib", "residuum", "threading", "uvloop"})
"""The packages that may be between a user's line and a warning."""

_remembered: ContextVar[FrameType | None] = ContextVar("residuum_caller", default=None)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the user's line that called this package.

    In another thread or task, that is the line of `remembering`. Without any, the warning names no file.
    """
    frame = _users_frame() or _remembered.get()
    if frame is None:
        warnings.warn_explicit(message, category, "sys", 1)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, name, registry)


@contextmanager
def remembering() -> Iterator[None]:
    """Remember the caller for warnings of tasks, and of threads with a copy of this context, that start meanwhile."""
    token = _remembered.set(_users_frame() or _remembered.get())
    try:
        yield
    finally:
        _remembered.reset(token)


def _users_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as in the standard library's warnings
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    return frame
