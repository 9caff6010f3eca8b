"""The outcome of the rounds, and its output."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


class FailedError(AssertionError):
    """A check failed. The message says which."""


def expect(is_so: object, otherwise: str) -> None:
    """Continue if a condition holds.

    Raises:
        FailedError: The condition does not hold.
    """
    if not is_so:
        raise FailedError(otherwise)


@dataclass
class Outcome:
    """The counts of captured and recovered rows, over all rounds."""

    captures: int = 0
    """Captures that ended COMPLETE and were read."""
    rows: int = 0
    """Their rows: (layer, position)."""
    recovered: int = 0
    """Captures that ended COMPLETE although their store was killed while they were written."""
    recovered_rows: int = 0
    """Rows of these captures that reached the store after the kill."""
    kills: int = 0
    sizes: dict[str, str] = field(default_factory=dict)
    """The size of each image."""
    _start: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print a line of progress, with the seconds since the start."""
        print(f"{time.monotonic() - self._start:6.1f} s  {text}", flush=True)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} ({size})" for name, size in self.sizes.items())
        return (
            f"captured {self.rows} rows in {self.captures} captures, all COMPLETE; recovered {self.recovered} of them "
            f"from {self.kills} SIGKILLs of their store, {self.recovered_rows} rows written after these; no container, "
            f"volume or network left; images: {sizes}; {time.monotonic() - self._start:.0f} s"
        )
