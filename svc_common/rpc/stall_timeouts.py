"""Timeouts for callers that stall: that send no first message, or do not read what the server sends.

A stalled call occupies a thread or a slot, and a stalled reader keeps its capture from expiring. So the server ends a
call whose first message does not come in time, and one that does not accept a response in time. There is no timeout
between messages: a reader may wait for rows, and a writer for something to write, as long as they like.

Both interceptors run after the others. So unauthorised callers are refused before the server waits for a message, and
the interceptors of `svc_common.rpc.serving` send the failures that are raised here.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from residuum.rpc.errors import Failure, Reason
from residuum.rpc.methods import is_ours
from svc_common.rpc.alarms import AioAlarm, Alarm
from svc_common.rpc.serving import behaviour_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    import structlog

    _Handler = grpc.RpcMethodHandler[Any, Any]

MAX_WATCHES = 16
"""Health watches and reflection streams that may run at once. They last as long as their clients like, and must not
take the slots of other calls."""

_NO_RESPONSES: tuple[Any, ...] = ()
"""Yielded by a handler that writes its messages itself. The interceptors around it still need an async generator."""


class StallInterceptor(grpc.ServerInterceptor):
    """Cancels calls to a sync server that send no first message in time, or do not read.

    gRPC sends no status with such a cancellation, so the caller sees CANCELLED without a reason.
    """

    def __init__(self, log: structlog.stdlib.BoundLogger, first_message_seconds: float, stall_seconds: float) -> None:
        """Create the interceptor and start its threads; `close` ends them."""
        self._log = log
        self._first = Alarm(first_message_seconds)
        self._stall = Alarm(stall_seconds)
        self._watches = threading.BoundedSemaphore(MAX_WATCHES)

    def close(self) -> None:
        """End the threads. No call is cancelled afterwards."""
        self._first.close()
        self._stall.close()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap the handler of a call as a handler of a request stream, so that waiting for messages happens here."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.response_streaming:
            streaming = self._streaming(handler, method)
            return grpc.stream_stream_rpc_method_handler(
                streaming, handler.request_deserializer, handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            self._unary(handler, method), handler.request_deserializer, handler.response_serializer
        )

    def _unary(self, handler: _Handler, method: str) -> Callable[[Iterator[Any], grpc.ServicerContext], Any]:
        def patient(messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
            request = self._request(handler, messages, context, method)
            return behaviour_of(handler)(request, context)

        return patient

    def _streaming(
        self, handler: _Handler, method: str
    ) -> Callable[[Iterator[Any], grpc.ServicerContext], Iterator[Any]]:
        def patient(messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            with self._place(method):
                request = self._request(handler, messages, context, method)
                for response in behaviour_of(handler)(request, context):
                    with self._stall.over(self._cancel(context, method, "the caller does not read")):
                        yield response

        return patient

    def _request(self, handler: _Handler, messages: Iterator[Any], context: grpc.ServicerContext, method: str) -> Any:
        """Wait for the first message. Return the handler's argument: that message, or the iterator of all messages."""
        with self._first.over(self._cancel(context, method, "no first message came")):
            first = next(messages, None)
        if handler.request_streaming:
            return _chained(first, messages)
        if first is None:
            raise _no_message()
        return first

    @contextmanager
    def _place(self, method: str) -> Iterator[None]:
        if is_ours(method):
            yield
            return
        if not self._watches.acquire(blocking=False):
            raise _too_many_watches()
        try:
            yield
        finally:
            self._watches.release()

    def _cancel(self, context: grpc.ServicerContext, method: str, why: str) -> Callable[[], None]:
        def cancel() -> None:
            self._log.warning("call cancelled", method=method, why=why, peer=context.peer())
            context.cancel()

        return cancel


class AioStallInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls to an asyncio server that send no first message in time, or do not read.

    It frees the call's resources at once. The call itself stays until its caller reads on, and gets the reason, or
    disconnects: grpc.aio cannot cut a call off.
    """

    def __init__(self, log: structlog.stdlib.BoundLogger, first_message_seconds: float, stall_seconds: float) -> None:
        """Create the interceptor."""
        self._log = log
        self._first_seconds, self._stall_seconds = first_message_seconds, stall_seconds
        self._stall = AioAlarm(stall_seconds)
        self._watches = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap the handler of a call; see `StallInterceptor`."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        call = behaviour_of(handler)

        async def unary(messages: AsyncIterator[Any], context: Any) -> Any:
            async with _sending_failures(method, context):
                return await call(await self._request(handler, messages), context)

        async def streaming(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async with (
                _sending_failures(method, context),
                self._place(method),
                contextlib.aclosing(call(await self._request(handler, messages), context)) as responses,
            ):
                async for response in responses:
                    await self._write(response, context, method)
            for response in _NO_RESPONSES:
                yield response

        async def writing(messages: AsyncIterator[Any], context: Any) -> None:
            async with _sending_failures(method, context), self._place(method):
                await call(await self._request(handler, messages), context)

        if handler.response_streaming:
            # Health watches are coroutines that write their answers to the context.
            return grpc.stream_stream_rpc_method_handler(
                writing if inspect.iscoroutinefunction(call) else streaming,
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.stream_unary_rpc_method_handler(unary, handler.request_deserializer, handler.response_serializer)

    @asynccontextmanager
    async def _place(self, method: str) -> AsyncIterator[None]:
        if is_ours(method):
            yield
            return
        if self._watches >= MAX_WATCHES:
            raise _too_many_watches()
        self._watches += 1
        try:
            yield
        finally:
            self._watches -= 1

    async def _request(self, handler: _Handler, messages: AsyncIterator[Any]) -> Any:
        """Wait for the first message. Return the handler's argument: that message, or the iterator of all messages."""
        incoming: Any = aiter(messages)
        first = None
        with contextlib.suppress(StopAsyncIteration):
            try:
                first = await asyncio.wait_for(anext(incoming), self._first_seconds)
            except asyncio.TimeoutError:
                raise _stalled(
                    f"No message arrived within {self._first_seconds:g} s (--first-message-seconds), so the service "
                    "ended the call. Send the first message when you start the call."
                ) from None
        if handler.request_streaming:
            return _aio_chained(first, incoming)
        await incoming.aclose()
        if first is None:
            raise _no_message()
        return first

    async def _write(self, response: Any, context: Any, method: str) -> None:
        """Send a message, waiting for the caller to accept it for at most the stall timeout.

        Raises:
            Failure: CALLER_STALLED after the timeout.
        """
        task, timed_out = asyncio.current_task(), []

        def time_out() -> None:
            timed_out.append(True)
            if task is not None:
                task.cancel()

        try:
            with self._stall.over(time_out):
                await context.write(response)
        except asyncio.CancelledError:
            if not timed_out:  # the caller has disconnected
                raise
            if sys.version_info >= (3, 11) and task is not None:
                task.uncancel()
            self._log.warning("call ended", method=method, why="the caller does not read", peer=context.peer())
            raise _stalled(
                f"The caller read nothing for {self._stall_seconds:g} s (--stall-seconds), so the service ended the "
                "call. Read the stream continuously, or start the call again."
            ) from None


@asynccontextmanager
async def _sending_failures(method: str, context: Any) -> AsyncIterator[None]:
    """Send a Failure to the caller of health or reflection, for which `AioErrorInterceptor` does not do so."""
    try:
        yield
    except Failure as failure:
        if is_ours(method):
            raise
        status = failure.to_status()
        await context.abort(status.code, status.details, status.trailing_metadata)


def _no_message() -> Failure:
    message = "The call ended without its request message. Send exactly one."
    return Failure(Reason.ERROR_REASON_INVALID_FIELD, message, field="")


def _stalled(message: str) -> Failure:
    return Failure(Reason.ERROR_REASON_CALLER_STALLED, message)


def _too_many_watches() -> Failure:
    return Failure(
        Reason.ERROR_REASON_LIMIT_REACHED,
        f"The service already runs {MAX_WATCHES} health watches and reflection streams, its limit. Use Check instead, "
        "or try again later.",
        limit="watches",
    )


async def _aio_chained(first: Any, rest: Any) -> AsyncIterator[Any]:
    async with contextlib.aclosing(rest):
        if first is not None:
            yield first
            async for message in rest:
                yield message


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    if first is not None:
        yield first
        yield from rest
