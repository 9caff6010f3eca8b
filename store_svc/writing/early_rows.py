"""Rows that reach the store before the call that opens their capture.

An inference service starts a request's generation before it opens the capture, through another connection. The rows
usually come later, but nothing ensures that.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from store_svc.captures.capture_names import CaptureName

WAIT_SECONDS = 6.0
"""How long rows wait for their capture's open. The service gives up an open after 5 seconds, and begins it a little
after the generation."""
_LEAST_SECONDS = 0.25
"""How long they wait if the stream has waited in vain for `WAIT_SECONDS` in the last minute."""
_REGAIN_SECONDS = 60.0
"""In each period of this many seconds, a stream may wait in vain for `WAIT_SECONDS`."""
_POLL_SECONDS = 0.05
"""How often a wait looks whether the stream has ended."""
_MAX_ATTEMPTS = 1 << 13
"""How many attempts the store remembers, and each stream: about a megabyte."""


class _Recent:
    """The newest numbers of those that were added."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[int, None] = OrderedDict()

    def add(self, number: int) -> None:
        self._numbers[number] = None
        if len(self._numbers) > _MAX_ATTEMPTS:
            self._numbers.popitem(last=False)

    def __contains__(self, number: int) -> bool:
        return number in self._numbers


class ArrivedOpens:
    """The opens that have arrived, whatever became of them, by the `attempt` of their capture."""

    def __init__(self, exists: Callable[[CaptureName], bool]) -> None:
        """Begin without any. `exists` tells whether a capture of a name exists: its rows never wait."""
        self._exists = exists
        self._condition = threading.Condition()
        self._attempts = _Recent()

    def note(self, attempts: Iterable[int]) -> None:
        """Note opens that are queued for the writer, or refused: their rows need not wait any more."""
        with self._condition:
            for attempt in attempts:
                self._attempts.add(attempt)
            self._condition.notify_all()

    def has(self, name: CaptureName, attempt: int) -> bool:
        """Return whether the open of a capture has arrived."""
        return attempt in self._attempts or self._exists(name)

    def wait_for(self, name: CaptureName, attempt: int, seconds: float, is_over: Callable[[], bool]) -> bool:
        """Wait for the open of a capture, until the time has passed or `is_over`. Return whether it has arrived."""
        until = time.monotonic() + seconds
        with self._condition:
            while not (arrived := self.has(name, attempt)) and not is_over():
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._condition.wait(min(left, _POLL_SECONDS))
        return arrived


class OpenWaits:
    """The waits of one writer stream. Rows of captures that are never opened must not delay the others for long."""

    def __init__(self, opens: ArrivedOpens) -> None:
        """Begin without waits. `opens`: the opens that have arrived."""
        self._opens = opens
        self._given_up = _Recent()
        self._left, self._counted_at = WAIT_SECONDS, time.monotonic()

    def wait_for(self, name: CaptureName, attempt: int, is_over: Callable[[], bool]) -> bool:
        """Wait for the open of a capture. Return False if a wait was in vain. The rows then belong to no capture."""
        if not attempt or attempt in self._given_up or self._opens.has(name, attempt):  # 0: an older writer
            return True
        began = time.monotonic()
        self._left = min(WAIT_SECONDS, self._left + (began - self._counted_at) * WAIT_SECONDS / _REGAIN_SECONDS)
        self._counted_at = began
        if self._opens.wait_for(name, attempt, max(self._left, _LEAST_SECONDS), is_over) or is_over():
            return True
        self._left -= time.monotonic() - began
        self._given_up.add(attempt)
        return False
