"""The asyncio client, with the same methods as `residuum.Client`."""

from __future__ import annotations

from residuum._async.batches import BatchCancelled
from residuum._async.client import AsyncClient
from residuum._async.streams import AsyncStream

__all__ = ["AsyncClient", "AsyncStream", "BatchCancelled"]

for _shown in (AsyncClient, AsyncStream, BatchCancelled):  # show the module that users import
    _shown.__module__ = __name__
