"""OpenTelemetry traces across client, inference service and store. OpenTelemetry is imported only if tracing is on.

A service traces if it has an endpoint for traces: `--otel-endpoint`, or OpenTelemetry's OTEL_EXPORTER_OTLP_ENDPOINT.
The client traces if its program set a tracer provider before the client connects. The metadata of each call carries the
trace as W3C `traceparent`.
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
"""OpenTelemetry's environment variable for the endpoint of traces."""

SCOPE = "residuum"


class TracingError(RuntimeError):
    """Tracing is requested, but traces cannot be sent."""


def is_on() -> bool:
    """Tell whether this process traces: whether it has set a tracer provider."""
    trace = sys.modules.get("opentelemetry.trace")
    return trace is not None and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def is_wanted(endpoint: str) -> bool:
    """Tell whether the setting or the environment requests tracing."""
    return bool(endpoint or os.environ.get(ENDPOINT_VARIABLE))


def start_tracing(service: str, endpoint: str = "") -> Callable[[], None]:
    """Start sending the traces of this process by OTLP over gRPC, if the setting or the environment requests it.

    Args:
        service: The `service.name`, unless OTEL_SERVICE_NAME is set.
        endpoint: The endpoint for traces, such as "http://localhost:4317". Empty: that of the environment, if any.

    Returns:
        A function to call at the end of the process. It sends the remaining traces.

    Raises:
        TracingError: OpenTelemetry's packages are not installed, or they refuse one of their variables.
    """
    if not is_wanted(endpoint):
        return lambda: None
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: service}
        provider = TracerProvider(resource=Resource.create(named))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint or None)))
    except ImportError as error:
        raise TracingError(f"otel-endpoint: to send traces, {install_extra('otel')}: {error}") from error
    except Exception as error:  # it raises what it likes for a bad variable, also on import
        raise TracingError(
            f"traces cannot be sent: {error or type(error).__name__}. Check the environment variables that begin with "
            "OTEL_."
        ) from error
    trace.set_tracer_provider(provider)
    return provider.shutdown


@contextlib.contextmanager
def span(name: str, **attributes: str | int) -> Iterator[None]:
    """Trace the code in the with-block as a span, if this process traces."""
    if not is_on():
        yield
        return
    from opentelemetry import trace

    with trace.get_tracer(SCOPE).start_as_current_span(name, attributes=attributes):
        yield


def add_event(name: str, **attributes: str | int) -> None:
    """Add an event to the current span, if there is one."""
    if is_on():
        _current().add_event(name, attributes)


def set_attributes(**attributes: str | int) -> None:
    """Set attributes of the current span, if there is one. Their names get the prefix `residuum.`."""
    if is_on():
        _current().set_attributes({f"{SCOPE}.{name}": value for name, value in attributes.items()})


def current_context() -> Context | None:
    """Return the current context for `record_span`; None if there is no current span."""
    if not is_on() or not _current().get_span_context().is_valid:
        return None
    from opentelemetry import context

    return context.get_current()


def record_span(name: str, parent: Context, start_ns: int, end_ns: int, **attributes: str | int) -> None:
    """Record a span that has ended, such as work that went on after its call was answered.

    Args:
        name: The span's name.
        parent: The context of the parent span; see `current_context`.
        start_ns: The start time, in nanoseconds since 1970.
        end_ns: The end time, in nanoseconds since 1970.
        attributes: The span's attributes.
    """
    from opentelemetry import trace

    made = trace.get_tracer(SCOPE).start_span(name, parent, start_time=start_ns, attributes=attributes)
    made.end(end_ns)


def _current() -> Span:
    from opentelemetry import trace

    return trace.get_current_span()


def client_interceptor() -> grpc.UnaryUnaryClientInterceptor:
    """Return an interceptor that traces the calls of a sync channel."""

    def traced(continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        made, trace = _started(details.method)
        call = continuation(with_metadata(details, trace), request)
        call.add_done_callback(lambda done: end_span(made, done.code()))
        return call

    return around_calls(traced)


def aio_client_interceptors() -> Sequence[grpc.aio.ClientInterceptor]:
    """Return interceptors that trace the calls of an asyncio channel."""

    async def traced(continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        made, trace = _started(details.method.decode() if isinstance(details.method, bytes) else details.method)
        call = await continuation(with_aio_metadata(details, trace), request)
        call.add_done_callback(lambda done: end_span(made, _aio_code(done)))
        return call

    return around_aio_calls(traced)


def _started(method: str) -> tuple[Span, list[tuple[str, str]]]:
    """Start the span of a call. Return it, and the metadata that pass it to the server."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    service, _, name = method.strip("/").rpartition("/")
    facts = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
    made = trace.get_tracer(SCOPE).start_span(method.strip("/"), kind=trace.SpanKind.CLIENT, attributes=facts)
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(made))
    return made, list(carrier.items())


def end_span(made: Span, code: grpc.StatusCode | None) -> None:
    """End the span of a call with the call's status code."""
    from opentelemetry.trace import StatusCode

    code = code or grpc.StatusCode.OK
    made.set_attribute("rpc.grpc.status_code", code.value[0])
    if code is not grpc.StatusCode.OK:
        made.set_status(StatusCode.ERROR, code.name)
    made.end()


def _aio_code(call: Any) -> grpc.StatusCode | None:
    """Return the status code of a call that has ended.

    `call.code()` is a coroutine, but for an ended call it does not wait. So one step runs it to its end. A task could
    outlive the event loop.
    """
    coroutine = call.code()
    try:
        coroutine.send(None)
    except StopIteration as end:
        code: grpc.StatusCode = end.value
        return code
    coroutine.close()  # it would wait, because this version of grpc does not know the code
    return grpc.StatusCode.CANCELLED if call.cancelled() else None
