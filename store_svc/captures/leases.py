"""Leases: which inference services are running. A service that is killed stops renewing its lease."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

_MAX_LEASES = 10_000


class Leases:
    """The leases of the inference services that have open captures. Thread-safe."""

    def __init__(self, seconds: float = 15.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without leases.

        Args:
            seconds: How long a lease lasts after it was renewed.
            clock: Returns monotonic seconds.
        """
        self.seconds = seconds
        """How long a lease lasts after it was renewed, in seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._ends: OrderedDict[str, float] = OrderedDict()  # by service, in order of the end

    def renew(self, service: str) -> bool:
        """Start a lease, or start it anew. Return False if there are too many leases for another one."""
        with self._lock:
            if service not in self._ends and len(self._ends) >= _MAX_LEASES:
                return False
            self._ends[service] = self._clock() + self.seconds
            self._ends.move_to_end(service)
            return True

    def is_held(self, service: str) -> bool:
        """Return whether a service holds a lease that has not run out."""
        with self._lock:
            return self._ends.get(service, float("-inf")) > self._clock()

    def take_lapsed(self) -> set[str]:
        """Forget the leases that have run out, and return their services.

        If the store itself did not run for a long time, as when its machine was suspended, no service could renew its
        lease. Then all leases start anew.
        """
        now = self._clock()
        with self._lock:
            first = next(iter(self._ends.values()), now)
            if now - first > self.seconds:
                self._ends = OrderedDict.fromkeys(self._ends, now + self.seconds)
            lapsed = set()
            for service, end in self._ends.items():
                if end > now:
                    break
                lapsed.add(service)
            for service in lapsed:
                del self._ends[service]
            return lapsed

    def next_end(self) -> float | None:
        """Return when the next lease runs out, by the clock; None if there is no lease."""
        with self._lock:
            return next(iter(self._ends.values()), None)
