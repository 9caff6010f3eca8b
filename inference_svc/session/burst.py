"""Delays what can wait while many requests arrive or end, so that the engine gets the requests first."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PAUSE = 0.003
"""A burst is over when no request has arrived or ended for this many seconds."""
_MAX_SECONDS = 0.1
"""A burst that does not end by itself ends after about this many seconds. On a slow host, 32 requests take half of this
to reach the engine. With a shorter limit, the last ones would wait for work for the first ones, and so for one more
step."""


class Burst:
    """The requests that arrive shortly after each other. It belongs to one event loop; only `wait_on` is thread-safe.

    All of the service's work takes turns on the event loop. A request that reaches the engine after a step has begun
    waits for the whole step. So captures are opened, and the first messages to callers are sent, after the burst.

    Requests often arrive because others have just ended: a caller that works through a list keeps a number of them
    running. So captures are sealed after the burst, and after the captures of new requests have begun to open. No token
    waits for a seal.
    """

    def __init__(self) -> None:
        """Start with no requests."""
        self._waiting: list[Callable[[], None]] = []
        self._after_ends: list[Callable[[], object]] = []
        """Called after the burst, after `_waiting`. They must not raise. One for each capture that is to be sealed."""
        self._ends_at = 0.0
        """When this burst ends at the latest, by the event loop's clock."""
        self._has_new = False
        """Whether a request has arrived or ended in the current pause."""

    def call_after(self, callback: Callable[[], None]) -> None:
        """Note that a request has reached the engine, and call this when the burst is over."""
        self._note()
        self._waiting.append(callback)

    async def wait_after_end(self) -> None:
        """Note that a request has ended. Wait until the burst is over and the callbacks of `call_after` were called."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._call_after_end(partial(_set, over))
        await over

    async def wait_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do `wait_after_end` from another thread. `loop` is the event loop that the burst belongs to.

        Stops waiting after 200 ms: when the server stops, that loop may do nothing any more.
        """
        here, over = asyncio.get_running_loop(), asyncio.Event()
        with suppress(RuntimeError, asyncio.TimeoutError):  # RuntimeError: the loop is closed
            loop.call_soon_threadsafe(self._call_after_end, partial(_call_on, here, over.set))
            await asyncio.wait_for(over.wait(), 2 * _MAX_SECONDS)

    def _call_after_end(self, callback: Callable[[], object]) -> None:
        """Note that a request with a capture has ended, and call this when the burst is over."""
        self._note()
        self._after_ends.append(callback)

    def _note(self) -> None:
        if self._waiting or self._after_ends:
            self._has_new = True
        else:
            loop = asyncio.get_running_loop()
            self._has_new, self._ends_at = False, loop.time() + _MAX_SECONDS
            loop.call_later(_PAUSE, self._check)

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        if self._has_new and loop.time() < self._ends_at:
            self._has_new = False
            loop.call_later(_PAUSE, self._check)
            return
        waiting, self._waiting = self._waiting, []
        after_ends, self._after_ends = self._after_ends, []
        try:
            for callback in waiting:
                callback()
        finally:
            for after_end in after_ends:
                after_end()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():  # it is if the service stops
        future.set_result(None)


def _call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(callback)
