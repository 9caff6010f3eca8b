"""Alarms that ring for whatever takes longer than a time that is the same for all: one clock, however many wait."""

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
    """An alarm for threads; it has one of its own."""

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
        """Call `ring`, in another thread, if the context lasts too long."""
        token = object()
        with self._condition:
            # The thread need not hear of it: it looks again within the time, and nothing is due before. Readers come by
            # here with each chunk.
            self._waiting[token] = time.monotonic() + self._seconds, ring
        try:
            yield
        finally:
            with self._condition:
                self._waiting.pop(token, None)

    def close(self) -> None:
        """End the thread; nothing rings any more."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while (ring := self._next()) is not None:
            _ring(ring)

    def _next(self) -> Callable[[], object] | None:
        """Wait until the next one is too long; None: closed."""
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
    """An alarm for tasks of one event loop; it has one timer, and none while nobody waits."""

    def __init__(self, seconds: float) -> None:
        """Make an alarm; it is bound to the loop in which it is first used."""
        self._seconds = seconds
        self._waiting: OrderedDict[object, tuple[float, Callable[[], object]]] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def over(self, ring: Callable[[], object]) -> Iterator[None]:
        """Call `ring` if the context lasts too long."""
        loop, token = asyncio.get_running_loop(), object()
        self._waiting[token] = loop.time() + self._seconds, ring
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look, loop)
        try:
            yield
        finally:
            self._waiting.pop(token, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ring for those who are late, and look again when the next one may be."""
        self._timer = None
        while self._waiting:
            token, (end, ring) = next(iter(self._waiting.items()))
            if end > loop.time():
                self._timer = loop.call_at(end, self._look, loop)
                return
            del self._waiting[token]
            _ring(ring)


def _ring(ring: Callable[[], object]) -> None:
    """Ring; if that fails, it is this one's matter alone, and the alarm must go on for all others."""
    try:
        ring()
    except Exception:  # noqa: BLE001 - logged; others wait
        _log.exception("nobody could be told that something takes too long")
