"""The outbox: the parcels that one store has not acknowledged yet, waiting or in flight."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from inference_svc.shipping.shipper.parcels import Parcel
from residuum.v1 import errors_pb2, store_pb2


@dataclass(frozen=True, slots=True)
class Settled:
    """A parcel that the store has acknowledged or rejected."""

    parcel: Parcel
    error: errors_pb2.ItemError | None
    """Why the store rejected it; None if the store wrote its rows."""


class Outbox:
    """A queue of parcels between the control sockets, which fill it, and the stream to the store, which sends it.

    A parcel waits, or is in flight in the current stream. When a stream ends for any reason, its parcels in flight wait
    again: in their old order, in front of newer ones, and with numbers from 1. So the store gets each parcel at least
    once, and an acknowledgement settles it for good.

    Parcels are made from their sources only as they are sent. However many items wait, only the parcels in flight, and
    those that the last stream left, exist in memory.
    """

    def __init__(self, max_unacked_bytes: int) -> None:
        """Allow at most `max_unacked_bytes` in flight. A single parcel may be larger."""
        self._max_unacked_bytes = max_unacked_bytes
        self._changed = threading.Condition()  # guards everything below
        self._waiting: deque[Parcel] = deque()  # parcels that the last stream left, and at most one from the sources
        self._sources: deque[Iterator[Parcel]] = deque()  # parcels that wait behind these
        self._in_flight: deque[tuple[int, Parcel]] = deque()
        self._unacked_bytes = 0
        self._rejected: dict[int, errors_pb2.ItemError] = {}
        self._stream = 0
        self._next_number = 1
        self._one_by_one = False
        self._closing = self._abandoned = False
        self._progress_at = time.monotonic()

    def put(self, parcels: Iterable[Parcel]) -> None:
        """Add parcels, from any thread. The sending thread iterates over them later; the iterator must not fail."""
        with self._changed:
            self._sources.append(iter(parcels))
            self._changed.notify_all()

    def wait_for_parcels(self) -> bool:
        """Wait until a parcel waits. Return False if none does and the outbox is closing or abandoned."""
        with self._changed:
            self._changed.wait_for(lambda: self._next() or self._closing or self._abandoned)
            return self._next() is not None and not self._abandoned

    def start_stream(self) -> int:
        """Start a new stream and end the one before. Return the stream's number, for `take`."""
        with self._changed:
            self._end_stream()
            return self._stream

    def end_stream(self) -> int:
        """End the current stream and return how many parcels were in flight. They wait again; `take` returns None."""
        with self._changed:
            unacked = len(self._in_flight)
            self._end_stream()
            return unacked

    def wait_for_next(self, stream: int) -> Parcel | None:
        """Wait for a parcel and for room in flight, and return the parcel that `take` will return; None as there."""
        with self._changed:
            self._changed.wait_for(lambda: self._over(stream) or self._may_send())
            return None if self._over(stream) else self._waiting[0]

    def split(self, parcel: Parcel, target_bytes: int) -> None:
        """Replace the next parcel by smaller ones; do nothing if another one is next now."""
        with self._changed:
            if self._waiting and self._waiting[0] is parcel:
                self._waiting.popleft()
                self._waiting.extendleft(reversed(parcel.split(target_bytes)))

    def take(self, stream: int) -> tuple[int, Parcel] | None:
        """Wait for a parcel and for room in flight, and return the parcel with its number.

        Returns None if the stream is over: it was ended, or the outbox is closing and no parcel waits.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over(stream) or self._may_send())
            if self._over(stream):
                return None
            if not self._in_flight:
                self._progress_at = time.monotonic()  # the store owes an acknowledgement from now on
            number, parcel = self._next_number, self._waiting.popleft()
            self._next_number += 1
            self._unacked_bytes += parcel.num_bytes
            self._in_flight.append((number, parcel))
            return number, parcel

    def acknowledge(self, response: store_pb2.AppendChunksResponse) -> list[Settled]:
        """Settle the parcels that a response acknowledges or rejects, and return them in order."""
        settled = []
        with self._changed:
            self._rejected.update((rejection.number, rejection.error) for rejection in response.rejections)
            while self._in_flight and self._in_flight[0][0] <= response.committed_through:
                number, parcel = self._in_flight.popleft()
                self._unacked_bytes -= parcel.num_bytes
                settled.append(Settled(parcel, self._rejected.pop(number, None)))
            if settled:
                self._one_by_one = False
                self._progress_at = time.monotonic()
                self._changed.notify_all()
        return settled

    def suspect(self) -> Parcel | None:
        """Find the malformed parcel for which the store ended the stream. Call this before `end_stream`.

        If several parcels are in flight, it may be any of them: return None, and let the next stream send parcels one
        by one until the store acknowledges one. If one parcel is in flight, remove and return it.
        """
        with self._changed:
            if not self._one_by_one or len(self._in_flight) != 1:
                self._one_by_one = True
                return None
            _, parcel = self._in_flight.pop()
            self._unacked_bytes -= parcel.num_bytes
            return parcel

    @property
    def unacked_bytes(self) -> int:
        """Bytes of the payloads in flight."""
        return self._unacked_bytes

    def seconds_without_ack(self) -> float:
        """Return for how long the store has owed an acknowledgement; 0 if it owes none."""
        with self._changed:
            return time.monotonic() - self._progress_at if self._in_flight else 0.0

    def close(self) -> None:
        """Let the stream end once no parcel waits. Parcels that are put later are still sent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def abandon(self) -> int:
        """Give up at once, and return how many parcels are left."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
            from_sources = sum(1 for source in self._sources for _ in source)
            self._sources.clear()
            return len(self._waiting) + from_sources + len(self._in_flight)

    def _end_stream(self) -> None:
        self._waiting.extendleft(parcel for _, parcel in reversed(self._in_flight))
        self._in_flight.clear()
        self._rejected.clear()
        self._unacked_bytes = 0
        self._next_number = 1
        self._stream += 1
        self._changed.notify_all()

    def _over(self, stream: int) -> bool:
        return stream != self._stream or self._abandoned or (self._closing and self._next() is None)

    def _may_send(self) -> bool:
        parcel = self._next()
        if parcel is None:
            return False
        room = 0 if self._one_by_one else self._max_unacked_bytes
        return not self._in_flight or self._unacked_bytes + parcel.num_bytes <= room

    def _next(self) -> Parcel | None:
        """Return the next parcel to send without removing it; None if no parcel waits."""
        while not self._waiting and self._sources:
            parcel = next(self._sources[0], None)
            if parcel is None:
                self._sources.popleft()
            else:
                self._waiting.append(parcel)
        return self._waiting[0] if self._waiting else None
