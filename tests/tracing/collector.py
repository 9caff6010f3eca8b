"""A trace collector like OpenTelemetry's: OTLP over gRPC, on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

DEADLINE = 60.0


@dataclass
class Span:
    """The fields of a span that tests check."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, str | int]
    events: list[str] = field(default_factory=list)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the received spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._came = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request, context):
        with self._came:
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_span(service, item) for item in scope.spans]
            self._came.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, find: Callable[[list[Span]], object]) -> object:
        """Wait until `find` returns a result for all spans; return it."""
        with self._came:
            assert self._came.wait_for(lambda: find(self.spans), DEADLINE), [
                (span.service, span.name) for span in self.spans
            ]
            return find(self.spans)

    def clear(self) -> None:
        """Forget the spans."""
        with self._came:
            self.spans.clear()

    def close(self) -> None:
        self._server.stop(0).wait()


def _span(service, item) -> Span:
    return Span(
        service, item.name, item.trace_id.hex(), item.span_id.hex(), item.parent_span_id.hex(),
        _attributes(item.attributes), [event.name for event in item.events],
    )  # fmt: skip


def _attributes(items) -> dict[str, str | int]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in items}
