"""The memory of the processes of a service and its store, and whether it grows: odd samples do not matter."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from bench.memory import descendants, kind_of, status_kib
from bench.processes import RunFailedError

WARM_UP = 1 / 3
"""The share of the requests after which buffers, caches and allocators are as large as they will be."""

MOST_KIB_PER_REQUEST = 1.0
"""What a request may leave behind: what is kept of each by design, such as its name, is less than a fifth of it."""

MARGIN_MIB, MARGIN_SHARE = 8.0, 0.01
"""How far the last samples may lie above those after the warm-up: this much, or this share of them if that is more."""

_OWN, _MAPPED = ("RssAnon:",), ("RssShmem:", "RssFile:")

_ENDS = 10
"""The tenth of the samples at either end of what is looked at."""


@dataclass(frozen=True)
class Growth:
    """How the memory of a process went, after the warm-up."""

    before_mib: float
    """Right after the warm-up: the median of a tenth of the samples."""
    after_mib: float
    """At the end, likewise."""
    kib_per_request: float
    """The median of the slopes between all pairs of samples (Theil and Sen): an odd sample has no say in it."""

    @property
    def margin_mib(self) -> float:
        """How much more than after the warm-up it may be at the end."""
        return max(MARGIN_MIB, MARGIN_SHARE * self.before_mib)

    @property
    def is_flat(self) -> bool:
        """Whether it does not grow."""
        return self.kib_per_request <= MOST_KIB_PER_REQUEST and self.after_mib - self.before_mib <= self.margin_mib

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        rounded = {name: round(value, 3) for name, value in vars(self).items()}
        return {**rounded, "margin_mib": round(self.margin_mib, 3), "flat": self.is_flat}


def growth_of(requests: Sequence[int], mib: Sequence[float]) -> Growth:
    """Return how memory grew.

    Args:
        requests: How many requests had ended at each sample, from 0 on.
        mib: The memory at each, in MiB.
    """
    end = max(requests)
    steady = [(count, value) for count, value in zip(requests, mib, strict=True) if count >= WARM_UP * end]
    tenth = max(len(steady) // _ENDS, 1)
    slopes = [(later[1] - sooner[1]) / (later[0] - sooner[0]) for sooner, later in combinations(steady, 2)]
    return Growth(
        before_mib=statistics.median(value for _, value in steady[:tenth]),
        after_mib=statistics.median(value for _, value in steady[-tenth:]),
        kib_per_request=statistics.median(slopes) * 1024 if slopes else 0.0,
    )


class Processes:
    """The processes, each by its name."""

    def __init__(self, roots: dict[str, int]) -> None:
        """Find the processes that these started, which go on running from now on.

        Args:
            roots: The processes that were started by hand, by name.
        """
        self._pids = dict(roots)
        for root in roots.values():
            for pid in sorted(descendants(root)):
                if name := kind_of(pid).removesuffix("s"):
                    self._pids[self._free(name)] = pid

    def own_mib(self) -> dict[str, float]:
        """Return what each keeps in memory of its own."""
        return {name: _resident_mib(name, pid, _OWN) for name, pid in self._pids.items()}

    def mapped_mib(self) -> dict[str, float]:
        """Return what each has touched of what it maps: libraries, the ring, the store's database."""
        return {name: _resident_mib(name, pid, _MAPPED) for name, pid in self._pids.items()}

    def _free(self, name: str) -> str:
        taken = sum(known.startswith(name) for known in self._pids)
        return f"{name} {taken + 1}" if taken else name


def _resident_mib(name: str, pid: int, fields: tuple[str, ...]) -> float:
    kib = status_kib(pid, *fields)
    if not kib:
        raise RunFailedError(f"the {name} has ended")
    return kib / 1024
