"""A running generation, as an iterator of its tokens: `Stream` for `Client`, `AsyncStream` for `AsyncClient`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import grpc
import grpc.aio

from residuum.exceptions import RequestAborted, ResiduumError
from residuum.protocol.events import ReplyBuilder
from residuum.transport.failures import from_rpc_error
from residuum.v1 import inference_pb2
from residuum.values.replies import Reply, TokenDelta

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from residuum.values.steering import Operation

    Steer = Operation | Iterable[Operation] | None

    class SyncCall(Iterator[inference_pb2.GenerateResponse], Protocol):
        """What grpc returns for a stream: an iterator that can be cancelled."""

        def cancel(self) -> bool:
            """Stop the call."""
            ...

    AsyncCall = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


class Stream(Iterator[TokenDelta]):
    """The tokens of a generation as they are made.

    The request runs as long as the stream is open: leaving the with-block, `close`, or dropping the last reference
    stops it in the engine, and its capture then ends aborted.

    Example:
        >>> with client.stream("Once upon a time", max_tokens=64) as stream:
        ...     for delta in stream:
        ...         print(delta.text, end="")
        >>> stream.reply.usage
        Usage(prompt_tokens=4, generated_tokens=64)
    """

    def __init__(
        self, call: SyncCall, endpoint: str, update: Callable[[str, Steer], tuple[int, ...]] | None = None
    ) -> None:
        """Made by `Client.stream`, which waits here until the request is accepted."""
        self._builder = ReplyBuilder()
        self._update = update
        self._call = call
        self._endpoint = endpoint
        self._next()
        _ = self._builder.started

    @property
    def request_id(self) -> str:
        """The name of the request, and of its capture."""
        return self._builder.request_id

    @property
    def started(self) -> inference_pb2.GenerationStarted:
        """The message with which the server accepted the request."""
        return self._builder.started

    @property
    def reply(self) -> Reply:
        """The reply.

        Raises:
            ResiduumError: The stream was not read to its end.
        """
        return self._builder.reply()

    def update_steering(self, steer: Steer) -> tuple[int, ...]:
        """Change the steering from the next token on; see `Client.update_steering`."""
        if self._update is None:
            raise ResiduumError("This stream was not made by a client; call the client's update_steering.")
        return self._update(self.request_id, steer)

    def close(self) -> None:
        """Stop the request if it still runs."""
        self._call.cancel()

    def __next__(self) -> TokenDelta:
        while True:
            delta = self._next()
            if delta is not None:
                return delta

    def _next(self) -> TokenDelta | None:
        try:
            return self._builder.add(next(self._call))
        except StopIteration:
            self._builder.check_end()
            raise
        except grpc.RpcError as error:
            raise _failure(error, self._endpoint, self._builder) from None
        except BaseException:  # an interrupt, or a server that breaks the contract: nobody reads on
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.close()


class AsyncStream(AsyncIterator[TokenDelta]):
    """The tokens of a generation as they are made; see `Stream`. It starts when it is entered or first read.

    Example:
        >>> async with client.stream("Once upon a time", max_tokens=64) as stream:
        ...     async for delta in stream:
        ...         print(delta.text, end="")
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[tuple[AsyncCall, ReplyBuilder]]],
        endpoint: str,
        update: Callable[[str, Steer], Awaitable[tuple[int, ...]]] | None = None,
    ) -> None:
        """Made by `AsyncClient.stream`."""
        self._update = update
        self._start = start
        self._endpoint = endpoint
        self._call: AsyncCall | None = None
        self._builder = ReplyBuilder()
        self._closed = False

    @property
    def request_id(self) -> str:
        """The name of the request, and of its capture; known when the stream was entered or first read."""
        return self._entered.request_id

    @property
    def started(self) -> inference_pb2.GenerationStarted:
        """The message with which the server accepted the request."""
        return self._entered.started

    @property
    def reply(self) -> Reply:
        """The reply.

        Raises:
            ResiduumError: The stream was not read to its end.
        """
        return self._entered.reply()

    @property
    def _entered(self) -> ReplyBuilder:
        if self._call is None:
            raise ResiduumError(
                "The stream has not started: enter the stream first (async with ... as stream), or read from it."
            )
        return self._builder

    async def open(self) -> AsyncCall:
        """Start the request, unless it was started before, and wait until it is accepted."""
        if self._call is None:
            self._call, self._builder = await self._start()
        return self._call

    async def update_steering(self, steer: Steer) -> tuple[int, ...]:
        """Change the steering from the next token on; see `Client.update_steering`."""
        if self._update is None:
            raise ResiduumError("This stream was not made by a client; call the client's update_steering.")
        return await self._update(self.request_id, steer)

    async def aclose(self) -> None:
        """Stop the request if it still runs."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    async def __anext__(self) -> TokenDelta:
        call = await self.open()
        try:
            while True:
                delta = await next_delta(call, self._builder, self._endpoint)
                if delta is not None:
                    return delta
        except asyncio.CancelledError:
            if not self._closed:
                raise
            raise _closed(self._builder) from None  # grpc.aio reports aclose() as if the task were cancelled

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_call", None) is not None:
            self._call.cancel()  # type: ignore[union-attr] # the line above


async def next_delta(call: AsyncCall, builder: ReplyBuilder, endpoint: str) -> TokenDelta | None:
    """Read one event of an asyncio call.

    Raises:
        StopAsyncIteration: The stream has ended well.
    """
    try:
        response = await call.read()
        if isinstance(response, inference_pb2.GenerateResponse):
            return builder.add(response)
    except grpc.RpcError as error:
        raise _failure(error, endpoint, builder) from None
    except BaseException:  # a cancelled task, or a server that breaks the contract: nobody reads on
        call.cancel()
        raise
    builder.check_end()
    raise StopAsyncIteration


def _failure(error: grpc.RpcError, endpoint: str, builder: ReplyBuilder) -> ResiduumError:
    facts = {"request_id": builder.request_id} if builder.is_started else {}
    failure = from_rpc_error(error, endpoint, **facts)
    return _closed(builder) if isinstance(failure, RequestAborted) and not failure.reason else failure


def _closed(builder: ReplyBuilder) -> RequestAborted:
    facts = {"request_id": builder.request_id} if builder.is_started else {}
    return RequestAborted("The stream was closed before its end, which stopped the request.", metadata=facts)
