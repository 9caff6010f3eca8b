"""Runs of neighbouring rows in a fixed piece of memory: which are free, and which are taken."""

from __future__ import annotations

from bisect import bisect


class FreeRuns:
    """Free runs of numbered rows; first fit, neighbours merged. Not safe for threads."""

    def __init__(self, size: int) -> None:
        """Make `size` free rows."""
        self._runs = [(0, size)] if size else []

    @property
    def total(self) -> int:
        """Free rows, all runs together."""
        return sum(size for _, size in self._runs)

    def take(self, count: int, *, from_end: bool = False) -> int | None:
        """Return the start of a free run of `count` rows, or None if there is none that long.

        Args:
            count: Rows; 0 takes nothing and returns 0.
            from_end: Look from the last run on, and take its end. What lives long is kept apart from what does not by
                taking one from either side.
        """
        if not count:
            return 0
        order = range(len(self._runs) - 1, -1, -1) if from_end else range(len(self._runs))
        for at in order:
            start, size = self._runs[at]
            if size < count:
                continue
            rest = (start, size - count) if from_end else (start + count, size - count)
            self._runs[at : at + 1] = [rest] if size > count else []
            return start + size - count if from_end else start
        return None

    def give_back(self, start: int, count: int) -> None:
        """Free a run that was taken."""
        if not count:
            return
        at = bisect(self._runs, (start, 0))
        first = at - 1 if at and sum(self._runs[at - 1]) == start else at
        end = at + 1 if at < len(self._runs) and self._runs[at][0] == start + count else at
        joined = [*self._runs[first:at], (start, count), *self._runs[at:end]]
        self._runs[first:end] = [(joined[0][0], sum(size for _, size in joined))]
