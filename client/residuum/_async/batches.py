"""Many generations at once, as tasks. `residuum._sync.batches` runs them in threads; both are written by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from residuum._async.streams import AsyncStream
from residuum.exceptions import ResiduumError
from residuum.rpc import tracing
from residuum.transport.batches import BatchItem, check_concurrency, collect
from residuum.transport.progress import progress_bar
from residuum.values.replies import Reply


async def run_batch(
    start: Callable[[BatchItem], AsyncStream], items: Sequence[BatchItem], *, max_concurrency: int, progress: bool
) -> list[Reply]:
    """Run one generation for each prompt, some at once; see `AsyncClient.generate_many`."""
    room = asyncio.Semaphore(check_concurrency(max_concurrency))
    replies: list[Reply | None] = [None] * len(items)
    errors: dict[int, ResiduumError] = {}
    with progress_bar("generating", len(items), enabled=progress) as advance:

        async def run_one(at: int, item: BatchItem) -> None:
            try:
                async with room:
                    replies[at] = await _reply(start(item))
            except ResiduumError as error:
                errors[at] = error
            advance(1)

        tasks = [asyncio.ensure_future(run_one(at, item)) for at, item in enumerate(items)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:  # cancelled, or a mistake in the call: stop what runs
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
    return collect(replies, errors)


async def _reply(stream: AsyncStream) -> Reply:
    with tracing.span("client.generate"):
        async with stream:
            async for _ in stream:
                pass
        tracing.set_attributes(request_id=stream.reply.request_id)
    return stream.reply
