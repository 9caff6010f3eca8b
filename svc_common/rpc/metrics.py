"""Prometheus metrics: the call metrics of both services, and the HTTP listener that serves all metrics.

Each service creates its own registry instead of using the global one. So metrics of other libraries, such as vLLM's, do
not mix in, and two services in one process (in tests) do not collide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, start_http_server

from residuum.wire.endpoints import parse_endpoint
from svc_common.rpc.serving import OK

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from google.protobuf.descriptor import ServiceDescriptor

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Histogram buckets in seconds, from a short call to a long generation."""


def make_registry() -> CollectorRegistry:
    """Return a registry with the metrics of this process: CPU, memory and open files."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class CallMetrics:
    """Counts the calls of a service. The interceptors of `svc_common.rpc.serving` report each call to `note`."""

    def __init__(self, registry: CollectorRegistry, service: ServiceDescriptor) -> None:
        """Create the metrics of a service in a registry."""
        self._seconds = Histogram(
            "residuum_call_seconds",
            "Duration of calls; of streams, from the first message to the end.",
            ["method"],
            buckets=SECONDS,
            registry=registry,
        )
        self._errors = Counter(
            "residuum_call_errors",
            "Failed calls, by the reason in their ErrorInfo; CANCELLED if the caller had disconnected.",
            ["method", "reason"],
            registry=registry,
        )
        # Prometheus sees an increase only of what was there before: without the 0, no alert fires for the first fault.
        for method in service.methods:
            self._errors.labels(method.name, "INTERNAL")

    def note(self, method: str, outcome: str, seconds: float) -> None:
        """Count an ended call; see `svc_common.rpc.serving.CallEnded`."""
        self._seconds.labels(method).observe(seconds)
        if outcome != OK:
            self._errors.labels(method, outcome).inc()


class MetricsListener:
    """Serves a registry at http://host:port/metrics, in its own threads."""

    def __init__(self, endpoint: str, registry: CollectorRegistry) -> None:
        """Listen on `endpoint`, host:port.

        Raises:
            OSError: The address cannot be listened on.
        """
        host, port = parse_endpoint(endpoint, listening=True)
        self._server: WSGIServer
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), registry)
        except OSError as error:
            raise OSError(f"metrics: cannot listen on {endpoint}: {error}") from error
        self.port = int(self._server.server_port)
        """The port that it listens on, also if `endpoint` has port 0."""

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
