"""Writing to the archive: whether it works, and the waits until it works again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from residuum.rpc.objects import ArchiveError, ArchiveRefusedError, MissingObjectError
from svc_common.backoff import Backoff
from svc_common.logs import get_logger

_T = TypeVar("_T")

_FIRST_SECONDS, _LONGEST_SECONDS = 0.5, 30.0

_log = get_logger(__name__)


class StoppedError(Exception):
    """The store is stopping."""


class Link:
    """Runs operations that write to the archive, and knows since when and why they fail. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._backoff = Backoff(_FIRST_SECONDS, _LONGEST_SECONDS)
        self._stopping = False
        self._successes = 0
        self.failures = 0
        """Operations that have failed since the store started."""
        self.why_behind = ""
        """Why operations fail at the moment, in words; empty if they do not."""

    def until_done(self, operation: Callable[[], _T]) -> _T:
        """Run an operation until it succeeds, with pauses that grow. A success of any operation ends all pauses.

        Raises:
            StoppedError: The store is stopping.
        """
        while True:
            try:
                return self.once(operation)
            except ArchiveError:
                self.pause()

    def once(self, operation: Callable[[], _T]) -> _T:
        """Run an operation once.

        Raises:
            ArchiveError: It failed.
            StoppedError: The store is stopping.
        """
        self.check()
        try:
            result = operation()
        except MissingObjectError:
            self._succeeded()  # it has answered
            raise
        except ArchiveError as error:
            self._failed(error)
            raise
        self._succeeded()
        return result

    def pause(self) -> None:
        """Wait before the next attempt.

        Raises:
            StoppedError: The store is stopping.
        """
        with self._changed:
            seen, until = self._successes, time.monotonic() + self._backoff.next_delay()
            self._changed.wait_for(lambda: self._stopping or self._successes != seen, until - time.monotonic())
        self.check()

    def check(self) -> None:
        """Raise StoppedError if the store is stopping."""
        if self._stopping:
            raise StoppedError

    def stop(self) -> None:
        """End all waits."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _failed(self, error: ArchiveError) -> None:
        with self._changed:
            self.failures += 1
            worth_logging = not self.why_behind or self._backoff.worth_logging()
            self.why_behind = str(error)
        if worth_logging:
            refused = isinstance(error, ArchiveRefusedError)
            message = "the archive refuses the store" if refused else "the archive does not work"
            _log.warning(f"{message}; the store goes on and tries again", error=str(error), failures=self.failures)

    def _succeeded(self) -> None:
        with self._changed:
            self._successes += 1
            self._backoff.reset()
            if self.why_behind:
                _log.info("the archive works again")
                self.why_behind = ""
                self._changed.notify_all()
