"""Rows that reach the store before the call that opens their capture.

An inference service starts a request's generation at the same time as it opens the capture, through another connection.
The rows usually come later, but nothing ensures that.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

WAIT_SECONDS = 5.0
"""How long rows wait for their capture's open. The service gives up an open after as long."""
_REFILL_SECONDS = 60.0
"""After how long a stream that has waited in vain may wait as long again."""
_POLL_SECONDS = 0.05
"""How often a wait looks whether the stream has ended."""
_MAX_ATTEMPTS = 1 << 16
"""How many attempts are remembered. Each takes about 150 bytes."""


class Attempts:
    """The captures whose open has arrived, whatever became of it, by their `attempt`. It forgets the oldest."""

    def __init__(self) -> None:
        """Begin without any."""
        self._condition = threading.Condition()
        self._known: OrderedDict[int, None] = OrderedDict()

    def note(self, attempts: Iterable[int]) -> None:
        """Note opens that are queued for the writer, or refused: their rows need not wait any more."""
        with self._condition:
            for attempt in attempts:
                self._known[attempt] = None
            while len(self._known) > _MAX_ATTEMPTS:
                self._known.popitem(last=False)
            self._condition.notify_all()

    def wait(self, attempt: int, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait until the open of a capture has arrived, the time has passed or `is_over`. Then it counts as arrived."""
        until = time.monotonic() + seconds
        with self._condition:
            while attempt not in self._known and not is_over() and (left := until - time.monotonic()) > 0:
                self._condition.wait(min(left, _POLL_SECONDS))
        self.note([attempt])

    def __contains__(self, attempt: int) -> bool:
        """Whether the rows of a capture need not wait. 0: their writer is older than attempts."""
        return not attempt or attempt in self._known


class Patience:
    """How long a writer stream waits for opens. Rows of captures that are never opened must not delay it for long."""

    def __init__(self, attempts: Attempts) -> None:
        """Wait for these."""
        self._attempts = attempts
        self._left, self._noted_at = WAIT_SECONDS, time.monotonic()

    def wait_for(self, attempt: int, is_over: Callable[[], bool]) -> None:
        """Wait for the open of a capture, unless it has arrived."""
        if attempt in self._attempts:
            return
        began = time.monotonic()
        self._left = min(WAIT_SECONDS, self._left + (began - self._noted_at) * WAIT_SECONDS / _REFILL_SECONDS)
        self._attempts.wait(attempt, self._left, is_over)
        self._noted_at = time.monotonic()
        self._left -= self._noted_at - began
