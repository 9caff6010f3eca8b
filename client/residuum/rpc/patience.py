"""How long a server waits for callers that send nothing, or do not read what is sent to them.

A call that does neither costs a thread or a place all the same, and a reader keeps its capture from expiring. So the
first message must come within a time, and so must the room to send on; else the call is cancelled. Between messages
nobody is hurried: a follower may wait for rows, and a writer for something to write, for as long as they like.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
import grpc.aio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from contextlib import AbstractContextManager
    from typing import Any

    import structlog

    _Handler = grpc.RpcMethodHandler[Any, Any]

_OURS = "/residuum."
MAX_WATCHES = 16
"""Streams of other services than ours (health watches, reflection) that run at once. They last as long as their clients
like, and must not take the places of calls that do something."""

_TOO_MANY_WATCHES = (
    f"At most {MAX_WATCHES} health watches and reflections run at once; ask by Check, or try again later."
)


class Alarm:
    """Rings for whatever takes longer than a time that is the same for all: one thread, however many wait."""

    def __init__(self, seconds: float) -> None:
        """Start the thread."""
        self._seconds = seconds
        self._condition = threading.Condition()
        self._waiting: OrderedDict[object, tuple[float, Callable[[], object]]] = OrderedDict()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="alarm", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, ring: Callable[[], object]) -> Iterator[None]:
        """Call `ring`, in another thread, if the context lasts too long."""
        token = object()
        with self._condition:
            # The thread need not hear of it: it looks again within the time, and nothing is due before. Readers come by
            # here with each chunk.
            self._waiting[token] = time.monotonic() + self._seconds, ring
        try:
            yield
        finally:
            with self._condition:
                self._waiting.pop(token, None)

    def close(self) -> None:
        """End the thread; nothing rings any more."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while (ring := self._next()) is not None:
            ring()

    def _next(self) -> Callable[[], object] | None:
        """Wait until the next one is too long; None: closed."""
        with self._condition:
            while not self._closed:
                now = time.monotonic()
                token, (end, ring) = next(iter(self._waiting.items()), (None, (now + self._seconds, None)))
                if ring is not None and end <= now:
                    del self._waiting[token]
                    return ring
                self._condition.wait(end - now)
        return None


class PatienceInterceptor(grpc.ServerInterceptor):
    """Cancels calls of a sync server that send no first message, or do not read.

    It stands behind the other interceptors: who may not call is refused before a message is waited for.
    """

    def __init__(self, log: structlog.stdlib.BoundLogger, first_message_seconds: float, stall_seconds: float) -> None:
        """Make an interceptor; `close` ends its threads."""
        self._log = log
        self._first = Alarm(first_message_seconds)
        self._stall = Alarm(stall_seconds)
        self._watches = threading.BoundedSemaphore(MAX_WATCHES)

    def close(self) -> None:
        """Cancel nothing any more."""
        self._first.close()
        self._stall.close()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap the handler of a call: also one of a single message waits for it here, as for that of a stream."""
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
            call: Callable[..., Any] | None = handler.unary_unary or handler.stream_unary
            return call(request, context) if call else None

        return patient

    def _streaming(
        self, handler: _Handler, method: str
    ) -> Callable[[Iterator[Any], grpc.ServicerContext], Iterator[Any]]:
        def patient(messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            with self._place(method, context):
                request = self._request(handler, messages, context, method)
                call: Callable[..., Any] | None = handler.unary_stream or handler.stream_stream
                for response in call(request, context) if call else ():
                    with self._stall.over(self._cancel(context, method, "the caller does not read")):
                        yield response

        return patient

    def _request(self, handler: _Handler, messages: Iterator[Any], context: grpc.ServicerContext, method: str) -> Any:
        """Return what a handler is called with: the one message, or all of them."""
        with self._first.over(self._cancel(context, method, "no first message came")):
            first = next(messages, None)
        if handler.request_streaming:
            return _chained(first, messages)
        if first is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The call ended without its message.")
        return first

    @contextmanager
    def _place(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        if method.startswith(_OURS):
            yield
            return
        if not self._watches.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _TOO_MANY_WATCHES)
        try:
            yield
        finally:
            self._watches.release()

    def _cancel(self, context: grpc.ServicerContext, method: str, why: str) -> Callable[[], None]:
        def cancel() -> None:
            self._log.warning("call cancelled", method=method, why=why, peer=context.peer())
            context.cancel()

        return cancel


class AioPatienceInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls of an asyncio server that send no first message. It stands behind the other interceptors."""

    def __init__(self, first_message_seconds: float) -> None:
        """Make an interceptor."""
        self._seconds = first_message_seconds
        self._watches = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap the handler of a call; see `PatienceInterceptor`."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        call: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def unary(messages: AsyncIterator[Any], context: Any) -> Any:
            return await call(await self._request(handler, messages, context), context)

        async def streaming(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            with await self._place(method, context):
                request = await self._request(handler, messages, context)
                async with contextlib.aclosing(call(request, context)) as responses:
                    async for response in responses:
                        yield response

        async def writing(messages: AsyncIterator[Any], context: Any) -> None:
            with await self._place(method, context):
                await call(await self._request(handler, messages, context), context)

        if handler.response_streaming:
            # Health watches write their answers to the context.
            return grpc.stream_stream_rpc_method_handler(
                writing if inspect.iscoroutinefunction(call) else streaming,
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.stream_unary_rpc_method_handler(unary, handler.request_deserializer, handler.response_serializer)

    async def _place(self, method: str, context: Any) -> AbstractContextManager[None]:
        """Take the place of a watch, until the context that is returned ends. Our own methods need none."""
        if method.startswith(_OURS):
            return contextlib.nullcontext()
        if self._watches >= MAX_WATCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _TOO_MANY_WATCHES)
        self._watches += 1
        return self._taken()

    @contextmanager
    def _taken(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._watches -= 1

    async def _request(self, handler: _Handler, messages: AsyncIterator[Any], context: Any) -> Any:
        """Return what a handler is called with: the one message, or all of them."""
        first = await self._first(messages, context)
        if handler.request_streaming:
            return _aio_chained(first, messages)
        if first is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The call ended without its message.")
        return first

    async def _first(self, messages: AsyncIterator[Any], context: Any) -> Any:
        """Return the first message; None if the call ended without one.

        Not by asyncio.wait_for: up to Python 3.11 it waits in a task of its own, in each call.
        """
        task, is_late = asyncio.current_task(), False

        def give_up() -> None:
            nonlocal is_late
            is_late = True
            if task is not None:
                task.cancel()

        timer = asyncio.get_running_loop().call_later(self._seconds, give_up)
        try:
            return await anext(aiter(messages), None)
        except asyncio.CancelledError:
            if not is_late:
                raise  # the caller has gone
            return await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"No message came in {self._seconds:g} s.")
        finally:
            timer.cancel()


async def _aio_chained(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    if first is not None:
        yield first
        async for message in rest:
            yield message


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    if first is not None:
        yield first
        yield from rest
