"""The metrics of the inference service for Prometheus, and its log line for each request.

The event loop updates counters and histograms. Collectors read everything else when Prometheus scrapes, on the
listener's thread. They read only lengths and numbers, which are safe to read while they change. The metrics of workers
and shippers are in `shipping.metrics`.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2
from svc_common.logs import get_logger
from svc_common.rpc.metrics import SECONDS, CallMetrics, make_registry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from prometheus_client import CollectorRegistry, Metric
    from typing_extensions import Self

    from inference_svc.captures.stores import Stores
    from inference_svc.requests.registry import RequestRegistry
    from inference_svc.resources.vector_activator import VectorActivator
    from inference_svc.resources.vector_cache import VectorCache

_log = get_logger(__name__)

_MAX_RULE_NAMES = 1000
"""The most names of rules that are counted separately."""

_OUTCOMES = ("finished", "aborted", "cancelled", "failed", "refused")


class InferenceMetrics:
    """Counters and histograms that requests update. They count even if no metrics listener runs."""

    def __init__(self) -> None:
        """Create the metrics, all at zero."""
        self.registry = make_registry()
        self.calls = CallMetrics(self.registry, inference_pb2.DESCRIPTOR.services_by_name["InferenceService"])
        self.requests = Counter(
            "residuum_inference_requests",
            "Requests that have ended: finished, aborted, cancelled (the client disconnected), failed or refused.",
            ["outcome"],
            registry=self.registry,
        )
        self.ended = {outcome: self.requests.labels(outcome) for outcome in _OUTCOMES}
        """The counter of each outcome."""
        self.prompt_tokens = Counter(
            "residuum_inference_prompt_tokens", "Prompt tokens of requests that started.", registry=self.registry
        )
        self.generated_tokens = TokenCount("residuum_inference_generated_tokens", "Generated tokens sent to clients.")
        self.registry.register(self.generated_tokens)
        self.rules = RuleCounts(self.registry)
        self.first_token_seconds = Histogram(
            "residuum_inference_first_token_seconds",
            "Seconds from the call of Generate to the first token, including waits.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "residuum_inference_request_seconds",
            "Seconds from the call of Generate to the last token, for requests that finished.",
            buckets=SECONDS,
            registry=self.registry,
        )

    def request(self) -> RequestWatch:
        """Return a watch for one request, which starts now."""
        return RequestWatch(self)


class RuleCounts:
    """Counts the rules that fire."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Create the counter in a registry."""
        self._counter = Counter(
            "residuum_inference_rules_fired",
            f"Rules that fired, by name and action. Only {_MAX_RULE_NAMES} names are told apart from (other).",
            ["rule", "action"],
            registry=registry,
        )
        self._names: set[str] = set()

    def add(self, name: str, action: str) -> None:
        """Count a rule that fired. Callers choose the names, so the number of names is limited."""
        if len(self._names) < _MAX_RULE_NAMES:
            self._names.add(name)
        self._counter.labels(name if name in self._names else "(other)", action).inc()

    def know(self, name: str, action: str) -> None:
        """Count a rule of the operator by its name, whatever rules callers have, and from 0: alerts see the first."""
        self._names.add(name)
        self._counter.labels(name, action)


class TokenCount(Collector):
    """A counter that only the event loop adds to. A `Counter` would take a lock for each token."""

    def __init__(self, name: str, text: str) -> None:
        """Start at zero."""
        self._name, self._text, self._created = name, text, time.time()
        self.value = 0

    def collect(self) -> Iterator[Metric]:
        """Yield the metric with its current value."""
        yield CounterMetricFamily(self._name, self._text, self.value, created=self._created)


class RequestWatch:
    """Measures one request from its call to its end. A context manager, so it sees every kind of end."""

    def __init__(self, metrics: InferenceMetrics) -> None:
        """Start the clock."""
        self._metrics = metrics
        self._start = time.monotonic()
        self._first: float | None = None
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self.has_begun = False
        """Whether the request has passed its checks, and the store has not refused its capture."""

    def __enter__(self) -> Self:
        return self

    def begin(self, prompt_tokens: int) -> None:
        """Note that the request passed its checks and starts; see `has_begun`."""
        self.has_begun = True
        self._prompt_tokens = prompt_tokens
        self._metrics.prompt_tokens.inc(prompt_tokens)

    def add_tokens(self, count: int) -> None:
        """Count tokens that are sent to the client."""
        if count and self._first is None:
            self._first = self._elapsed()
            self._metrics.first_token_seconds.observe(self._first)
        self._generated_tokens += count
        self._metrics.generated_tokens.value += count

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        outcome, reason = _outcome(error)
        if outcome == "failed" and not self.has_begun:
            outcome = "refused"
        seconds = self._elapsed()
        self._metrics.ended[outcome].inc()
        if outcome == "finished":
            self._metrics.request_seconds.observe(seconds)
        if self.has_begun:
            _log.info(
                "request ended",
                outcome=outcome,
                **({"reason": reason} if reason else {}),
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated_tokens,
                seconds=round(seconds, 6),
                first_token_seconds=None if self._first is None else round(self._first, 6),
            )

    def _elapsed(self) -> float:
        return time.monotonic() - self._start


def _outcome(error: BaseException | None) -> tuple[str, str]:
    """Return how a request ended, and the name of its error reason ("" without one)."""
    if error is None:
        return "finished", ""
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return "cancelled", ""
    if isinstance(error, Failure):
        aborted = error.reason == Reason.ERROR_REASON_ABORTED
        return ("aborted", "") if aborted else ("failed", error.reason_name)
    return "failed", "INTERNAL"


class ServiceCollector(Collector):
    """Gauges of requests, vectors and stores, read at each scrape."""

    def __init__(
        self,
        registry: RequestRegistry,
        cache: VectorCache,
        activator: VectorActivator,
        stores: Stores | None,
    ) -> None:
        """Read from these objects; `stores` is None if the service has no store."""
        self._registry = registry
        self._cache = cache
        self._activator = activator
        self._stores = stores

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their current values."""
        for name, text, value in (
            ("running_requests", "Requests that generate, or wait to generate.", self._registry.num_running),
            ("registrations", "Registrations whose Generate has not been called yet.", self._registry.num_registered),
            ("kept_vectors", "Steering vectors in host memory.", self._cache.num_vectors),
            ("active_vectors", "Steering vectors that running requests use.", self._activator.num_active),
            ("active_vectors_limit", "Steering vectors that may be active at once.", self._activator.num_rows),
            ("waiting_for_vectors", "Requests that wait for active vectors.", self._activator.num_waiting),
        ):
            yield GaugeMetricFamily(f"residuum_inference_{name}", text, value)
        yield from self._collect_stores()

    def _collect_stores(self) -> Iterator[Metric]:
        label = ["store"]
        opened = GaugeMetricFamily(
            "residuum_inference_open_captures", "Captures that are open: the store has not sealed them.", labels=label
        )
        unheard = GaugeMetricFamily(
            "residuum_inference_unheard_seals", "Seals that the store has not acknowledged.", labels=label
        )
        answers = GaugeMetricFamily(
            "residuum_inference_store_up", "1: the store answered the last call; 0: it did not.", labels=label
        )
        for name, keeper in self._stores.keepers.items() if self._stores else ():
            opened.add_metric([name], keeper.num_open)
            unheard.add_metric([name], keeper.num_seals)
            if keeper.answered is not None:
                answers.add_metric([name], keeper.answered)
        yield from (opened, unheard, answers)
