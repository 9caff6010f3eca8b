"""Traces the calls that a service answers, as part of the callers' traces; see `residuum.rpc.tracing`."""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from residuum.rpc.methods import is_ours
from residuum.rpc.tracing import SCOPE, end_span
from svc_common.rpc.serving import behaviour_of, handler_of, is_cancellation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from typing import Any

    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Details = grpc.HandlerCallDetails


@contextlib.contextmanager
def _serving(details: _Details, context: Any) -> Iterator[None]:
    """Record a served call as a span in its caller's trace."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}
    parent = TraceContextTextMapPropagator().extract(carrier)
    service, _, name = details.method.strip("/").rpartition("/")
    facts = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
    made = trace.get_tracer(SCOPE).start_span(
        details.method.strip("/"), parent, kind=trace.SpanKind.SERVER, attributes=facts
    )
    code = grpc.StatusCode.CANCELLED  # until the handler returns or raises
    try:
        with trace.use_span(made, record_exception=False, set_status_on_exception=False):
            yield
        code = grpc.StatusCode.OK
    except Exception as error:
        if not is_cancellation(error):
            code = _code_of(context)
        raise
    finally:
        end_span(made, code)


def _code_of(context: Any) -> grpc.StatusCode:
    code = context.code()
    if isinstance(code, int):  # grpc.aio returns an int
        return next((known for known in grpc.StatusCode if known.value[0] == code), grpc.StatusCode.UNKNOWN)
    return code or grpc.StatusCode.UNKNOWN


class TracingInterceptor(grpc.ServerInterceptor):
    """Traces the calls to a sync server. It must be the first interceptor."""

    def intercept_service(
        self, continuation: Callable[[_Details], _Handler | None], handler_call_details: _Details
    ) -> _Handler | None:
        """Wrap the handler of a call of ours."""
        handler, details = continuation(handler_call_details), handler_call_details
        if handler is None or not is_ours(details.method):
            return handler
        call = behaviour_of(handler)

        def unary(request: Any, context: Any) -> Any:
            with _serving(details, context):
                return call(request, context)

        def streaming(request: Any, context: Any) -> Iterator[Any]:
            with _serving(details, context):
                yield from call(request, context)

        return handler_of(handler, streaming if handler.response_streaming else unary, handler.request_deserializer)


class AioTracingInterceptor(grpc.aio.ServerInterceptor):
    """Traces the calls to an asyncio server. It must be the first interceptor."""

    async def intercept_service(
        self, continuation: Callable[[_Details], Awaitable[_Handler | None]], handler_call_details: _Details
    ) -> _Handler | None:
        """Wrap the handler of a call of ours."""
        handler, details = await continuation(handler_call_details), handler_call_details
        if handler is None or not is_ours(details.method):
            return handler
        call = behaviour_of(handler)

        async def unary(request: Any, context: Any) -> Any:
            with _serving(details, context):
                return await call(request, context)

        async def streaming(request: Any, context: Any) -> AsyncIterator[Any]:
            with _serving(details, context):
                async with contextlib.aclosing(call(request, context)) as responses:
                    async for response in responses:
                        yield response

        # A coroutine with several responses writes them to the context.
        traced = streaming if inspect.isasyncgenfunction(call) else unary
        return handler_of(handler, traced, handler.request_deserializer)
