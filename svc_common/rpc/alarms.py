"""Timers for many concurrent waits with the same timeout. One thread, or one event loop timer, serves them all."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = get_logger(__name__)


class Alarm:
    """A timer for threads. It runs a thread of its own."""

    def __init__(self, seconds: float) -> None:
        """Start the thread."""
        self._seconds = seconds
        self._condition = threading.Condition()
        self._waiting: OrderedDict[object, tuple[float, Callable[[], object]]] = OrderedDict()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="alarm", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, ring: Callable[[], object]) -> Iterator[None]:
        """Call `ring`, in the alarm's thread, if the context lasts longer than the timeout."""
        token = object()
        with self._condition:
            # No notification, because readers pass here with each chunk. The thread looks again within one timeout, and
            # this entry is due no earlier.
            self._waiting[token] = time.monotonic() + self._seconds, ring
        try:
            yield
        finally:
            with self._condition:
                self._waiting.pop(token, None)

    def close(self) -> None:
        """End the thread. No alarm rings afterwards."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while (ring := self._next()) is not None:
            _ring(ring)

    def _next(self) -> Callable[[], object] | None:
        """Wait for the next timeout and return its callback; None once the alarm is closed."""
        with self._condition:
            while not self._closed:
                now = time.monotonic()
                token, (end, ring) = next(iter(self._waiting.items()), (None, (now + self._seconds, None)))
                if ring is not None and end <= now:
                    del self._waiting[token]
                    return ring
                self._condition.wait(end - now)
        return None


class AioAlarm:
    """A timer for the tasks of one event loop. It sets a single loop timer, and none while nothing waits."""

    def __init__(self, seconds: float) -> None:
        """Create an alarm. It binds to the loop that first uses it."""
        self._seconds = seconds
        self._waiting: OrderedDict[object, tuple[float, Callable[[], object]]] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, wait: object, ring: Callable[[], object]) -> None:
        """Call `ring` after the timeout, unless `stop` ends the wait before."""
        loop = (
            self._loop
        )  # to ask for the running loop is a system call before Python 3.12, and each message comes here
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        self._waiting[wait] = loop.time() + self._seconds, ring
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look, loop)

    def stop(self, wait: object) -> None:
        """End a wait."""
        self._waiting.pop(wait, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ring for expired entries, and set the timer for the next one."""
        self._timer = None
        while self._waiting:
            token, (end, ring) = next(iter(self._waiting.items()))
            if end > loop.time():
                self._timer = loop.call_at(end, self._look, loop)
                return
            del self._waiting[token]
            _ring(ring)


def _ring(ring: Callable[[], object]) -> None:
    """Run a callback. If it fails, log that: the alarm must go on for all others."""
    try:
        ring()
    except Exception:  # noqa: BLE001 - logged; the other entries still wait
        _log.exception("a timeout callback failed")
