"""Which channels lead to a service, and when to try again. Both clients use it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from residuum.exceptions import ClientClosed, EngineDead, RequestAborted, ResiduumError, Unavailable

_Channel = TypeVar("_Channel")

READ_CHUNKS = "/residuum.v1.StoreService/ReadChunks"
READ_CAPTURES = "/residuum.v1.StoreService/ReadCaptures"


class Channels(Generic[_Channel]):
    """The channels of a client, opened when they are first used. Bulk reads get their own, see `rpc.channels`."""

    def __init__(self, opener: Callable[[str], _Channel]) -> None:
        self._opener = opener
        self._channels: dict[tuple[str, str], _Channel] = {}
        self._lock = threading.Lock()
        self._closed = False

    def get(self, endpoint: str, purpose: str = "calls") -> _Channel:
        """Return the channel to an endpoint for a purpose.

        Raises:
            ClientClosed: The client was closed.
        """
        with self._lock:
            if self._closed:
                raise ClientClosed("This client was closed; make another.")
            key = (endpoint, purpose)
            if key not in self._channels:
                self._channels[key] = self._opener(endpoint)
            return self._channels[key]

    def drain(self) -> list[_Channel]:
        """Refuse every further use, and return the channels that are to be closed."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
            self._channels.clear()
            return channels


class ReadRetries:
    """When a broken read is tried again: soon, then slower, and not forever. Progress starts the count again."""

    _FIRST_SECONDS = 0.1
    _LONGEST_SECONDS = 2.0

    def __init__(self, before_progress: int = 2, after_progress: int = 8) -> None:
        """Begin.

        Args:
            before_progress: How often to try again when nothing has come at all: the service is probably away.
            after_progress: How often to try again when the connection broke in the middle: it is probably restarting.
        """
        self._allowed = before_progress
        self._after_progress = after_progress
        self._failures = 0

    def progress(self) -> None:
        """Note that something came."""
        self._allowed = self._after_progress
        self._failures = 0

    def seconds_after(self, failure: ResiduumError) -> float | None:
        """Return how long to wait before the next attempt; None: there is to be none."""
        if not _is_passing(failure):
            return None
        self._failures += 1
        if self._failures > self._allowed:
            return None
        return min(self._FIRST_SECONDS * 2.0 ** (self._failures - 1), self._LONGEST_SECONDS)


def _is_passing(failure: ResiduumError) -> bool:
    """Tell whether a read that failed so may go on when it is tried again."""
    if isinstance(failure, RequestAborted):
        # The store has cut it off, without a reason: whoever reads paused for longer than it waits (--stall-seconds).
        return not failure.reason
    return isinstance(failure, Unavailable) and not isinstance(failure, EngineDead)
