"""Traces with OpenTelemetry, across client, inference service and store: off, and not even imported, unless asked for.

A service traces when it is told where to (`--otel-endpoint`, or OpenTelemetry's own OTEL_EXPORTER_OTLP_ENDPOINT). The
client traces when its program does: it takes the tracer provider that the program has set before it connects. What one
says to the other is the W3C's `traceparent`, in the metadata of each call.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from residuum.rpc.extras import install_extra
from residuum.rpc.interceptors import around_aio_calls, around_calls, with_aio_metadata, with_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from opentelemetry.context import Context
    from opentelemetry.trace import Span

    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Details = grpc.HandlerCallDetails

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""OpenTelemetry's own name for where traces go."""

SCOPE = "residuum"


class TracingError(RuntimeError):
    """Traces are asked for and cannot be sent."""


def is_on() -> bool:
    """Tell whether this process traces: it has set a tracer provider."""
    trace = sys.modules.get("opentelemetry.trace")
    return trace is not None and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def is_wanted(endpoint: str) -> bool:
    """Tell whether a program with this setting is to trace."""
    return bool(endpoint or os.environ.get(ENDPOINT_VARIABLE))


def start_tracing(service: str, endpoint: str = "") -> Callable[[], None]:
    """Send the traces of this process by OTLP over gRPC; return what sends the last of them, at the end.

    Args:
        service: The `service.name`, unless OTEL_SERVICE_NAME says another.
        endpoint: Where to, such as "http://localhost:4317". Empty: where the environment says, if it does.

    Raises:
        TracingError: The packages for it are not installed.
    """
    if not is_wanted(endpoint):
        return lambda: None
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingError(f"otel-endpoint: to send traces, {install_extra('otel')}: {error}") from error
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: service}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint or None)))
    trace.set_tracer_provider(provider)
    return provider.shutdown


@contextlib.contextmanager
def span(name: str, **attributes: str | int) -> Iterator[None]:
    """Trace what is done in the context, if this process traces."""
    if not is_on():
        yield
        return
    from opentelemetry import trace

    with trace.get_tracer(SCOPE).start_as_current_span(name, attributes=attributes):
        yield


def add_event(name: str, **attributes: str | int) -> None:
    """Note that something happened, in the span that is being traced, if any is."""
    if is_on():
        _current().add_event(name, attributes)


def set_attributes(**attributes: str | int) -> None:
    """Say more of what is being traced, if anything is."""
    if is_on():
        _current().set_attributes({f"{SCOPE}.{name}": value for name, value in attributes.items()})


def current_context() -> Context | None:
    """Return where in which trace the caller stands, for `record_span`; None: nowhere."""
    if not is_on() or not _current().get_span_context().is_valid:
        return None
    from opentelemetry import context

    return context.get_current()


def record_span(name: str, parent: Context, start_ns: int, end_ns: int, **attributes: str | int) -> None:
    """Trace something that has been done in the meantime, for a call that has long been answered.

    Args:
        name: What was done.
        parent: Where it belongs; see `current_context`.
        start_ns: When it began, in nanoseconds since 1970.
        end_ns: When it ended.
        attributes: What else there is to say.
    """
    from opentelemetry import trace

    made = trace.get_tracer(SCOPE).start_span(name, parent, start_time=start_ns, attributes=attributes)
    made.end(end_ns)


def _current() -> Span:
    from opentelemetry import trace

    return trace.get_current_span()


def client_interceptor() -> grpc.UnaryUnaryClientInterceptor:
    """Return what traces the calls of a sync channel."""

    def traced(continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        made, trace = _started(details.method)
        call = continuation(with_metadata(details, trace), request)
        call.add_done_callback(lambda done: end_span(made, done.code()))
        return call

    return around_calls(traced)


def aio_client_interceptors() -> Sequence[grpc.aio.ClientInterceptor]:
    """Return what traces the calls of an asyncio channel."""

    async def traced(continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        made, trace = _started(details.method.decode() if isinstance(details.method, bytes) else details.method)
        call = await continuation(with_aio_metadata(details, trace), request)
        call.add_done_callback(lambda done: end_span(made, _aio_code(done)))
        return call

    return around_aio_calls(traced)


def _started(method: str) -> tuple[Span, list[tuple[str, str]]]:
    """Start the span of a call that is to be made; return it with the metadata that name it to the other side."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    service, _, name = method.strip("/").rpartition("/")
    facts = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
    made = trace.get_tracer(SCOPE).start_span(method.strip("/"), kind=trace.SpanKind.CLIENT, attributes=facts)
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(made))
    return made, list(carrier.items())


def end_span(made: Span, code: grpc.StatusCode | None) -> None:
    """End the span of a call with the code that the call ended with."""
    from opentelemetry.trace import StatusCode

    code = code or grpc.StatusCode.OK
    made.set_attribute("rpc.grpc.status_code", code.value[0])
    if code is not grpc.StatusCode.OK:
        made.set_status(StatusCode.ERROR, code.name)
    made.end()


def _aio_code(call: Any) -> grpc.StatusCode | None:
    """Return the code of a call that is done.

    Its `code` is a coroutine. It has nothing to wait for, so it ends at the first step, and no task is needed, which
    might outlive the event loop.
    """
    coroutine = call.code()
    try:
        coroutine.send(None)
    except StopIteration as end:
        code: grpc.StatusCode = end.value
        return code
    coroutine.close()  # it would wait: the call is done in a way that this grpc does not report
    return grpc.StatusCode.CANCELLED if call.cancelled() else None
