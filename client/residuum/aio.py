"""The asyncio client: the methods of `residuum.Client`, to be awaited."""

from __future__ import annotations

from residuum._async.client import AsyncClient
from residuum._async.streams import AsyncStream

__all__ = ["AsyncClient", "AsyncStream"]

for _shown in (AsyncClient, AsyncStream):  # as users import them
    _shown.__module__ = __name__
