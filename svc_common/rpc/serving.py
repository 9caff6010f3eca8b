"""Serving, shared by both services: health, reflection and error translation."""

from __future__ import annotations

import contextlib
import inspect
import secrets
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from residuum.rpc.errors import Failure, Reason
from residuum.rpc.methods import is_ours
from svc_common.logs import request_scope

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
    from pathlib import Path
    from typing import Any, NoReturn

    import structlog
    from typing_extensions import Self

    _Handler = grpc.RpcMethodHandler[Any, Any]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

OK = "OK"
"""The outcome of a call that did not fail."""

CANCELLED = "CANCELLED"
"""The outcome of a call whose caller disconnected before it ended."""

CallEnded = Callable[[str, str, float], None]
"""Called when a call to a method of ours has ended, with three arguments: its method, such as "GetStats"; its outcome,
OK, CANCELLED or the reason of its Failure, such as "UNKNOWN_CAPTURE"; and its duration in seconds."""


def write_port_file(path: Path, port: int) -> None:
    """Write the port to a file that another program waits for. It appears atomically, never half written."""
    part = path.with_name(path.name + ".part")
    part.write_text(f"{port}\n")
    part.replace(path)


def add_health_and_reflection(
    server: grpc.Server | grpc.aio.Server,
    service: str,
    health_servicer: health.HealthServicer | health.aio.HealthServicer,
) -> None:
    """Add grpc.health.v1 and server reflection to the server of a service, which is given by its full name."""
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


def internal_failure(log: structlog.stdlib.BoundLogger, method: str) -> Failure:
    """Log the exception being handled. Return a Failure to send instead, which reveals only an incident number."""
    incident = secrets.token_hex(4)
    log.exception("call failed", method=method, incident=incident)  # noqa: LOG004 - called while one is handled
    return Failure(
        Reason.ERROR_REASON_INTERNAL,
        f"The server failed unexpectedly. Its log has the details under incident {incident}.",
        incident=incident,
    )


class _Call:
    """A running call. A context that reports how the call ends."""

    def __init__(self, method: str, on_end: CallEnded | None) -> None:
        self.method = method
        self.outcome = CANCELLED  # until the handler returns or raises
        self._on_end = on_end

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._on_end is not None and is_ours(self.method):
            self._on_end(self.method.rpartition("/")[2], self.outcome, time.monotonic() - self._start)


class _CallObserver:
    """The part that both error interceptors share: reporting calls and translating exceptions."""

    def __init__(self, log: structlog.stdlib.BoundLogger, on_end: CallEnded | None = None) -> None:
        """Create an interceptor.

        Args:
            log: Where unexpected exceptions of handlers are logged.
            on_end: Called when a call has ended.
        """
        self._log = log
        self._on_end = on_end

    def _watching(self, method: str) -> _Call:
        return _Call(method, self._on_end)

    def _failure(self, error: Exception, call: _Call) -> Failure:
        failure = error if isinstance(error, Failure) else internal_failure(self._log, call.method)
        call.outcome = failure.reason_name
        return failure


class ErrorInterceptor(_CallObserver, grpc.ServerInterceptor):
    """Translates exceptions of a sync server's handlers into a status; see `residuum.rpc.errors`."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap the handler of a call."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.response_streaming:
            return handler_of(handler, self._streaming(_decoding(handler), method), None)
        return handler_of(handler, self._unary(_decoding(handler), method), None)

    def _unary(self, call: Callable[..., Any], method: str) -> Callable[..., Any]:
        def guarded(request: Any, context: grpc.ServicerContext) -> Any:
            with request_scope(), self._watching(method) as watched:
                try:
                    response = call(request, context)
                except Exception as error:  # noqa: BLE001 - the last place that can answer the caller
                    self._abort(error, context, watched)
                watched.outcome = OK
                return response

        return guarded

    def _streaming(self, call: Callable[..., Any], method: str) -> Callable[..., Any]:
        def guarded(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with request_scope(), self._watching(method) as watched:
                try:
                    yield from call(request, context)
                except Exception as error:  # noqa: BLE001 - the last place that can answer the caller
                    self._abort(error, context, watched)
                watched.outcome = OK

        return guarded

    def _abort(self, error: Exception, context: grpc.ServicerContext, call: _Call) -> NoReturn:
        # Of other services' methods, send only failures that the interceptors raise. gRPC handles the rest: if a caller
        # drops a reflection stream, the handler raises the end of its request iterator, which is no failure.
        if _is_end(error) or not (is_ours(call.method) or isinstance(error, Failure)):
            raise error
        context.abort_with_status(self._failure(error, call).to_status())
        raise AssertionError("abort_with_status always raises")


class AioErrorInterceptor(_CallObserver, grpc.aio.ServerInterceptor):
    """Translates exceptions of an asyncio server's handlers into a status; see `residuum.rpc.errors`.

    The log fields that a call binds end with the call's task.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap the handler of a call. Handlers must be coroutines or async generators."""
        handler = await continuation(handler_call_details)
        if handler is None or not is_ours(handler_call_details.method):
            return handler
        method, call = handler_call_details.method, behaviour_of(handler)
        guarded = self._streaming if inspect.isasyncgenfunction(call) else self._unary
        return handler_of(handler, guarded(_aio_decoding(handler), method), None)

    def _unary(self, call: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Any]:
        """Wrap a coroutine: of a call with one response, or one that writes its responses to the context."""

        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            with self._watching(method) as watched:
                try:
                    response = await call(request, context)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:  # noqa: BLE001 - the last place that can answer the caller
                    status = self._failure(error, watched).to_status()
                else:
                    watched.outcome = OK
                    return response
            aborting = _abort(context, status)
            del request, context
            return await aborting

        return guarded

    def _streaming(self, call: Callable[..., AsyncGenerator[Any, None]], method: str) -> Callable[..., Any]:
        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            with self._watching(method) as watched:
                try:
                    async with contextlib.aclosing(call(request, context)) as responses:
                        async for response in responses:
                            yield response
                except grpc.aio.AbortError:
                    raise
                except Exception as error:  # noqa: BLE001 - the last place that can answer the caller
                    status = self._failure(error, watched).to_status()
                else:
                    watched.outcome = OK
                    return
            aborting = _abort(context, status)
            del request, context
            await aborting

        return guarded


