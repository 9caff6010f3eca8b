"""The stream of an asyncio generation. `residuum._sync.streams` is for threads; both are written by hand."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from residuum._async import io
from residuum._async.tokens import AsyncTokenStream
from residuum.transport.failures import stream_closed
from residuum.values.replies.generation import TokenDelta

if TYPE_CHECKING:
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

    _opening: asyncio.Task[io.Call] | None = None

    async def open(self) -> io.Call:
        """Start the request if it has not started, and wait until it is accepted."""
        return await self._open()

    async def aclose(self) -> None:
        """Stop the request if it is still running, or being accepted."""
        await super().aclose()
        if self._opening is not None:
            self._opening.cancel()

    async def __anext__(self) -> TokenDelta:
        try:
            return await super().__anext__()
        except asyncio.CancelledError:  # after aclose(), grpc.aio raises it, too
            if not io.is_cancelled():
                self._check_not_closed()
            raise

    async def _open(self) -> io.Call:
        if self._call is not None:
            return self._call
        self._check_not_closed()
        self._opening = asyncio.ensure_future(super()._open())  # a task of its own, which aclose() can cancel
        try:
            return await self._opening
        except asyncio.CancelledError:
            if not io.is_cancelled():
                self._check_not_closed()
            raise
        finally:
            self._opening = None  # if it failed, its error refers to this stream

    def _check_not_closed(self) -> None:
        if self._closed:
            raise stream_closed(self._builder) from None


def make_stream(start: Start, endpoint: str, update: Update) -> AsyncStream:
    """Return a stream that starts when it is entered or first read."""
    return AsyncStream(start, endpoint, update)
