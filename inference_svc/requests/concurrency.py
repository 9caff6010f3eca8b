"""How many requests run or wait at once: of all callers together, and of each tenant."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from residuum.rpc.errors import Failure, Reason
from svc_common.tokens_file import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Places:
    """The places for requests. One event loop uses them, so they need no lock."""

    def __init__(self, total: int = 1024, limits_of: Callable[[str], Limits] = lambda _: Limits()) -> None:
        """Make free places.

        Args:
            total: How many there are.
            limits_of: Tells what a tenant may have; it is asked anew for each request.
        """
        self._total = total
        self._limits_of = limits_of
        self._taken: Counter[str] = Counter()

    @property
    def num_taken(self) -> int:
        """How many are taken."""
        return self._taken.total()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Take a place for a request of a tenant, for as long as the context lasts.

        Raises:
            Failure: QUOTA_EXCEEDED: the tenant has as many as it may have. LIMIT_REACHED: there is none.
        """
        allowed = self._limits_of(tenant).max_requests
        if allowed is not None and self._taken[tenant] >= allowed:
            raise Failure(
                Reason.ERROR_REASON_QUOTA_EXCEEDED,
                f"Your tenant may have {allowed} requests that run or wait; try again when one has ended.",
                limit="max_requests",
                allowed=allowed,
            )
        if self.num_taken >= self._total:
            raise Failure(
                Reason.ERROR_REASON_LIMIT_REACHED,
                f"{self._total} requests run or wait already; try again later.",
                limit="max_requests",
            )
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
