"""The stream of an asyncio generation. `residuum._sync.streams` is for threads; both are written by hand."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from residuum._async.tokens import AsyncTokenStream
from residuum.transport.failures import stream_closed
from residuum.values.replies.generation import TokenDelta

if TYPE_CHECKING:
    from residuum._async.io import Call
    from residuum._async.tokens import Start, Update


class AsyncStream(AsyncTokenStream):
    """Yields the tokens of a generation as the model generates them.

    The request starts when the stream is entered or first read. Leaving the block early, `aclose`, or dropping the last
    reference stops the request in the engine. Its capture then ends aborted.

    Example:
        >>> async with client.stream("Once upon a time", max_tokens=64) as stream:
        ...     async for delta in stream:
        ...         print(delta.text, end="")
        >>> stream.reply.usage
        Usage(prompt_tokens=4, generated_tokens=64)
    """

    async def open(self) -> Call:
        """Start the request if it has not started, and wait until it is accepted."""
        return await self._open()

    async def __anext__(self) -> TokenDelta:
        try:
            return await super().__anext__()
        except asyncio.CancelledError:
            if not self._closed:
                raise
            raise stream_closed(self._builder) from None  # after aclose(), grpc.aio raises CancelledError


def make_stream(start: Start, endpoint: str, update: Update) -> AsyncStream:
    """Return a stream that starts when it is entered or first read."""
    return AsyncStream(start, endpoint, update)
