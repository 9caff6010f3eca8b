"""The calls that run: how many may last, and whether any is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from residuum.rpc.errors import Failure, Reason

SHORT_CALLS = 32
"""Places beyond those of calls that last, so that health and short calls are answered in a full house."""


@dataclass
class _Room:
    limit: int
    name: str
    taken: int = 0


class Calls:
    """Counts calls. Health watches are not among them: they last as long as their clients like."""

    def __init__(self, max_streams: int, max_writers: int) -> None:
        """Make the counter.

        Args:
            max_streams: Reads and waits that may run at once.
            max_writers: Streams of writers that may run at once. They have room of their own, because they alone bring
                what the others may be waiting for.
        """
        self._condition = threading.Condition()
        self._running = 0
        self._readers = _Room(max_streams, "reads and waits")
        self._writers = _Room(max_writers, "streams of writers")

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

    def reading(self) -> AbstractContextManager[None]:
        """Count a call as a read or wait, which may last.

        Raises:
            Failure: LIMIT_REACHED, when the context is entered.
        """
        return self._taking(self._readers)

    def writing(self) -> AbstractContextManager[None]:
        """Count a call as a writer's stream.

        Raises:
            Failure: LIMIT_REACHED, when the context is entered.
        """
        return self._taking(self._writers)

    @property
    def num_reading(self) -> int:
        """Reads and waits that run."""
        return self._readers.taken

    @property
    def num_writing(self) -> int:
        """Streams of writers that run."""
        return self._writers.taken

    def wait_until_idle(self, timeout: float) -> None:
        """Wait until no call runs, or for `timeout` seconds."""
        with self._condition:
            self._condition.wait_for(lambda: not self._running, timeout)

    @contextmanager
    def _taking(self, room: _Room) -> Iterator[None]:
        """Take a place. A full house answers at once instead of letting the next caller hang."""
        with self._condition:
            if room.taken >= room.limit:
                message = f"The store serves {room.limit} {room.name} at once; try again later."
                raise Failure(Reason.ERROR_REASON_LIMIT_REACHED, message, limit=room.limit)
            room.taken += 1
        try:
            yield
        finally:
            with self._condition:
                room.taken -= 1
