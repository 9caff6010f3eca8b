"""Captures that serve only for one computation, and are deleted when it ends, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING

from residuum.exceptions import ResiduumError

if TYPE_CHECKING:
    from residuum.aio import AsyncClient

_LATER_SECONDS = 5.0
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
    except BaseException:
        # A request that was just stopped may have a capture a moment later.
        _start(_delete(client, prefix, after=_LATER_SECONDS))
        raise
    finally:
        # If the page has gone away, this task is cancelled, and every wait in it would end at once.
        await asyncio.shield(_start(_delete(client, prefix)))


def _start(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    task = asyncio.ensure_future(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


async def _delete(client: AsyncClient, prefix: str, after: float = 0.0) -> None:
    await asyncio.sleep(after)
    with contextlib.suppress(ResiduumError):  # the store is away: what failed before says so
        await client.delete(prefix=prefix)
