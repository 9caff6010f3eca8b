"""The store's Prometheus metrics. A value that the store already keeps is read at scrape time, not counted again."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from residuum.v1 import capture_pb2, store_pb2
from store_svc.archive.archive import Archive
from store_svc.calls import Calls
from store_svc.captures.catalog import Catalog
from store_svc.database.db import Database
from store_svc.writing.retention import RetentionPolicy
from store_svc.writing.writer import Writer
from svc_common.rpc.metrics import SECONDS, CallMetrics, make_registry

_STATES = {
    capture_pb2.CAPTURE_STATE_OPEN: "open",
    capture_pb2.CAPTURE_STATE_COMPLETE: "complete",
    capture_pb2.CAPTURE_STATE_INCOMPLETE: "incomplete",
    capture_pb2.CAPTURE_STATE_ABORTED: "aborted",
}

_ARCHIVE_STATES = {
    capture_pb2.ARCHIVE_STATE_PENDING: "pending",
    capture_pb2.ARCHIVE_STATE_COPIED: "copied",
    capture_pb2.ARCHIVE_STATE_MOVED: "moved",
}


class StoreMetrics:
    """Metrics that the store counts as events happen, whether or not a metrics endpoint is configured."""

    def __init__(self) -> None:
        """Create the metrics, all at zero."""
        self.registry = make_registry()
        self.calls = CallMetrics(self.registry, store_pb2.DESCRIPTOR.services_by_name["StoreService"])
        self.commit_seconds = Histogram(
            "residuum_store_commit_seconds",
            "Duration of write transactions, from the first change to the commit.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.acks = Counter(
            "residuum_store_acknowledgements", "Acknowledgements sent on writer streams.", registry=self.registry
        )
        self.read_chunks = Counter("residuum_store_read_chunks", "Messages sent to readers.", registry=self.registry)
        self.read_bytes = Counter("residuum_store_read_bytes", "Bytes sent to readers.", registry=self.registry)
        self.searched_bytes = Counter(
            "residuum_store_searched_bytes", "Bytes of rows that searches have scanned.", registry=self.registry
        )
        shared_memory = Counter(
            "residuum_store_shared_memory_bytes",
            "Bytes of payloads that went through shared memory instead of gRPC, by direction.",
            ["direction"],
            registry=self.registry,
        )
        self.shared_memory_read_bytes = shared_memory.labels("read")
        self.shared_memory_write_bytes = shared_memory.labels("write")


class StoreCollector(Collector):
    """Metrics that are looked up at scrape time."""

    def __init__(
        self,
        db: Database,
        catalog: Catalog,
        writer: Writer,
        calls: Calls,
        retention: RetentionPolicy,
        archive: Archive | None = None,
    ) -> None:
        """Read metrics from these parts of a store. They may be read from any thread."""
        self._db = db
        self._catalog = catalog
        self._writer = writer
        self._calls = calls
        self._retention = retention
        self._archive = archive

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their current values."""
        yield from self._contents()
        yield from self._room()
        yield from self._work()
        if self._archive is not None:
            yield from self._archived(self._archive)

    def _contents(self) -> Iterator[Metric]:
        states = self._catalog.states()
        captures = GaugeMetricFamily("residuum_store_captures", "Captures by state.", labels=["state"])
        for state, name in _STATES.items():
            captures.add_metric([name], states.get(state, 0))
        yield captures
        yield GaugeMetricFamily("residuum_store_chunk_bytes", "Bytes of stored chunks.", self._catalog.num_bytes)
        yield GaugeMetricFamily("residuum_store_chunks", "Stored chunks.", self._db.num_chunks())

    def _room(self) -> Iterator[Metric]:
        db = self._db
        yield GaugeMetricFamily("residuum_store_disk_bytes", "Bytes the database takes on disk.", db.disk_bytes())
        yield GaugeMetricFamily(
            "residuum_store_free_disk_bytes", "Free bytes on the database's disk.", db.free_disk_bytes()
        )
        yield GaugeMetricFamily("residuum_store_used_bytes", "Bytes of the map that are in use.", db.used_bytes())
        yield GaugeMetricFamily("residuum_store_max_bytes", "Greatest size of the map in bytes.", db.max_bytes)
        yield GaugeMetricFamily(
            "residuum_store_append_limit_bytes",
            "Used bytes of the map beyond which the store refuses chunks.",
            db.ordinary_bytes,
        )
        yield GaugeMetricFamily(
            "residuum_store_full",
            "1 while the store has no room and refuses chunks and new captures, else 0.",
            int(bool(self._writer.room.why_full)),
        )
        if self._retention.max_bytes is not None:
            yield GaugeMetricFamily(
                "residuum_store_retain_bytes", "Most bytes of chunks that retention keeps.", self._retention.max_bytes
            )

    def _work(self) -> Iterator[Metric]:
        counters, waiting = self._writer.counters, self._writer.queue.waiting()
        yield GaugeMetricFamily("residuum_store_queue_messages", "Messages waiting for the writer.", waiting.messages)
        yield GaugeMetricFamily("residuum_store_queue_bytes", "Bytes waiting for the writer.", waiting.num_bytes)
        yield GaugeMetricFamily("residuum_store_append_streams", "Open writer streams.", self._calls.num_writing)
        yield GaugeMetricFamily(
            "residuum_store_reads", "Running reads, and waits for captures to end.", self._calls.num_reading
        )
        chunks = CounterMetricFamily(
            "residuum_store_appended_chunks", "Chunks received, by outcome.", labels=["outcome"]
        )
        for outcome in ("written", "repeated", "rejected", "refused"):
            chunks.add_metric([outcome], getattr(counters, outcome))
        yield chunks
        yield CounterMetricFamily("residuum_store_written_bytes", "Bytes of chunks written.", counters.bytes_written)
        expired = CounterMetricFamily(
            "residuum_store_expired_captures", "Captures deleted by retention, by cause.", labels=["cause"]
        )
        expired.add_metric(["age"], counters.expired_by_age)
        expired.add_metric(["size"], counters.expired_by_size)
        yield expired
        yield CounterMetricFamily("residuum_store_expired_bytes", "Bytes deleted by retention.", counters.bytes_expired)

    def _archived(self, archive: Archive) -> Iterator[Metric]:
        states, counters = self._catalog.archive_states(), archive.counters
        captures = GaugeMetricFamily(
            "residuum_store_archive_captures", "Ended captures, by where their rows are.", labels=["state"]
        )
        for state, name in _ARCHIVE_STATES.items():
            captures.add_metric([name], states.get(state, 0))
        yield captures
        yield GaugeMetricFamily(
            "residuum_store_archive_behind_seconds",
            "Age of the oldest capture that waits to be copied.",
            archive.seconds_behind,
        )
        yield GaugeMetricFamily(
            "residuum_store_archive_failing",
            "1 while the archive cannot be written, else 0.",
            int(bool(archive.link.why_behind)),
        )
        failures = CounterMetricFamily(
            "residuum_store_archive_failures", "Operations on the archive that failed, by kind.", labels=["kind"]
        )
        failures.add_metric(["write"], archive.link.failures)
        failures.add_metric(["read"], archive.fetcher.failures)
        yield failures
        yield CounterMetricFamily(
            "residuum_store_archive_copied_bytes", "Bytes of chunks copied to the archive.", counters.bytes_copied
        )
        yield CounterMetricFamily(
            "residuum_store_archive_read_bytes", "Bytes read from the archive.", archive.fetcher.num_bytes
        )
        yield CounterMetricFamily(
            "residuum_store_archive_dropped_bytes",
            "Bytes of chunks dropped from the database, because the archive has them.",
            self._catalog.bytes_dropped,
        )
        yield CounterMetricFamily(
            "residuum_store_archive_deleted_captures",
            "Deleted captures whose objects were deleted.",
            counters.captures_deleted,
        )
        yield GaugeMetricFamily(
            "residuum_store_archive_not_copied_captures",
            "Captures that cannot be copied, because a chunk is damaged; the log names them.",
            archive.num_not_copied,
        )
