"""The calls that run: how many may last, and whether any is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from residuum.rpc.errors import Failure, Reason


class Calls:
    """Counts calls. Health watches are not among them: they last as long as their clients like."""

    def __init__(self, max_long: int) -> None:
        """Make the counter; at most `max_long` calls that last may run at once."""
        self._max_long = max_long
        self._condition = threading.Condition()
        self._running = 0
        self._long = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a call."""
        with self._condition:
            self._running += 1
        try:
            yield
        finally:
            with self._condition:
                self._running -= 1
                self._condition.notify_all()

    @contextmanager
    def lasting(self) -> Iterator[None]:
        """Count a call as one that lasts: a full house answers at once instead of letting the next caller hang.

        Raises:
            Failure: LIMIT_REACHED.
        """
        with self._condition:
            if self._long >= self._max_long:
                message = f"The store serves {self._max_long} streams and waits at once; try again later."
                raise Failure(Reason.ERROR_REASON_LIMIT_REACHED, message, limit=self._max_long)
            self._long += 1
        try:
            yield
        finally:
            with self._condition:
                self._long -= 1

    def wait_until_idle(self, timeout: float) -> None:
        """Wait until no call runs, or for `timeout` seconds."""
        with self._condition:
            self._condition.wait_for(lambda: not self._running, timeout)
