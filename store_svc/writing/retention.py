"""Retention: decides which captures to delete, by age and total size. The writer deletes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from google.protobuf.timestamp_pb2 import Timestamp

from residuum.v1 import store_pb2
from store_svc.captures.capture_names import CaptureName, name_of
from store_svc.captures.catalog import Catalog, local_bytes

_MAX_AT_ONCE = 1024
"""Captures deleted in one transaction."""

_LOOK_AGAIN_SECONDS = 1.0
"""Pause before retention looks again at captures that were being read."""

_LONGEST_WAIT_SECONDS = 60.0
"""The longest pause before retention looks again. Ages follow the wall clock, which may be set at any time."""


@dataclass(frozen=True)
class RetentionPolicy:
    """How long captures are kept, and how many bytes of them."""

    max_age: float | None = None
    """Seconds for which a capture is kept after it ended; None for ever."""
    max_bytes: int | None = None
    """Bytes that the chunks of all captures may take together; None for no limit."""


@dataclass(frozen=True)
class Expired:
    """A capture to delete."""

    number: int
    """Its internal number."""
    name: CaptureName
    """Its name."""
    num_bytes: int
    """Bytes of its chunks."""
    age: float
    """Seconds since it ended."""
    cause: Literal["age", "size"]
    """Why it is deleted: it is too old, or all captures together are too large."""


class Retention:
    """Picks the captures to delete, in the order in which they ended.

    It never picks an open capture, nor one that is being read; it picks the next in order instead. No reader can start
    on a picked capture, so deleting it interrupts none. To keep the limit of bytes, it drops rows that the archive has
    before it deletes a capture.

    Only the writer thread may use this class.
    """

    def __init__(self, policy: RetentionPolicy, catalog: Catalog, clock: Callable[[], float] = time.time) -> None:
        """Create the picker.

        Args:
            policy: How long, and how much, is kept.
            catalog: The captures to pick from.
            clock: Returns the seconds since the epoch.
        """
        self._policy = policy
        self._catalog = catalog
        self._clock = clock
        self._look_at: float | None = self._clock()

    @property
    def excess(self) -> int:
        """Bytes of chunks beyond the policy's limit; 0 without a limit."""
        limit = self._policy.max_bytes
        return max(self._catalog.num_bytes - limit, 0) if limit is not None else 0

    def to_drop(self) -> list[int]:
        """Pick captures whose rows to drop now, at most 1024. The archive has them. Call it before `take`."""
        return self._catalog.to_drop(self.excess, _MAX_AT_ONCE)

    def take(self) -> list[Expired]:
        """Pick captures to delete now, at most 1024, and hide them from readers.

        A capture that the archive has is deleted only because of its age. Rows that wait to be dropped, until the
        archive is known to be this store's, make no other capture expire.

        The caller must delete the picked captures, or return them with `give_back`.
        """
        now = self._clock()
        taken: list[Expired] = []
        self._look_at = None
        freed = self._take_old(taken, now)
        excess = self.excess - freed
        if self._catalog.to_drop(excess, 1):
            self._look_at = now + _LOOK_AGAIN_SECONDS  # `to_drop` has more
        else:
            self._take_excess(taken, now, excess - self._catalog.bytes_copied)
        return taken

    def _take_old(self, taken: list[Expired], now: float) -> int:
        """Pick the captures that are too old; return the bytes that they have in the database."""
        freed = 0
        if self._policy.max_age is None:
            return freed
        for number, summary in self._catalog.oldest_ended():
            age = now - _seconds(summary.end_time)
            if age < self._policy.max_age:
                self._look_after(now, self._policy.max_age - age)
                break
            before = len(taken)
            if not self._take_one(taken, now, number, summary, "age"):
                break
            freed += local_bytes(summary) if len(taken) > before else 0
        return freed

    def _take_excess(self, taken: list[Expired], now: float, excess: int) -> None:
        """Pick captures that are not in the archive and have these bytes together."""
        already = {item.number for item in taken}
        for number, summary in self._catalog.oldest_only_here():
            if excess <= 0:
                break
            if number in already:
                continue
            before = len(taken)
            if not self._take_one(taken, now, number, summary, "size"):
                break
            excess -= summary.num_bytes if len(taken) > before else 0

    def _take_one(
        self,
        taken: list[Expired],
        now: float,
        number: int,
        summary: store_pb2.CaptureSummary,
        cause: Literal["age", "size"],
    ) -> bool:
        """Pick a capture, unless it is being read. Return whether this pass may pick more."""
        if len(taken) == _MAX_AT_ONCE:
            self._look_at = now
            return False
        if self._catalog.begin_expiry(number):
            age = now - _seconds(summary.end_time)
            taken.append(Expired(number, name_of(summary), summary.num_bytes, age, cause))
        else:
            self._look_at = now + _LOOK_AGAIN_SECONDS
        return True

    def give_back(self, expired: Iterable[Expired]) -> None:
        """Show captures to readers again that could not be deleted, and pick them again later."""
        for item in expired:
            self._catalog.cancel_expiry(item.number)
        self._look_at = self._clock() + _LOOK_AGAIN_SECONDS

    def seconds_to_next(self) -> float | None:
        """Return the seconds until `take` should run again if nothing is written; None if it need not run."""
        if self._look_at is None:
            return None
        return min(max(self._look_at - self._clock(), 0.0), _LONGEST_WAIT_SECONDS)  # the clock may have been set back

    def _look_after(self, now: float, seconds: float) -> None:
        """Plan the next look, unless one is planned already."""
        if self._look_at is None:
            self._look_at = now + seconds


def _seconds(time: Timestamp) -> float:
    return time.seconds + time.nanos / 1e9
