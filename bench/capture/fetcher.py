"""Lets a client fetch what was captured, as a user's would; see `fetch_client`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.capture.lines import LineProcess
from bench.capture.sinks import Arrived, RowsMissingError

if TYPE_CHECKING:
    from collections.abc import Sequence

THREADS = 4
"""Captures that the client fetches at once."""


class Fetcher:
    """A client in a process of its own."""

    def __init__(self, process: LineProcess) -> None:
        """Wrap a running client; see `start`."""
        self._process = process

    @classmethod
    async def start(cls, stores: Sequence[str]) -> Fetcher:
        """Start it, for stores that are given as host:port or name=host:port."""
        return cls(await LineProcess.start("bench.capture.fetch_client", [str(THREADS), *stores]))

    async def fetch(self, capture_ids: Sequence[str]) -> Arrived:
        """Wait until the client holds every row of some captures, which may not have ended yet.

        Raises:
            RowsMissingError: It could not fetch them.
        """
        answer = await self._process.ask({"fetch": list(capture_ids)})
        if "error" in answer:
            raise RowsMissingError(f"the client could not fetch what was captured: {answer['error']}")
        return Arrived(answer["rows"], answer["num_bytes"])

    async def stop(self) -> None:
        """End it."""
        await self._process.stop()
