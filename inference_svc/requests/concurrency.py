"""Limits on concurrent requests: one for all callers together, and one for each tenant."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from residuum.rpc.errors import Failure, Reason
from svc_common.security.tokens_file import Limits, no_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Places:
    """Counts the requests that run or wait, and enforces the limits.

    Only one event loop uses it, so it needs no lock.
    """

    def __init__(self, total: int = 1024, limits_of: Callable[[str], Limits] = no_limits) -> None:
        """Start with no requests.

        Args:
            total: The most requests that may run or wait at the same time, of all tenants.
            limits_of: Returns a tenant's limits. It is called for each request, so changed limits apply at once.
        """
        self._total = total
        self._limits_of = limits_of
        self._taken: Counter[str] = Counter()

    @property
    def num_taken(self) -> int:
        """The number of requests that run or wait now."""
        return self._taken.total()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Count one request of a tenant for as long as the context lasts.

        Raises:
            Failure: QUOTA_EXCEEDED if the tenant's limit is reached; LIMIT_REACHED if the limit of all is.
        """
        allowed = self._limits_of(tenant).max_requests
        if allowed is not None and self._taken[tenant] >= allowed:
            raise Failure(
                Reason.ERROR_REASON_QUOTA_EXCEEDED,
                f"Your tenant already has {allowed} requests that run or wait, its limit. Retry when one has ended.",
                limit="max_requests",
                allowed=allowed,
            )
        if self.num_taken >= self._total:
            raise Failure(
                Reason.ERROR_REASON_LIMIT_REACHED,
                f"{self._total} requests already run or wait, this server's limit. Retry later.",
                limit="max_requests",
            )
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
