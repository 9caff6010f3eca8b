"""Figures for Prometheus: those of calls, the same for both services, and the HTTP listener that shows all.

A service makes a registry of its own, not the library's global one: what other libraries of the process count, vLLM's
among them, does not get in between, and two services in one process (in tests) do not meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, start_http_server

from residuum.wire.endpoints import parse_endpoint
from svc_common.serving import OK

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of histograms: from a small call to a long generation."""


def make_registry() -> CollectorRegistry:
    """Return a registry that has the figures of this process: CPU, memory, open files."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class CallMetrics:
    """Counts the calls of a service, as an interceptor of `svc_common.serving` tells of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Make the figures."""
        self._seconds = Histogram(
            "residuum_call_seconds",
            "How long calls took, streams from their first message to their end.",
            ["method"],
            buckets=SECONDS,
            registry=registry,
        )
        self._errors = Counter(
            "residuum_call_errors",
            "Calls that failed, by the reason in their ErrorInfo; CANCELLED: the caller had gone.",
            ["method", "reason"],
            registry=registry,
        )

    def note(self, method: str, outcome: str, seconds: float) -> None:
        """Count a call that has ended; see `svc_common.serving.CallEnded`."""
        self._seconds.labels(method).observe(seconds)
        if outcome != OK:
            self._errors.labels(method, outcome).inc()


class MetricsListener:
    """Shows a registry at http://host:port/metrics, from threads of its own."""

    def __init__(self, endpoint: str, registry: CollectorRegistry) -> None:
        """Listen on host:port.

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
        """Where it listens, if port 0 was asked for."""

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
