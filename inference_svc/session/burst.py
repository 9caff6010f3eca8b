"""Lets what is not urgent wait while many requests arrive at once, so that the engine gets all of them first."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PAUSE = 0.003
"""A burst is over if no request arrives for this many seconds."""
_MAX_PAUSES = 10
"""And at the latest after this many pauses."""


class Burst:
    """The requests that arrive shortly after each other.

    The engine computes the prompts that it has, and those that arrive meanwhile wait for its next step. So a message to
    a caller, which costs the event loop as much as a part of a request's way into the engine, can cost a whole step.
    """

    def __init__(self) -> None:
        """Start with no requests."""
        self._waiting: list[Callable[[], None]] = []
        self._pauses = 0
        self._has_new = False

    def call_after(self, callback: Callable[[], None]) -> None:
        """Note that a request has reached the engine, and call this when the burst is over."""
        if self._waiting:
            self._has_new = True
        else:
            self._has_new, self._pauses = False, 1
            asyncio.get_running_loop().call_later(_PAUSE, self._check)
        self._waiting.append(callback)

    def _check(self) -> None:
        if self._has_new and self._pauses < _MAX_PAUSES:
            self._has_new = False
            self._pauses += 1
            asyncio.get_running_loop().call_later(_PAUSE, self._check)
            return
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()
