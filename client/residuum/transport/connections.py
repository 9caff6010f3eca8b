"""The channels to the services, and the retries of reads. Both clients use it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

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
_Stub = TypeVar("_Stub")

READ_CHUNKS = "/residuum.v1.StoreService/ReadChunks"
READ_CAPTURES = "/residuum.v1.StoreService/ReadCaptures"

DESCRIBE_SECONDS = 5.0
"""For how long a read waits for the store's description. Without it, rows come in messages."""

LONGEST_OUTAGE_SECONDS = 300.0
"""The longest time that a read without a timeout waits for a store that is away."""


class Channels(Generic[_Channel]):
    """The channels of a client, opened when they are first used. Bulk reads have channels of their own.

    On a shared channel, they would delay other calls; see `rpc.channels`.
    """

    def __init__(self, opener: Callable[[str], _Channel]) -> None:
        self._opener = opener
        self._channels: dict[tuple[str, str], _Channel] = {}
        self._stubs: dict[tuple[str, object], Any] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._answered: set[str] = set()

    def note_answer(self, endpoint: str) -> None:
        """Note that an endpoint has answered a call. The advice for a later failure depends on this."""
        self._answered.add(endpoint)

    def has_answered(self, endpoint: str) -> bool:
        """Return whether an endpoint has answered a call."""
        return endpoint in self._answered

    def get(self, endpoint: str, purpose: str = "calls") -> _Channel:
        """Return the channel to an endpoint for a purpose.

        Raises:
            ClientClosed: The client is closed.
        """
        with self._lock:
            if self._closed:
                raise ClientClosed("This client is closed. Create another.")
            key = (endpoint, purpose)
            if key not in self._channels:
                self._channels[key] = self._opener(endpoint)
            return self._channels[key]

    def stub(self, make: Callable[[_Channel], _Stub], endpoint: str) -> _Stub:
        """Return the stub of a service at an endpoint. It is kept, because making one takes about as long as a call.

        Args:
            make: Makes the stub from a channel.
            endpoint: The endpoint.

        Raises:
            ClientClosed: The client is closed.
        """
        channel, key = self.get(endpoint), (endpoint, make)
        stub = self._stubs.get(key)
        if stub is None:
            stub = self._stubs[key] = make(channel)
        found: _Stub = stub
        return found

    def drain(self) -> list[_Channel]:
        """Refuse further use, and return the channels, which the caller must close."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
            self._channels.clear()
            self._stubs.clear()
            return channels


class ReadRetries:
    """The retries of a read whose store is away, with exponential backoff, until the read's timeout.

    Without a timeout, the read fails when the store has been away for 5 minutes. If the client has never reached the
    store, its address is probably wrong, and the read fails after the client's `timeout`.
    """

    _FIRST_SECONDS = 0.1
    _LONGEST_SECONDS = 2.0

    def __init__(self, deadline: Deadline) -> None:
        """Start a read that must end before `deadline`."""
        self._deadline = deadline
        self._failures = 0
        self._away_since: float | None = None
        self._last: ResiduumError | None = None

    @property
    def is_failing(self) -> bool:
        """Whether nothing has come since the last failure. Then shared memory is not worth its handshake."""
        return self._failures > 0

    def progress(self) -> None:
        """Note that a message arrived."""
        self._failures = 0
        self._away_since = self._last = None

    def seconds_after(self, failure: ResiduumError, patience: float, *, retry_all: bool = False) -> float | None:
        """Return the seconds to wait before the next attempt; None to give up. Then raise `verdict`.

        Args:
            failure: The failure of the last attempt.
            patience: The seconds that the store may be away if the read has no timeout.
            retry_all: Retry although this kind of failure usually does not pass.
        """
        if not retry_all and not _is_transient(failure):
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
        """Return the exception for a store that was away for too long; None if something else ended the read."""
        if self._last is None or self._away_since is None:
            return None
        if failure is not self._last and not isinstance(failure, DeadlineExceeded):
            return None
        seconds = time.monotonic() - self._away_since
        self._last.args = (f"{self._last} The client tried again for {seconds:.1f} s.",)
        return self._last


def _is_transient(failure: ResiduumError) -> bool:
    """Tell whether a retry of the read may succeed."""
    if isinstance(failure, RequestAborted):
        # Without a reason, the store cancelled the call because the reader paused for longer than --stall-seconds.
        return not failure.reason
    return is_away(failure)


def is_away(failure: ResiduumError) -> bool:
    """Tell whether a failure means that a service does not answer at the moment, so that it may answer later."""
    if isinstance(failure, Unreachable) and failure.is_refusal:
        return False
    return isinstance(failure, Unavailable) and not isinstance(failure, EngineDead)
