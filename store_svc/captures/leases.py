"""Leases: which inference services are running. A service that is killed stops renewing its lease.

A lease is of a service and of its holder: the tenant whose token renews it, or "*" for a token that acts for all
tenants. It keeps only captures of that tenant open, so no tenant can do so for captures of others.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from residuum.wire.tokens import ANY_TENANT
from svc_common.security.tokens_file import Limits, no_limits

_MAX_LEASES = 10_000


class _Lease(NamedTuple):
    service: str
    holder: str


class Leases:
    """The leases of the inference services that have open captures. Thread-safe."""

    def __init__(
        self,
        seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
        limits_of: Callable[[str], Limits] = no_limits,
    ) -> None:
        """Start without leases.

        Args:
            seconds: How long a lease lasts after it was renewed.
            clock: Returns monotonic seconds.
            limits_of: Returns a holder's limits.
        """
        self._limits_of = limits_of
        self.seconds = seconds
        """How long a lease lasts after it was renewed, in seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._ends: OrderedDict[_Lease, float] = OrderedDict()  # in order of the end
        self._counts: Counter[str] = Counter()  # leases of each holder

    def renew(self, service: str, holder: str) -> bool:
        """Start a lease, or start it anew. Return False if there are too many leases for another one.

        Args:
            service: The service.
            holder: The tenant whose token renews it; "*" for one that acts for all tenants.
        """
        lease = _Lease(service, holder)
        with self._lock:
            if lease not in self._ends:
                share = self._limits_of(holder).share_of(_MAX_LEASES)
                if len(self._ends) >= _MAX_LEASES or self._counts[holder] >= share:
                    return False
                self._counts[holder] += 1
            self._ends[lease] = self._clock() + self.seconds
            self._ends.move_to_end(lease)
            return True

    def is_held(self, service: str, tenant: str) -> bool:
        """Return whether a lease that has not run out keeps a tenant's captures of a service open."""
        leases = (_Lease(service, ANY_TENANT), _Lease(service, tenant))
        with self._lock:
            return max(self._ends.get(lease, float("-inf")) for lease in leases) > self._clock()

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
            lapsed = []
            for lease, end in self._ends.items():
                if end > now:
                    break
                lapsed.append(lease)
            for lease in lapsed:
                del self._ends[lease]
            self._counts -= Counter(lease.holder for lease in lapsed)
            return {lease.service for lease in lapsed}

    def next_end(self) -> float | None:
        """Return when the next lease runs out, by the clock; None if there is no lease."""
        with self._lock:
            return next(iter(self._ends.values()), None)
