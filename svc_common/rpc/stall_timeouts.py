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
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from residuum.rpc.errors import Failure, Reason
from residuum.rpc.methods import is_ours
from svc_common.rpc.alarms import AioAlarm, Alarm
from svc_common.rpc.serving import behaviour_of, decoder_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    import structlog

    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Answer = Callable[[AsyncIterator[Any], Any], Awaitable[Any]]
    """Takes a call's messages and its context."""

MAX_WATCHES = 16
"""Health watches and reflection streams that may run at once. They last as long as their clients like, and must not
take the slots of other calls."""


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
        self._first, self._stall = AioAlarm(first_message_seconds), AioAlarm(stall_seconds)
        self._watches = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap the handler of a call as a coroutine; see `StallInterceptor`. It writes streamed responses itself."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        call, deserializer = behaviour_of(handler), handler.request_deserializer
        request: _Answer = self._first_and_rest
        if not handler.request_streaming:
            request = self._only_message
            if is_ours(method):  # the interceptor of `serving` makes gRPC pass bytes
                deserializer, request = None, self._decoded(decoder_of(handler))

        async def answered(messages: AsyncIterator[Any], context: Any) -> Any:
            return await call(await request(messages, context), context)

        async def written(messages: AsyncIterator[Any], context: Any) -> None:
            async with contextlib.aclosing(call(await request(messages, context), context)) as responses:
                unread = _Timeout(self._stall, lambda: self._not_read(context, method))
                async for response in responses:
                    with unread:
                        await context.write(response)

        # Health watches are coroutines that write their answers to the context.
        answer: _Answer = written if handler.response_streaming and not inspect.iscoroutinefunction(call) else answered
        if not is_ours(method):
            answer = self._of_others(answer, handler)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(answer, deserializer, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(answer, deserializer, handler.response_serializer)

    def _of_others(self, answer: _Answer, handler: _Handler) -> _Answer:
        """Wrap the behaviour of health or reflection: `AioErrorInterceptor` does not send its failures."""

        async def answered(messages: AsyncIterator[Any], context: Any) -> Any:
            try:
                with self._place() if handler.response_streaming else contextlib.nullcontext():
                    return await answer(messages, context)
            except Failure as failure:
                status = failure.to_status()
                return await context.abort(status.code, status.details, status.trailing_metadata)

        return answered

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._watches >= MAX_WATCHES:
            raise _too_many_watches()
        self._watches += 1
        try:
            yield
        finally:
            self._watches -= 1

    def _decoded(self, decode: Callable[[bytes], Any]) -> _Answer:
        async def decoded(messages: AsyncIterator[Any], context: Any) -> Any:
            return decode(await self._only_message(messages, context))

        return decoded

    async def _only_message(self, _messages: AsyncIterator[Any], context: Any) -> Any:
        """Wait for the message of a call that has one."""
        # Not by gRPC's iterator, which is an async generator: reading from the context takes a fraction of the time.
        with _Timeout(self._first, self._not_sent):
            message = await context.read()
        if message is grpc.aio.EOF:
            raise _no_message()
        return message

    async def _first_and_rest(self, messages: AsyncIterator[Any], _context: Any) -> AsyncIterator[Any]:
        """Wait for the first message of a stream. Return the iterator of all messages."""
        incoming: Any = aiter(messages)
        first = None
        with contextlib.suppress(StopAsyncIteration), _Timeout(self._first, self._not_sent):
            first = await anext(incoming)
        return _aio_chained(first, incoming)

    def _not_sent(self) -> Failure:
        return _stalled(
            f"No message arrived within {self._first_seconds:g} s (--first-message-seconds), so the service ended the "
            "call. Send the first message when you start the call."
        )

    def _not_read(self, context: Any, method: str) -> Failure:
        self._log.warning("call ended", method=method, why="the caller does not read", peer=context.peer())
        return _stalled(
            f"The caller read nothing for {self._stall_seconds:g} s (--stall-seconds), so the service ended the call. "
            "Read the stream continuously, or start the call again."
        )


class _Timeout:
    """A context in which the current task waits for at most an alarm's time.

    It can be entered again, so each message of a call costs no object. Nothing that it has refers to it: a cycle would
    keep the call in memory until a full garbage collection.
    """

    def __init__(self, alarm: AioAlarm, failure: Callable[[], Failure]) -> None:
        """Raise what `failure` returns when the time is over. Create it in the task that enters it."""
        self._alarm, self._failure = alarm, failure
        self._task = asyncio.current_task()
        self._timed_out = False

    def _time_out(self) -> None:
        self._timed_out = True
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> None:
        self._alarm.start(self, self._time_out)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self._alarm.stop(self)
        if self._timed_out and isinstance(error, asyncio.CancelledError):  # otherwise the caller has disconnected
            if sys.version_info >= (3, 11) and self._task is not None:
                self._task.uncancel()
            raise self._failure() from None


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
