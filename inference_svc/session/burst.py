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
_MAX_SECONDS = 0.03
"""For how long captures wait to be opened if the burst does not end before. Their first tokens wait for them."""
_MAX_SEAL_SECONDS = 0.15
"""For how long captures wait to be sealed. No token waits for them."""


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
        self._after_arrivals = _Waiting(_MAX_SECONDS)
        self._after_ends = _Waiting(_MAX_SEAL_SECONDS)
        """Called after `_after_arrivals`. One for each capture that is to be sealed."""
        self._has_timer = False
        self._has_new = False
        """Whether a request has arrived or ended in the current pause."""

    def call_after(self, callback: Callable[[], object]) -> None:
        """Note that a request has reached the engine, and call this when the burst is over. It must not raise."""
        self._add(self._after_arrivals, callback)

    async def wait_after_end(self) -> None:
        """Note that a request has ended. Wait until the burst is over and the callbacks of `call_after` were called."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._add(self._after_ends, partial(_set, over))
        await over

    async def wait_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do `wait_after_end` from another thread. `loop` is the event loop that the burst belongs to.

        Stops waiting after some time: when the server stops, that loop may do nothing any more.
        """
        here, over = asyncio.get_running_loop(), asyncio.Event()
        with suppress(RuntimeError, asyncio.TimeoutError):  # RuntimeError: the loop is closed
            loop.call_soon_threadsafe(self._add, self._after_ends, partial(_call_on, here, over.set))
            await asyncio.wait_for(over.wait(), 2 * _MAX_SEAL_SECONDS)

    def _add(self, waiting: _Waiting, callback: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        waiting.add(callback, loop.time())
        if self._has_timer:
            self._has_new = True
        else:
            self._has_timer, self._has_new = True, False
            loop.call_later(_PAUSE, self._check)

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        is_over, self._has_new = not self._has_new, False
        for waiting in (self._after_arrivals, self._after_ends):
            if is_over or waiting.is_late(loop.time()):
                waiting.call()
        self._has_timer = bool(self._after_arrivals or self._after_ends)
        if self._has_timer:
            loop.call_later(_PAUSE, self._check)


class _Waiting:
    """What waits for the end of a burst, but not for long."""

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        self._callbacks: list[Callable[[], object]] = []
        self._goes_on_at = 0.0

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, callback: Callable[[], object], now: float) -> None:
        """Let something wait. `now` is the time of the event loop's clock."""
        if not self._callbacks:
            self._goes_on_at = now + self._most_seconds
        self._callbacks.append(callback)

    def is_late(self, now: float) -> bool:
        """Return whether the first has waited for long enough."""
        return now >= self._goes_on_at

    def call(self) -> None:
        """Let all go on."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():  # it is if the service stops
        future.set_result(None)


def _call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(callback)
