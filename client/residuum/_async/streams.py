"""When an asyncio stream starts and ends. `residuum._sync.streams` has the same for threads; both by hand."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from residuum._async.tokens import AsyncTokenStream
from residuum.transport.failures import stream_closed
from residuum.values.replies import TokenDelta

if TYPE_CHECKING:
    from residuum._async.io import Call
    from residuum._async.tokens import Start, Update


class AsyncStream(AsyncTokenStream):
    """The tokens of a generation as they are made.

    The request starts when the stream is entered or first read, and runs as long as the stream is open: leaving the
    block, `aclose`, or dropping the last reference stops it in the engine, and its capture then ends aborted.

    Example:
        >>> async with client.stream("Once upon a time", max_tokens=64) as stream:
        ...     async for delta in stream:
        ...         print(delta.text, end="")
        >>> stream.reply.usage
        Usage(prompt_tokens=4, generated_tokens=64)
    """

    async def open(self) -> Call:
        """Start the request, unless it was started before, and wait until it is accepted."""
        return await self._open()

    async def __anext__(self) -> TokenDelta:
        try:
            return await super().__anext__()
        except asyncio.CancelledError:
            if not self._closed:
                raise
            raise stream_closed(self._builder) from None  # grpc.aio reports aclose() as if the task were cancelled


def make_stream(start: Start, endpoint: str, update: Update) -> AsyncStream:
    """Return a stream that starts when it is entered or first read."""
    return AsyncStream(start, endpoint, update)