async def _abort(context: grpc.aio.ServicerContext[Any, Any], status: grpc.Status) -> NoReturn:
    """End a call with a status. Report the call before this: a caller that does not read may never receive the status.

    gRPC's context keeps the error that this raises, and the error keeps the frames that it passes. So these frames must
    not refer to the context, nor to the failure, whose frames refer to it. Otherwise the call stays in memory until a
    full garbage collection.
    """
    aborting = context.abort(status.code, status.details, status.trailing_metadata)
    del context
    await aborting
    raise AssertionError("abort always raises")


def _is_end(error: Exception) -> bool:
    # The sync API raises a bare Exception() after abort(), and a bare RpcError() from the messages of a caller that has
    # left; grpc has no types of its own for them.
    return type(error) in (Exception, grpc.RpcError) and not error.args


def _decoding(handler: _Handler) -> Callable[..., Any]:
    """Return a sync handler's behaviour that takes messages as bytes and answers malformed ones with INVALID_ARGUMENT.

    gRPC itself would answer INTERNAL (sync) or UNKNOWN (asyncio), as if the server were at fault.
    """
    call, decode = behaviour_of(handler), decoder_of(handler)
    if handler.request_streaming:
        return lambda messages, context: call(map(decode, messages), context)
    return lambda message, context: call(decode(message), context)


def _aio_decoding(handler: _Handler) -> Callable[..., Any]:
    """Return an asyncio handler's behaviour that takes messages as bytes; see `_decoding`."""
    call, decode = behaviour_of(handler), decoder_of(handler)
    if handler.request_deserializer is None:
        return call

    async def decoded(messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        # Always close gRPC's iterator. Unless it is closed or read to its end, it and the call refer to each other, and
        # the whole call stays in memory until a full garbage collection.
        incoming: Any = aiter(messages)
        async with contextlib.aclosing(incoming):
            async for message in incoming:
                yield decode(message)

    if handler.request_streaming:
        return lambda messages, context: call(decoded(messages), context)
    return lambda message, context: call(decode(message), context)


def decoder_of(handler: _Handler) -> Callable[[bytes], Any]:
    """Return a function that parses the messages of a handler, and raises a Failure for a malformed one."""
    deserialize = handler.request_deserializer

    def decode(message: bytes) -> Any:
        try:
            return deserialize(message) if deserialize else message
        except DecodeError:
            raise Failure(
                Reason.ERROR_REASON_INVALID_FIELD,
                "The message cannot be parsed as the type that this method takes. Generate the client from the same "
                "version of the .proto files.",
                field="",
            ) from None

    return decode


def behaviour_of(handler: _Handler) -> Callable[..., Any]:
    """Return the function that answers the calls of a handler, of whichever of the four kinds it is."""
    call = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    assert call is not None  # noqa: S101 - a handler without a behaviour cannot be registered
    return call


def handler_of(like: _Handler, call: Callable[..., Any], deserializer: Callable[[bytes], Any] | None) -> _Handler:
    """Return a handler with the kind and the response serializer of another handler.

    Args:
        like: The handler whose kind and serializer are kept.
        call: The new handler's behaviour.
        deserializer: The new handler's request deserializer; None passes bytes.
    """
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[like.request_streaming, like.response_streaming]
    return make(call, deserializer, like.response_serializer)
