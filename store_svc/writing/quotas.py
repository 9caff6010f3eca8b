"""Enforces tenants' quotas within one transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from residuum.rpc.errors import Failure, Reason
from store_svc.captures.catalog import Catalog
from svc_common.security.tokens_file import Limits


class Replaced(NamedTuple):
    """What a tenant gets back when a new capture replaces one."""

    num_bytes: int
    """Bytes of the replaced capture."""
    was_open: bool
    """Whether it was open."""


class Quotas:
    """Keeps tenants within their limits. It counts the published captures and the transaction's own changes."""

    def __init__(self, catalog: Catalog, limits_of: Callable[[str], Limits]) -> None:
        """Start counting for one transaction.

        Args:
            catalog: The published captures.
            limits_of: Returns a tenant's limits.
        """
        self._catalog = catalog
        self._limits_of = limits_of
        self._limits: dict[str, Limits] = {}
        self._bytes: Counter[str] = Counter()
        self._open: Counter[str] = Counter()

    def open(self, tenant: str, replaced: Replaced | None = None) -> None:
        """Count a capture that is opened. If it replaces one, call `delete` too.

        Raises:
            Failure: QUOTA_EXCEEDED if the tenant has reached its limit of open captures or of bytes.
        """
        limits = self.limits_of(tenant)
        freed = replaced or Replaced(0, was_open=False)
        count = self._catalog.holdings(tenant).num_open + self._open[tenant] - freed.was_open
        if limits.max_open_captures is not None and count >= limits.max_open_captures:
            allowed = limits.max_open_captures
            raise _exceeded(
                f"Your tenant has {count} open captures and may have {allowed}. Wait until some have ended.",
                "max_open_captures",
                allowed,
            )
        self.check_room(tenant, 1 - freed.num_bytes)
        self._open[tenant] += 1

    def end(self, tenant: str) -> None:
        """Count the end of a capture."""
        self._open[tenant] -= 1

    def check_room(self, tenant: str, num_bytes: int) -> None:
        """Check that a tenant may store this many more bytes.

        Raises:
            Failure: QUOTA_EXCEEDED if it may not.
        """
        allowed = self.limits_of(tenant).max_bytes
        if allowed is None:
            return
        present = self._catalog.holdings(tenant).num_bytes + self._bytes[tenant]
        if present + num_bytes > allowed:
            raise _exceeded(
                f"Your tenant has {present} bytes in this store and may have {allowed}. Delete captures (residuum rm), "
                "or ask the operator for a higher limit.",
                "max_bytes",
                allowed,
            )

    def add(self, tenant: str, num_bytes: int) -> None:
        """Count stored bytes."""
        self._bytes[tenant] += num_bytes

    def delete(self, tenant: str, num_bytes: int, *, was_open: bool) -> None:
        """Count the deletion of a capture of this many bytes."""
        self._bytes[tenant] -= num_bytes
        self._open[tenant] -= was_open

    def limits_of(self, tenant: str) -> Limits:
        """Return the limits of a tenant, which do not change within the transaction."""
        if tenant not in self._limits:
            self._limits[tenant] = self._limits_of(tenant)
        return self._limits[tenant]


def _exceeded(message: str, limit: str, allowed: int) -> Failure:
    return Failure(Reason.ERROR_REASON_QUOTA_EXCEEDED, message, limit=limit, allowed=allowed)
