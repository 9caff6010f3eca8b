"""What every destination of captured rows does. Each verifies that all rows arrived.

Of a sink's methods, only `complete` runs within the measured time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inference_svc.taps.plan import RowEncoding


class RowsMissingError(RuntimeError):
    """A capture is not complete, so the run is invalid."""


@dataclass(frozen=True)
class Arrived:
    """The rows of some captures that arrived."""

    rows: int
    num_bytes: int


class CaptureSink(Protocol):
    """Receives the captured rows of a tapped engine."""

    knows_complete: bool
    """Whether `complete` waits. Captures that end at the ring never become COMPLETE."""

    async def start(self) -> None:
        """Begin to receive rows."""

    async def begin(self, prompts: Mapping[str, Sequence[int]], encoding: RowEncoding | None = None) -> None:
        """Expect captures. `prompts` are the prompts by capture ID; `encoding` None means raw."""

    async def complete(self, replies: Mapping[str, Sequence[int]]) -> None:
        """Seal the captures with these replies, and wait until each is COMPLETE. This time is measured."""

    async def finish(self, replies: Mapping[str, Sequence[int]]) -> Arrived:
        """Return the number of rows that arrived of the captures with these replies.

        Raises:
            RowsMissingError: A row is missing.
        """

    async def stop(self) -> None:
        """Stop receiving rows."""
