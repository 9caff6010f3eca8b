"""Counts what was compared, and collects what is wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """What a campaign has seen."""

    counts: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)
    """The largest error of each kind, as a part of what is allowed."""
    seconds: Counter[str] = field(default_factory=Counter)
    """How long the parts took."""
    faults: list[str] = field(default_factory=list)

    def see(self, kind: str, part: float) -> None:
        """Keep the largest error of a kind."""
        self.largest[kind] = max(self.largest.get(kind, 0.0), part)

    def fault(self, case: str, text: str) -> None:
        """Record that something is wrong."""
        self.faults.append(f"{case}: {text}")

    def report(self) -> str:
        """Return all counts, largest errors and faults as text."""
        lines = [f"  {name:44} {count:>10,}" for name, count in sorted(self.counts.items())]
        lines += [f"  seconds: {name:35} {count:>10,.0f}" for name, count in self.seconds.items()]
        lines += ["largest error, as a part of what is allowed:"]
        lines += [f"  {name:44} {part:>10.3g}" for name, part in sorted(self.largest.items())]
        lines += [f"{len(self.faults)} faults", *(f"  {fault}" for fault in self.faults)]
        return "\n".join(lines)
