"""An allocator of contiguous rows in a fixed piece of memory."""

from __future__ import annotations

from bisect import bisect


class FreeRuns:
    """Allocates runs of numbered rows by first fit, and merges free neighbours. Not thread-safe."""

    def __init__(self, size: int) -> None:
        """Start with `size` free rows."""
        self._runs = [(0, size)] if size else []

    @property
    def total(self) -> int:
        """How many rows are free."""
        return sum(size for _, size in self._runs)

    def take(self, count: int, *, from_end: bool = False) -> int | None:
        """Take `count` contiguous rows and return the first, or None if no free run is long enough.

        Args:
            count: How many rows; 0 takes nothing and returns 0.
            from_end: Search from the end instead of the start. Taking long-lived runs from one side and short-lived
                runs from the other avoids fragmentation.
        """
        if not count:
            return 0
        order = range(len(self._runs) - 1, -1, -1) if from_end else range(len(self._runs))
        for index in order:
            start, size = self._runs[index]
            if size < count:
                continue
            rest = (start, size - count) if from_end else (start + count, size - count)
            self._runs[index : index + 1] = [rest] if size > count else []
            return start + size - count if from_end else start
        return None

    def give_back(self, start: int, count: int) -> None:
        """Free `count` rows from `start` on."""
        if not count:
            return
        first = last = bisect(self._runs, (start, 0))
        end = start + count
        if last < len(self._runs) and self._runs[last][0] == end:
            end += self._runs[last][1]
            last += 1
        if first:
            before, size = self._runs[first - 1]
            if before + size == start:
                start = before
                first -= 1
        self._runs[first:last] = [(start, end - start)]
