"""Serving: health, reflection, error translation and a graceful stop, the same for both services."""

from __future__ import annotations

import contextlib
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

    _Handler = grpc.RpcMethodHandler[Any, Any]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

OK = "OK"
"""The outcome of a call that did not fail."""

CANCELLED = "CANCELLED"
"""The outcome of a call whose caller had gone before its end."""

CallEnded = Callable[[str, str, float], None]
"""Is told of each call of ours that has ended: its method, such as "GetStats"; its outcome, OK, CANCELLED or the reason
of its Failure, such as "UNKNOWN_CAPTURE"; and how long it took, in seconds."""


def write_port_file(path: Path, port: int) -> None:
    """Write the port where another program waits for it: all at once, so that it never reads half a number."""
    part = path.with_name(path.name + ".part")
    part.write_text(f"{port}\n")
    part.replace(path)


def add_health_and_reflection(
    server: grpc.Server | grpc.aio.Server,
    service: str,
    health_servicer: health.HealthServicer | health.aio.HealthServicer,
) -> None:
    """Serve grpc.health.v1 and server reflection beside a service of the given full name."""
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


def internal_failure(log: structlog.stdlib.BoundLogger, method: str) -> Failure:
    """Log the exception that is being handled, and return the Failure that may be sent instead of it."""
    incident = secrets.token_hex(4)
    log.exception("call failed", method=method, incident=incident)  # noqa: LOG004 - called while one is handled
    return Failure(
        Reason.ERROR_REASON_INTERNAL,
        f"A fault of the server; its log says more under incident {incident}.",
        incident=incident,
    )


class _Call:
    """A call that runs."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.outcome = CANCELLED  # unless it comes to an end of its own


class _Watch:
    """What both interceptors do around each call."""

    def __init__(self, log: structlog.stdlib.BoundLogger, on_end: CallEnded | None = None) -> None:
        """Make an interceptor.

        Args:
            log: Where the faults of handlers go.
            on_end: Is told of each call.
        """
        self._log = log
        self._on_end = on_end

    @contextlib.contextmanager
    def _watching(self, method: str) -> Iterator[_Call]:
        """Tell how a call ended, and forget what it bound to its log lines."""
        call = _Call(method)
        start = time.monotonic()
        with request_scope():
            try:
                yield call
            finally:
                if self._on_end is not None and is_ours(method):
                    self._on_end(method.rpartition("/")[2], call.outcome, time.monotonic() - start)

    def _failure(self, error: Exception, call: _Call) -> Failure:
        failure = error if isinstance(error, Failure) else internal_failure(self._log, call.method)
        call.outcome = failure.reason_name
        return failure


class ErrorInterceptor(_Watch, grpc.ServerInterceptor):
    """Turns what handlers of a sync server raise into a status; see `residuum.rpc.errors`."""

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
            with self._watching(method) as watched:
                try:
                    response = call(request, context)
                except Exception as error:  # noqa: BLE001 - the last place that can answer the caller
                    self._abort(error, context, watched)
                watched.outcome = OK
                return response

        return guarded

    def _streaming(self, call: Callable[..., Any], method: str) -> Callable[..., Any]:
        def guarded(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._watching(method) as watched:
                try:
                    yield from call(request, context)
                except Exception as error:  # noqa: BLE001 - the last place that can answer the caller
                    self._abort(error, context, watched)
                watched.outcome = OK

        return guarded

    def _abort(self, error: Exception, context: grpc.ServicerContext, call: _Call) -> NoReturn:
        if _is_abort(error):
            raise error
        context.abort_with_status(self._failure(error, call).to_status())
        raise AssertionError("abort_with_status always raises")


class AioErrorInterceptor(_Watch, grpc.aio.ServerInterceptor):
    """Turns what handlers of an asyncio server raise into a status; see `residuum.rpc.errors`."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap the handler of a call. Handlers must be coroutines or async generators."""
        handler = await continuation(handler_call_details)
        if handler is None or not is_ours(handler_call_details.method):
            return handler
        method = handler_call_details.method
        if handler.response_streaming:
            return handler_of(handler, self._streaming(_aio_decoding(handler), method), None)
        return handler_of(handler, self._unary(_aio_decoding(handler), method), None)

    def _unary(self, call: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Any]:
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
    """End a call. It is over by then, and counted: who does not read may never take the status.

    gRPC's context keeps the error that this raises, and that the frames that it passes: so they must not have the
    context, nor the failure, whose frames do; see `_aio_decoding`.
    """
    aborting = context.abort(status.code, status.details, status.trailing_metadata)
    del context
    await aborting
    raise AssertionError("abort always raises")


def _is_abort(error: Exception) -> bool:
    # The sync API raises a bare Exception() after abort(); grpc offers no type to tell it by.
    return type(error) is Exception and not error.args


def _call_of(handler: _Handler) -> Callable[..., Any]:
    call = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    assert call is not None  # noqa: S101 - a handler without a behaviour cannot be registered
    return call


def _decoding(handler: _Handler) -> Callable[..., Any]:
    """Return a sync handler's call, taking messages as bytes: so that one that cannot be parsed is answered by us.

    gRPC itself would answer INTERNAL (sync) or UNKNOWN (asyncio), as if the server had a fault.
    """
    call, decode = _call_of(handler), _decoder(handler)
    if handler.request_streaming:
        return lambda messages, context: call(map(decode, messages), context)
    return lambda message, context: call(decode(message), context)


def _aio_decoding(handler: _Handler) -> Callable[..., Any]:
    """Return an asyncio handler's call, taking messages as bytes; see `_decoding`."""
    call, decode = _call_of(handler), _decoder(handler)

    async def decoded(messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        # Unless it is closed, or read to its end, gRPC's iterator and the call refer to each other: then all of the
        # call stays in memory until the garbage collector looks at objects of its age.
        incoming: Any = aiter(messages)
        async with contextlib.aclosing(incoming):
            async for message in incoming:
                yield decode(message)

    if handler.request_streaming:
        return lambda messages, context: call(decoded(messages), context)
    return lambda message, context: call(decode(message), context)


def _decoder(handler: _Handler) -> Callable[[bytes], Any]:
    deserialize = handler.request_deserializer

    def decode(message: bytes) -> Any:
        try:
            return deserialize(message) if deserialize else message
        except DecodeError:
            raise Failure(
                Reason.ERROR_REASON_INVALID_FIELD,
                "The message is not the one that the contract names for this call; it cannot be parsed.",
                field="",
            ) from None

    return decode


def handler_of(like: _Handler, call: Callable[..., Any], deserializer: Callable[[bytes], Any] | None) -> _Handler:
    """Return a handler of the same kind as another, with its serializer, that makes another call."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[like.request_streaming, like.response_streaming]
    return make(call, deserializer, like.response_serializer)
