"""Reads the events of a running generation one by one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import grpc

from residuum._async import io
from residuum.exceptions import ResiduumError
from residuum.protocol.generation.events import ReplyBuilder
from residuum.transport.failures import from_generation_error
from residuum.v1 import inference_pb2
from residuum.values.replies.generation import Reply, TokenDelta

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from residuum.values.probes.probe import Probe
    from residuum.values.steering.operations import Operation

    Steer = Operation | Iterable[Operation] | None
    Start = Callable[[], Awaitable[tuple[io.Call, ReplyBuilder]]]
    Update = Callable[[str, Steer], Awaitable[tuple[int, ...]]]


class AsyncTokenStream(AsyncIterator[TokenDelta]):
    """Yields the tokens of a generation; the base class of `residuum.AsyncStream`."""

    def __init__(self, start: Start, endpoint: str, update: Update | None = None) -> None:
        self._start = start
        self._endpoint = endpoint
        self._update = update
        self._call: io.Call | None = None
        self._builder = ReplyBuilder()
        self._closed = False

    @property
    def request_id(self) -> str:
        """The ID of the request and its capture, known once the stream has been entered or first read."""
        return self._entered.request_id

    @property
    def started(self) -> inference_pb2.GenerationStarted:
        """The message with which the server accepted the request."""
        return self._entered.started

    @property
    def reply(self) -> Reply:
        """The whole reply.

        Raises:
            ResiduumError: The stream was not read to its end.
        """
        return self._entered.reply()

    async def update_steering(self, steer: Steer) -> tuple[int, ...]:
        """Change the steering from the next token on; see `AsyncClient.update_steering`."""
        if self._update is None:
            raise ResiduumError("No client created this stream. Call the client's update_steering instead.")
        return await self._update(self.request_id, steer)

    async def aclose(self) -> None:
        """Stop the request if it is still running."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    async def __anext__(self) -> TokenDelta:
        call = await self._open()
        while True:
            delta = await _next_delta(call, self._builder, self._endpoint)
            if delta is not None:
                return delta

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None:
            call.cancel()

    @property
    def _entered(self) -> ReplyBuilder:
        if self._call is None:
            raise ResiduumError(
                "The stream has not started. Enter it first (async with ... as stream), or read from it."
            )
        return self._builder

    async def _open(self) -> io.Call:
        """Start the request if it has not started, and wait until it is accepted."""
        if self._call is None:
            self._call, self._builder = await self._start()
        return self._call


async def accept(
    call: io.Call, endpoint: str, *, has_answered: bool = False, probes: Sequence[Probe] = ()
) -> ReplyBuilder:
    """Wait until the server accepts a request, and return the builder of its reply.

    `has_answered` says whether the endpoint has answered an earlier call. `probes` are those of the request.

    Raises:
        ResiduumError: The server refused the request.
    """
    builder = ReplyBuilder(probes)
    await _next_delta(call, builder, endpoint, has_answered=has_answered)
    return builder


async def _next_delta(
    call: io.Call, builder: ReplyBuilder, endpoint: str, *, has_answered: bool = True
) -> TokenDelta | None:
    """Read one event and return its new tokens; None if it has none.

    Raises:
        StopAsyncIteration: The stream ended without an error.
    """
    try:
        event = await io.read_event(call)
        if event is not None:
            return builder.add(event)
    except grpc.RpcError as error:
        raise from_generation_error(error, endpoint, builder, has_answered=has_answered) from None
    except BaseException:  # the reader was stopped, or the server broke the contract; nothing more will be read
        call.cancel()
        raise
    builder.check_end()
    raise StopAsyncIteration
