"""The asyncio client: the methods of `residuum.Client`, to be awaited."""

from __future__ import annotations

from residuum._async.batches import BatchCancelled
from residuum._async.client import AsyncClient
from residuum._async.streams import AsyncStream

__all__ = ["AsyncClient", "AsyncStream", "BatchCancelled"]

for _shown in (AsyncClient, AsyncStream, BatchCancelled):  # as users import them
    _shown.__module__ = __name__
