"""What a shipper has yet to see acknowledged: what waits, what is under way, and how much of it may be."""

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
    """A parcel that the store will not be asked about again under that number."""

    parcel: Parcel
    error: errors_pb2.ItemError | None
    """Why the store rejected it; None when its rows are written."""


class Outbox:
    """Parcels between the control sockets that bring them, the stream that sends them and the acks that settle them.

    A parcel waits, or is under way in the current stream. When a stream ends, for whatever reason, all that was under
    way waits again, in its old order and before what is newer; numbers start from 1. So the store sees each parcel at
    least once, and an ack settles it for good.

    What waits is made into parcels as it is sent: however much is handed over, only what is under way, and what the
    last stream left, exists as parcels.
    """

    def __init__(self, max_unacked_bytes: int) -> None:
        """Let at most that many bytes be under way; one parcel always may."""
        self._max_unacked_bytes = max_unacked_bytes
        self._changed = threading.Condition()  # guards everything below
        self._waiting: deque[Parcel] = deque()  # what the last stream left, and perhaps the next of the sources
        self._sources: deque[Iterator[Parcel]] = deque()  # what waits behind that
        self._under_way: deque[tuple[int, Parcel]] = deque()
        self._unacked_bytes = 0
        self._rejected: dict[int, errors_pb2.ItemError] = {}
        self._stream = 0
        self._next_number = 1
        self._one_by_one = False
        self._closing = self._abandoned = False
        self._progress_at = time.monotonic()

    def put(self, parcels: Iterable[Parcel]) -> None:
        """Add parcels, from any thread. Another takes them from the iterable, which must not fail, as it sends them."""
        with self._changed:
            self._sources.append(iter(parcels))
            self._changed.notify_all()

    def wait_for_parcels(self) -> bool:
        """Wait until there is something to send; False when there is not and will not be."""
        with self._changed:
            self._changed.wait_for(lambda: self._next() or self._closing or self._abandoned)
            return self._next() is not None and not self._abandoned

    def start_stream(self) -> int:
        """Begin a new stream, and end the one before; return its name for `take`."""
        with self._changed:
            self._end_stream()
            return self._stream

    def end_stream(self) -> int:
        """End the current stream: what is under way waits again, and `take` returns None. Return how much that is."""
        with self._changed:
            unacked = len(self._under_way)
            self._end_stream()
            return unacked

    def take(self, stream: int) -> tuple[int, Parcel] | None:
        """Return the next parcel of a stream and its number; wait until there is one and room for it.

        None: the stream is over. Either it was ended, or the outbox is closing and nothing waits any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over(stream) or self._may_send())
            if self._over(stream):
                return None
            if not self._under_way:
                self._progress_at = time.monotonic()  # the store owes an ack from now on
            number, parcel = self._next_number, self._waiting.popleft()
            self._next_number += 1
            self._unacked_bytes += parcel.num_bytes
            self._under_way.append((number, parcel))
            return number, parcel

    def acknowledge(self, response: store_pb2.AppendChunksResponse) -> list[Settled]:
        """Settle what an answer of the store acknowledges or rejects, and return it in order."""
        settled = []
        with self._changed:
            self._rejected.update((rejection.number, rejection.error) for rejection in response.rejections)
            while self._under_way and self._under_way[0][0] <= response.committed_through:
                number, parcel = self._under_way.popleft()
                self._unacked_bytes -= parcel.num_bytes
                settled.append(Settled(parcel, self._rejected.pop(number, None)))
            if settled:
                self._one_by_one = False
                self._progress_at = time.monotonic()
                self._changed.notify_all()
        return settled

    def suspect(self) -> Parcel | None:
        """Find the parcel for which the store ended the stream as malformed. Call it before the stream is ended.

        With many under way it may be any: then none is named, and the next stream sends one by one until an ack comes.
        With one under way it is that one: it is taken out and returned.
        """
        with self._changed:
            if not self._one_by_one or len(self._under_way) != 1:
                self._one_by_one = True
                return None
            _, parcel = self._under_way.pop()
            self._unacked_bytes -= parcel.num_bytes
            return parcel

    @property
    def unacked_bytes(self) -> int:
        """Bytes of the rows that are under way."""
        return self._unacked_bytes

    def seconds_without_ack(self) -> float:
        """Return for how long the store has owed an ack; 0 if it owes none."""
        with self._changed:
            return time.monotonic() - self._progress_at if self._under_way else 0.0

    def close(self) -> None:
        """Let streams end when all is sent. More may still be put, and is sent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def abandon(self) -> int:
        """Give up what is left, at once, and return how many parcels that are."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
            from_sources = sum(1 for source in self._sources for _ in source)
            self._sources.clear()
            return len(self._waiting) + from_sources + len(self._under_way)

    def _end_stream(self) -> None:
        self._waiting.extendleft(parcel for _, parcel in reversed(self._under_way))
        self._under_way.clear()
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
        return not self._under_way or self._unacked_bytes + parcel.num_bytes <= room

    def _next(self) -> Parcel | None:
        """Return the parcel that is to be sent next, and leave it where it is; None if nothing waits."""
        while not self._waiting and self._sources:
            parcel = next(self._sources[0], None)
            if parcel is None:
                self._sources.popleft()
            else:
                self._waiting.append(parcel)
        return self._waiting[0] if self._waiting else None
