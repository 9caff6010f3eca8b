"""Fetches captures from stores while rows arrive there: `fetch_client`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bench.capture.sinks.sink import Arrived
from bench.processes import Helper

if TYPE_CHECKING:
    from collections.abc import Sequence


class Fetcher:
    """A client in a separate process that fetches captures like a user's program; see `fetch_client`."""

    def __init__(self, stores: Sequence[str]) -> None:
        """Start the client. `stores` are host:port or name=host:port."""
        self._client = Helper("bench.capture.sinks.fetch_client", stores)

    async def fetch(self, capture_ids: Sequence[str]) -> Arrived:
        """Wait until the client holds every row of these captures. They may still be open."""
        return Arrived(**await asyncio.to_thread(self._client.call, {"fetch": list(capture_ids)}))

    async def stop(self) -> None:
        """Stop the client."""
        await asyncio.to_thread(self._client.stop)
