"""Captures that serve only for one computation, and are deleted when it ends, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from residuum.exceptions import ResiduumError

if TYPE_CHECKING:
    from residuum.aio import AsyncClient

_running: set[asyncio.Task[None]] = set()
"""The deletions that run. The event loop itself keeps only weak references to tasks."""


@contextlib.asynccontextmanager
async def scratch_captures(client: AsyncClient, count: int) -> AsyncIterator[list[str]]:
    """Yield request IDs for captures that are deleted at the end, also if the page has gone away.

    Args:
        client: The client.
        count: The number of requests.
    """
    prefix = f"ui-{secrets.token_hex(8)}-"
    try:
        yield [f"{prefix}{index}" for index in range(count)]
    finally:
        # If the page has gone away, this task is cancelled, and every wait in it would end at once.
        task = asyncio.ensure_future(_delete(client, prefix))
        _running.add(task)
        task.add_done_callback(_running.discard)
        await asyncio.shield(task)


async def _delete(client: AsyncClient, prefix: str) -> None:
    with contextlib.suppress(ResiduumError):  # the store is away: what failed before says so
        await client.delete(prefix=prefix)
