"""What an archive has: the captures of one tenant, and which other tenants have captures there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from residuum.values.replies.capture_summaries import CaptureSummary

_MAX_NAMED = 5
"""The most tenants that a message names; it counts the others."""


@dataclass(frozen=True)
class Entry:
    """A capture in the archive."""

    key: str
    age: tuple[int, int]
    summary: CaptureSummary


@dataclass
class ArchiveIndex:
    """The captures of a tenant, and the IDs of those of other tenants."""

    tenant: str
    """The tenant; "" is the default tenant."""
    captures: dict[str, Entry] = field(default_factory=dict)
    """The tenant's captures, by their IDs."""
    others: dict[str, set[str]] = field(default_factory=dict)
    """The IDs of the captures of each other tenant."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the IDs of other tenants' captures: a copy in another process needs only the tenants' names."""
        return {**vars(self), "others": {tenant: set() for tenant in self.others}}

    @property
    def tenants(self) -> list[str]:
        """All tenants with captures in the archive, sorted."""
        return sorted([*self.others, *([self.tenant] if self.captures else [])])

    def add(self, entry: Entry) -> None:
        """Add a capture. The newest of those with one name counts: a replaced capture may not be deleted yet."""
        name, tenant = entry.summary.capture_id, entry.summary.tenant
        if tenant != self.tenant:
            self.others.setdefault(tenant, set()).add(name)
            return
        known = self.captures.get(name)
        if known is None or known.age < entry.age:
            self.captures[name] = entry

    def advice(self, capture_id: str) -> str:
        """Return which tenants have a capture that this tenant lacks, or "" if that is not why it is not found."""
        owners = [tenant for tenant, names in self.others.items() if capture_id in names]
        if owners:
            return f"{_named(owners)} a capture with this ID. {_choose(owners)}"
        return self.advice_if_none() if not self.captures else ""

    def advice_if_none(self) -> str:
        """Return which other tenants have captures, for a search that found none; "" if no other tenant has."""
        return f"{_named(self.others)} captures there. {_choose(self.others)}" if self.others else ""


def tenant_name(tenant: str) -> str:
    """Return a tenant as a message names it."""
    return f"the tenant {tenant}" if tenant else "the default tenant"


def _named(tenants: Iterable[str]) -> str:
    """Return the start of a sentence about tenants: its subject, and "has" or "have"."""
    names = sorted(tenants)
    named = [name for name in names if name]
    parts = []
    if named:
        more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
        parts.append(f"the tenant{'s' if len(named) > 1 else ''} {', '.join(named[:_MAX_NAMED])}{more}")
    if "" in names:
        parts.append("the default tenant")
    text = " and ".join(parts)
    return f"{text[0].upper()}{text[1:]} {'has' if len(names) == 1 else 'have'}"


def _choose(tenants: Iterable[str]) -> str:
    names = set(tenants)
    if names == {""}:
        return "Leave out tenant= (--tenant)."
    return "Choose one with tenant= (--tenant)" + (", or leave it out for the default tenant." if "" in names else ".")
