"""Which channels lead to a service, and when to try again. Both clients use it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from residuum.exceptions import (
    ClientClosed,
    DeadlineExceeded,
    EngineDead,
    RequestAborted,
    ResiduumError,
    Unavailable,
    Unreachable,
)
from residuum.protocol.deadlines import Deadline

_Channel = TypeVar("_Channel")

READ_CHUNKS = "/residuum.v1.StoreService/ReadChunks"
READ_CAPTURES = "/residuum.v1.StoreService/ReadCaptures"

DESCRIBE_SECONDS = 5.0
"""For how long a read waits for the store's description. Without it, rows come in messages."""

LONGEST_OUTAGE_SECONDS = 300.0
"""For how long a read without a timeout waits for a store that is away."""


class Channels(Generic[_Channel]):
    """The channels of a client, opened when they are first used. Bulk reads get their own, see `rpc.channels`."""

    def __init__(self, opener: Callable[[str], _Channel]) -> None:
        self._opener = opener
        self._channels: dict[tuple[str, str], _Channel] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._answered: set[str] = set()

    def note_answer(self, endpoint: str) -> None:
        """Note that an endpoint has answered a call, so that a later failure is not put down to the settings."""
        self._answered.add(endpoint)

    def has_answered(self, endpoint: str) -> bool:
        """Return whether an endpoint has answered a call."""
        return endpoint in self._answered

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
    """When a read is tried again whose store is away: soon, then slower, until the read's own time is over.

    Without such a time, it gives up when nothing has come for 5 minutes, or for the client's `timeout` if this client
    has never reached the store: then its address is probably wrong.
    """

    _FIRST_SECONDS = 0.1
    _LONGEST_SECONDS = 2.0

    def __init__(self, deadline: Deadline) -> None:
        """Begin a read that may take until `deadline`."""
        self._deadline = deadline
        self._failures = 0
        self._away_since: float | None = None
        self._last: ResiduumError | None = None

    @property
    def is_failing(self) -> bool:
        """Whether nothing has come since the last failure. Then shared memory is not worth its handshake."""
        return self._failures > 0

    def progress(self) -> None:
        """Note that something came."""
        self._failures = 0
        self._away_since = self._last = None

    def seconds_after(self, failure: ResiduumError, patience: float) -> float | None:
        """Return how long to wait before the next attempt; None if there is to be none: then raise `verdict`.

        Args:
            failure: Why the last attempt failed.
            patience: For how many seconds the store may be away, if the read has no time of its own.
        """
        if not _is_passing(failure):
            return None
        now = time.monotonic()
        self._last = failure
        self._away_since = now if self._away_since is None else self._away_since
        left = self._deadline.remaining()
        if left is None:
            left = patience - (now - self._away_since)
        if left <= 0:
            return None
        delay = min(self._FIRST_SECONDS * 2.0 ** min(self._failures, 10), self._LONGEST_SECONDS)
        self._failures += 1
        return min(delay, left)

    def verdict(self, failure: ResiduumError) -> ResiduumError | None:
        """Return what to raise if the store was away when the time was over; None if something else ended the read."""
        if self._last is None or self._away_since is None:
            return None
        if failure is not self._last and not isinstance(failure, DeadlineExceeded):
            return None
        seconds = time.monotonic() - self._away_since
        self._last.args = (f"{self._last} The client tried again for {seconds:.1f} s.",)
        return self._last


def _is_passing(failure: ResiduumError) -> bool:
    """Tell whether a read that failed so may go on when it is tried again."""
    if isinstance(failure, RequestAborted):
        # The store has cut it off, without a reason: whoever reads paused for longer than it waits (--stall-seconds).
        return not failure.reason
    if isinstance(failure, Unreachable) and failure.is_refusal:
        return False
    return isinstance(failure, Unavailable) and not isinstance(failure, EngineDead)
