"""Delays the first message to each caller while many requests arrive, so that the engine gets the requests first."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PAUSE = 0.003
"""A burst is over when no request has arrived for this many seconds."""
_MAX_PAUSES = 10
"""A burst that does not end by itself ends after this many pauses."""


class Burst:
    """The requests that arrive shortly after each other.

    Messages to callers and requests on their way to the engine take turns on the event loop. A request that reaches the
    engine after a step has begun waits for the whole step, so messages that can wait are sent after the burst.
    """

    def __init__(self) -> None:
        """Start with no requests."""
        self._waiting: list[Callable[[], None]] = []
        self._pauses = 0
        """How many pauses have begun in this burst."""
        self._has_new = False
        """Whether a request has arrived in the current pause."""

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
