"""The best rows of a search, or of one capture of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

_SLACK = 256
"""Hits that are kept beyond the limit, at least, so that sorting is rare. Of many, a quarter is kept beyond it."""


class Hit(NamedTuple):
    """A row that may be among the best. Hits sort from the best to the worst."""

    cost: float
    """The negative rank of its score; see `Scorer`."""
    capture_id: str
    """The capture."""
    tenant: str
    """The capture's tenant."""
    sequence: int
    """The sequence."""
    position: int
    """The position."""
    rough_rank: float
    """The rank of the score in float32."""
    score: float
    """The score."""
    number: int
    """The capture's internal number."""
    key: bytes
    """The key of the row's frame."""


class BestHits:
    """Keeps the best hits that were added. Not for several threads at once, except for `bar`."""

    def __init__(self, limit: int) -> None:
        """Keep up to `limit` hits."""
        self._limit = limit
        self._hits: list[Hit] = []
        self.bar = -math.inf
        """A row whose rank in float32 is less than this does not become a hit. Rows that are equal to the worst hit
        have the same rank in float32, so ties are decided exactly. Among rows that differ from it by less than the
        rounding of float32, the order of the scan decides."""

    def add(self, hits: Iterable[Hit]) -> None:
        """Add hits."""
        self._hits.extend(hits)
        if len(self._hits) >= self._limit + max(_SLACK, self._limit // 4):
            self._cut()

    def best(self) -> list[Hit]:
        """Return the best hits, the best first."""
        self._cut()
        return self._hits

    def _cut(self) -> None:
        self._hits.sort()
        del self._hits[self._limit :]
        if len(self._hits) == self._limit:
            self.bar = min(hit.rough_rank for hit in self._hits)
