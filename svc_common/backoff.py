"""Exponential backoff with a limit and jitter."""

from __future__ import annotations

import random


class Backoff:
    """Delays that double from `first_seconds` to `limit_seconds`, each shortened at random by up to one half.

    The jitter keeps several callers that lost the same service from reconnecting all at once.
    """

    def __init__(self, first_seconds: float, limit_seconds: float) -> None:
        """Start at the first delay."""
        self._first_seconds = first_seconds
        self._limit_seconds = limit_seconds
        self._delay_seconds = first_seconds
        self.failures = 0
        """Delays since the last `reset`."""

    def next_delay(self) -> float:
        """Count a failure and return the seconds to wait after it."""
        delay = self._delay_seconds
        self._delay_seconds = min(2 * delay, self._limit_seconds)
        self.failures += 1
        return delay * random.uniform(0.5, 1.0)  # noqa: S311 - no secret

    def reset(self) -> None:
        """Go back to the first delay, after a success."""
        self._delay_seconds = self._first_seconds
        self.failures = 0

    def worth_logging(self) -> bool:
        """Return whether to log the last failure: the first, second, fourth, eighth and so on."""
        return self.failures & (self.failures - 1) == 0
