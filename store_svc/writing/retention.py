"""Which captures have been kept for long enough. Decides; the writer deletes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from google.protobuf.timestamp_pb2 import Timestamp

from store_svc.captures.capture_names import CaptureName, name_of
from store_svc.captures.catalog import Catalog

_MOST_AT_ONCE = 1024
"""Captures that are deleted in one transaction."""

_LOOK_AGAIN_SECONDS = 1.0
"""Pause before captures that were being read are looked at again."""

_LONGEST_WAIT_SECONDS = 60.0
"""Ages go by the wall clock, which may be set: so nobody trusts for longer in how long it will take."""


@dataclass(frozen=True)
class RetentionPolicy:
    """How long captures are kept, and how many bytes of them."""

    max_age: float | None = None
    """Seconds after its end for which a capture is kept. None: for ever."""
    max_bytes: int | None = None
    """Bytes of chunks of all captures together. None: whatever fits."""


@dataclass(frozen=True)
class Expired:
    """A capture that is to be deleted."""

    number: int
    """Its internal number."""
    name: CaptureName
    """The capture."""
    num_bytes: int
    """Bytes of its chunks."""
    age: float
    """Seconds since it ended."""
    cause: Literal["age", "size"]
    """Why: it is too old, or all captures together are too large."""


class Retention:
    """Picks the captures that have to go, the one that ended first before the others.

    Two kinds never go: those that have not ended, and those that are being read, for as long as they are; the next in
    the order goes instead. A capture that was picked is lent to no reader any more, so none is interrupted.

    For the writer's thread alone.
    """

    def __init__(self, policy: RetentionPolicy, catalog: Catalog, clock: Callable[[], float] = time.time) -> None:
        """Pick from a catalog.

        Args:
            policy: What is kept.
            catalog: The captures.
            clock: Returns the time since the epoch in seconds.
        """
        self._policy = policy
        self._catalog = catalog
        self._clock = clock
        self._look_at: float | None = self._clock()

    @property
    def excess(self) -> int:
        """Bytes of chunks beyond the limit; 0 if there is none."""
        limit = self._policy.max_bytes
        return max(self._catalog.num_bytes - limit, 0) if limit is not None else 0

    def take(self) -> list[Expired]:
        """Pick captures that have to go now, some of them if they are many. Readers find them gone from here on.

        Whoever takes them deletes them, or gives them back.
        """
        now, excess = self._clock(), self.excess
        taken: list[Expired] = []
        self._look_at = None
        for number, summary in self._catalog.oldest_ended():
            age = now - _seconds(summary.end_time)
            is_old = self._policy.max_age is not None and age >= self._policy.max_age
            if not is_old and excess <= 0:
                self._look_after(now, age)
                break
            if len(taken) == _MOST_AT_ONCE:
                self._look_at = now
                break
            if not self._catalog.begin_expiry(number):
                self._look_at = now + _LOOK_AGAIN_SECONDS  # being read
                continue
            taken.append(Expired(number, name_of(summary), summary.num_bytes, age, "age" if is_old else "size"))
            excess -= summary.num_bytes
        return taken

    def give_back(self, expired: Iterable[Expired]) -> None:
        """Keep captures that could not be deleted, for now."""
        for item in expired:
            self._catalog.cancel_expiry(item.number)
        self._look_at = self._clock() + _LOOK_AGAIN_SECONDS

    def seconds_to_next(self) -> float | None:
        """Return after how long to pick again, if nothing is written before; None: there is no need to."""
        return None if self._look_at is None else max(self._look_at - self._clock(), 0.0)

    def _look_after(self, now: float, age: float) -> None:
        """Look again when a capture of this age will be too old, unless that is to happen before."""
        if self._policy.max_age is None or self._look_at is not None:
            return
        self._look_at = now + min(self._policy.max_age - age, _LONGEST_WAIT_SECONDS)


def _seconds(time: Timestamp) -> float:
    return time.seconds + time.nanos / 1e9
