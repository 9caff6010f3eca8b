"""Measures whether the memory of the services' processes grows. Outliers do not affect the result."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from bench.memory import descendants, kind_of, status_kib
from bench.processes import RunFailedError

WARM_UP = 1 / 3
"""The share of the requests after which buffers, caches and allocators have reached their final size."""

MOST_KIB_PER_REQUEST = 1.0
"""The most memory that a request may leave behind. By design less than a fifth of this is kept, such as its ID."""

MARGIN_MIB, MARGIN_SHARE = 8.0, 0.01
"""How far the last samples may be above those after the warm-up: this many MiB, or this share if that is more."""

_OWN, _MAPPED = ("RssAnon:",), ("RssShmem:", "RssFile:")

_ENDS = 10
"""The first and the last tenth of the samples are compared."""


@dataclass(frozen=True)
class Growth:
    """The memory of a process after the warm-up."""

    before_mib: float
    """The median of the first tenth of the samples after the warm-up."""
    after_mib: float
    """The median of the last tenth of the samples."""
    kib_per_request: float
    """The Theil-Sen slope: the median of the slopes between all pairs of samples. It is robust to outliers."""

    @property
    def margin_mib(self) -> float:
        """How much it may grow from after the warm-up to the end, in MiB."""
        return max(MARGIN_MIB, MARGIN_SHARE * self.before_mib)

    @property
    def is_flat(self) -> bool:
        """Whether it stays within the limits."""
        return self.kib_per_request <= MOST_KIB_PER_REQUEST and self.after_mib - self.before_mib <= self.margin_mib

    def to_json(self) -> dict[str, Any]:
        """Return the growth as plain data."""
        rounded = {name: round(value, 3) for name, value in vars(self).items()}
        return {**rounded, "margin_mib": round(self.margin_mib, 3), "flat": self.is_flat}


def growth_of(requests: Sequence[int], mib: Sequence[float]) -> Growth:
    """Return the growth of memory.

    Args:
        requests: The number of ended requests at each sample, starting with 0.
        mib: The memory at each sample, in MiB.
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
    """The processes of the services, by name."""

    def __init__(self, roots: dict[str, int]) -> None:
        """Find the descendants of the root processes. All must keep running.

        Args:
            roots: The IDs of the root processes, by name.
        """
        self._pids = dict(roots)
        for root in roots.values():
            for pid in sorted(descendants(root)):
                if name := kind_of(pid).removesuffix("s"):
                    self._pids[self._free(name)] = pid

    def own_mib(self) -> dict[str, float]:
        """Return the anonymous memory of each process, in MiB."""
        return {name: _resident_mib(name, pid, _OWN) for name, pid in self._pids.items()}

    def mapped_mib(self) -> dict[str, float]:
        """Return the resident file and shared memory of each: libraries, the ring, the store's database. In MiB."""
        return {name: _resident_mib(name, pid, _MAPPED) for name, pid in self._pids.items()}

    def _free(self, name: str) -> str:
        taken = sum(known.startswith(name) for known in self._pids)
        return f"{name} {taken + 1}" if taken else name


def _resident_mib(name: str, pid: int, fields: tuple[str, ...]) -> float:
    kib = status_kib(pid, *fields)
    if not kib:
        raise RunFailedError(f"the {name} has ended")
    return kib / 1024
