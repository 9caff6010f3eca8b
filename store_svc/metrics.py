"""What the store shows to Prometheus. What can be read when somebody asks is not counted twice."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from residuum.v1 import capture_pb2
from store_svc.calls import Calls
from store_svc.captures.catalog import Catalog
from store_svc.database.db import Database
from store_svc.writing.retention import RetentionPolicy
from store_svc.writing.writer import Writer
from svc_common.metrics import SECONDS, CallMetrics, make_registry

_STATES = {
    capture_pb2.CAPTURE_STATE_OPEN: "open",
    capture_pb2.CAPTURE_STATE_COMPLETE: "complete",
    capture_pb2.CAPTURE_STATE_INCOMPLETE: "incomplete",
    capture_pb2.CAPTURE_STATE_ABORTED: "aborted",
}


class StoreMetrics:
    """What is counted as it happens. It is counted whether or not anybody listens."""

    def __init__(self) -> None:
        """Make the figures, all at zero."""
        self.registry = make_registry()
        self.calls = CallMetrics(self.registry)
        self.commit_seconds = Histogram(
            "residuum_store_commit_seconds",
            "How long transactions took, from their first change until they were committed.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.acks = Counter("residuum_store_acknowledgements", "Answers to writers' streams.", registry=self.registry)
        self.read_chunks = Counter("residuum_store_read_chunks", "Messages sent to readers.", registry=self.registry)
        self.read_bytes = Counter("residuum_store_read_bytes", "Bytes sent to readers.", registry=self.registry)


class StoreCollector(Collector):
    """What is looked up when somebody asks."""

    def __init__(
        self, db: Database, catalog: Catalog, writer: Writer, calls: Calls, retention: RetentionPolicy
    ) -> None:
        """Look at these parts of a store, from any thread."""
        self._db = db
        self._catalog = catalog
        self._writer = writer
        self._calls = calls
        self._retention = retention

    def collect(self) -> Iterator[Metric]:
        """Yield the figures as they are now."""
        yield from self._contents()
        yield from self._room()
        yield from self._work()

    def _contents(self) -> Iterator[Metric]:
        states = self._catalog.states()
        captures = GaugeMetricFamily("residuum_store_captures", "Captures by state.", labels=["state"])
        for state, name in _STATES.items():
            captures.add_metric([name], states.get(state, 0))
        yield captures
        yield GaugeMetricFamily("residuum_store_chunk_bytes", "Bytes of chunks.", self._catalog.num_bytes)
        yield GaugeMetricFamily("residuum_store_chunks", "Chunks.", self._db.num_chunks())

    def _room(self) -> Iterator[Metric]:
        db = self._db
        yield GaugeMetricFamily("residuum_store_disk_bytes", "What the database takes on disk.", db.disk_bytes())
        yield GaugeMetricFamily("residuum_store_free_disk_bytes", "What is free on its disk.", db.free_disk_bytes())
        yield GaugeMetricFamily("residuum_store_used_bytes", "What is in use of the map.", db.used_bytes())
        yield GaugeMetricFamily("residuum_store_max_bytes", "The greatest size of the map.", db.max_bytes)
        yield GaugeMetricFamily(
            "residuum_store_append_limit_bytes", "Use of the map beyond which chunks are refused.", db.ordinary_bytes
        )
        if self._retention.max_bytes is not None:
            yield GaugeMetricFamily(
                "residuum_store_retain_bytes", "Bytes of chunks that are kept at most.", self._retention.max_bytes
            )

    def _work(self) -> Iterator[Metric]:
        counters, waiting = self._writer.counters, self._writer.queue.waiting()
        yield GaugeMetricFamily("residuum_store_queue_messages", "Messages that wait for the writer.", waiting.messages)
        yield GaugeMetricFamily("residuum_store_queue_bytes", "Bytes that wait for the writer.", waiting.num_bytes)
        yield GaugeMetricFamily("residuum_store_append_streams", "Streams of writers.", self._calls.num_writing)
        yield GaugeMetricFamily("residuum_store_reads", "Reads, and waits for ends.", self._calls.num_reading)
        chunks = CounterMetricFamily(
            "residuum_store_appended_chunks", "Chunks that came, by what became of them.", labels=["outcome"]
        )
        for outcome in ("written", "repeated", "rejected"):
            chunks.add_metric([outcome], getattr(counters, outcome))
        yield chunks
        yield CounterMetricFamily("residuum_store_written_bytes", "Bytes of chunks written.", counters.bytes_written)
        expired = CounterMetricFamily(
            "residuum_store_expired_captures", "Captures deleted by retention, by its cause.", labels=["cause"]
        )
        expired.add_metric(["age"], counters.expired_by_age)
        expired.add_metric(["size"], counters.expired_by_size)
        yield expired
        yield CounterMetricFamily("residuum_store_expired_bytes", "Bytes deleted by retention.", counters.bytes_expired)
