"""The methods of the store service. Each parses its request, calls the part that does the work, and answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.labels import Condition, matches
from residuum.wire.limits import (
    DEFAULT_PAGE_SIZE,
    MAX_CAPTURES_PER_DELETION,
    MAX_PAGE_BYTES,
    MAX_PAGE_SIZE,
    MAX_PLACED_CHUNK_BYTES,
    MAX_WAIT_SECONDS,
)
from store_svc.archive.archive import Archive
from store_svc.calls import Calls
from store_svc.captures.capture_names import (
    CaptureName,
    resolve_name,
    resolve_names,
    resolve_scope,
    unknown_capture,
)
from store_svc.captures.catalog import Catalog, Feed
from store_svc.captures.labels import LabelReader
from store_svc.checks import check_many, check_number, check_service_instance, check_states, invalid, read_where
from store_svc.database.db import Database
from store_svc.item_errors import item_error
from store_svc.metrics import StoreMetrics
from store_svc.reading.pages import make_token, read_token
from store_svc.reading.prefetch import ahead
from store_svc.reading.reader import Reader
from store_svc.reading.stored_chunks import damaged
from store_svc.searching.search import Searcher, check_search
from store_svc.shared_memory.listener import Listener
from store_svc.shared_memory.memories import ReadUse
from store_svc.traces import CaptureTraces
from store_svc.writing.append import AppendStream
from store_svc.writing.early_rows import ArrivedOpens
from store_svc.writing.openings import Openings, seal, seal_many, wait_for_feed
from store_svc.writing.retention import RetentionPolicy
from store_svc.writing.writer import Writer
from svc_common.logs import bind_request
from svc_common.security.access import current_caller
from svc_common.security.tokens_file import Caller, Limits, Right

_Request = TypeVar("_Request", bound=Message)

_SCANNED_FOR_A_PAGE = 20_000
"""Captures that one ListCaptures looks at. This bounds its time to a fraction of a second for any filter."""

SERVICE = "residuum.v1.StoreService"
"""The service's full name."""


class StoreServicer:
    """Implements the methods of StoreService with the parts of a store."""

    def __init__(
        self,
        db: Database,
        catalog: Catalog,
        writer: Writer,
        *,
        store_id: bytes,
        version: str,
        retention: RetentionPolicy,
        calls: Calls,
        metrics: StoreMetrics,
        limits_of: Callable[[str], Limits],
        traces: CaptureTraces,
        shared_memory: Listener,
        archive: Archive | None = None,
    ) -> None:
        """Create the servicer.

        Args:
            db: The database, for statistics.
            catalog: The published captures.
            writer: Makes all changes; it must be running when calls come.
            store_id: The store's own ID, which binds page tokens to this store.
            version: The server's version.
            retention: The writer's retention policy, for statistics.
            calls: Counts running calls.
            metrics: Counts acknowledgements and reads.
            limits_of: Returns a tenant's limits.
            traces: Notes each opened capture.
            shared_memory: Has the memories of peers on this machine.
            archive: Where ended captures are copied; None for nowhere.
        """
        self._db = db
        self._catalog = catalog
        self._writer = writer
        self._archive = archive
        fetcher = archive.fetcher if archive is not None else None
        self._reader = Reader(db, catalog, fetcher)
        self._labels = LabelReader(db)
        self._searcher = Searcher(db, catalog, fetcher)
        self._store_id = store_id
        self._version = version
        self._retention = retention
        self.calls = calls
        """The running calls."""
        self._metrics = metrics
        self._limits_of = limits_of
        self._opens = ArrivedOpens(lambda name: catalog.number_of(name) is not None)
        self._openings = Openings(writer, catalog, calls, traces, self._opens)
        self._shared_memory = shared_memory
        self._lock = threading.Lock()
        self._append_streams: set[AppendStream] = set()
        self._stopping = False
        self._start_time = Timestamp()
        self._start_time.GetCurrentTime()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of all methods. It passes chunks as bytes: protobuf would copy each payload twice."""
        unary: dict[str, tuple[Callable[[Any, grpc.ServicerContext], Message], type[Message]]] = {
            "OpenCapture": (self.open_capture, store_pb2.OpenCaptureRequest),
            "SealCapture": (self.seal_capture, store_pb2.SealCaptureRequest),
            "SealCaptures": (self.seal_captures, store_pb2.SealCapturesRequest),
            "RenewLease": (self.renew_lease, store_pb2.RenewLeaseRequest),
            "GetCapture": (self.get_capture, store_pb2.GetCaptureRequest),
            "ListCaptures": (self.list_captures, store_pb2.ListCapturesRequest),
            "LabelCapture": (self.label_capture, store_pb2.LabelCaptureRequest),
            "DeleteCapture": (self.delete_capture, store_pb2.DeleteCaptureRequest),
            "DeleteCaptures": (self.delete_captures, store_pb2.DeleteCapturesRequest),
            "GetStats": (self.get_stats, store_pb2.GetStatsRequest),
            "DescribeStore": (self.describe_store, store_pb2.DescribeStoreRequest),
        }
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(self._unary(method, kind), None, _serialize)
            for name, (method, kind) in unary.items()
        }
        methods["AppendChunks"] = grpc.stream_stream_rpc_method_handler(self.append_chunks, None, _serialize)
        methods["OpenCaptures"] = grpc.unary_stream_rpc_method_handler(self.open_captures, None, _serialize)
        methods["Search"] = grpc.unary_stream_rpc_method_handler(self.search, None, _serialize)
        methods["ReadChunks"] = grpc.unary_stream_rpc_method_handler(self.read_chunks, None, None)
        methods["ReadCaptures"] = grpc.unary_stream_rpc_method_handler(self.read_captures, None, None)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _unary(
        self, method: Callable[[_Request, grpc.ServicerContext], Message], kind: type[_Request]
    ) -> Callable[[bytes, grpc.ServicerContext], Message]:
        def call(data: bytes, context: grpc.ServicerContext) -> Message:
            with self.calls.running():
                request = _parse(kind, data)
                capture_id = _capture_of(request)
                if capture_id:
                    bind_request(capture_id)
                return method(request, context)

        return call

    def open_capture(
        self, request: store_pb2.OpenCaptureRequest, context: grpc.ServicerContext
    ) -> store_pb2.OpenCaptureResponse:
        """See store.proto."""
        return self._openings.open(request, context)

    def open_captures(self, data: bytes, _context: grpc.ServicerContext) -> Iterator[store_pb2.OpenCapturesResponse]:
        """See store.proto."""
        with self.calls.running():
            yield from self._openings.open_many(_parse(store_pb2.OpenCapturesRequest, data))

    def append_chunks(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[store_pb2.AppendChunksResponse]:
        """See store.proto."""
        caller = current_caller()
        with self.calls.running(), self.calls.writing(caller.holder), self._writing(caller) as stream:
            if context.add_callback(stream.cancel):
                threading.Thread(target=stream.pump, args=(messages,), name="append", daemon=True).start()
                for response in stream.responses():
                    self._metrics.acks.inc()
                    yield response

    def seal_capture(
        self, request: store_pb2.SealCaptureRequest, _context: grpc.ServicerContext
    ) -> store_pb2.SealCaptureResponse:
        """See store.proto."""
        return seal(self._writer, request)

    def seal_captures(
        self, request: store_pb2.SealCapturesRequest, _context: grpc.ServicerContext
    ) -> store_pb2.SealCapturesResponse:
        """See store.proto."""
        return seal_many(self._writer, request)

    def renew_lease(
        self, request: store_pb2.RenewLeaseRequest, _context: grpc.ServicerContext
    ) -> store_pb2.RenewLeaseResponse:
        """See store.proto."""
        check_service_instance("service_instance", request.service_instance)
        leases = self._catalog.leases
        if not leases.renew(request.service_instance, current_caller().holder):
            message = "Too many inference services hold leases in this store. Try again later."
            raise Failure(Reason.ERROR_REASON_LIMIT_REACHED, message, limit="leases")
        response = store_pb2.RenewLeaseResponse()
        response.lease.FromNanoseconds(round(leases.seconds * 1e9))
        return response

    def get_capture(
        self, request: store_pb2.GetCaptureRequest, context: grpc.ServicerContext
    ) -> store_pb2.GetCaptureResponse:
        """See store.proto."""
        caller = current_caller()
        name = resolve_name(caller, request)
        if _seconds(request) > 0:
            with self.calls.reading(caller.holder):
                until = time.monotonic() + _seconds(request)
                self._wait_for_end(name, request, context)
                if request.wait_for_archive and self._archive is not None:
                    self._wait_for_copy(self._archive, name, until - time.monotonic(), context)
        return store_pb2.GetCaptureResponse(manifest=self._reader.manifest(name))

    def list_captures(
        self, request: store_pb2.ListCapturesRequest, _context: grpc.ServicerContext
    ) -> store_pb2.ListCapturesResponse:
        """See store.proto."""
        scope = resolve_scope(current_caller(), request)
        check_states(request.states)
        conditions = read_where(request.where)
        before = read_token(self._store_id, request, scope)
        size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        response = store_pb2.ListCapturesResponse()
        last = num_bytes = 0
        among = self._labels.candidates(conditions, scope, before)
        scan = self._catalog.newest(before, request.prefix, request.states, scope, among)
        for at, (number, found) in enumerate(scan):
            summary = self._with_labels(number, found, conditions) if found is not None else None
            if summary is not None and (len(response.captures) == size or num_bytes >= MAX_PAGE_BYTES):
                response.next_page_token = response.captures[-1].page_token
                break
            if at >= _SCANNED_FOR_A_PAGE:
                response.next_page_token = make_token(self._store_id, request, scope, last)
                break
            if summary is not None:
                summary.page_token = make_token(self._store_id, request, scope, number)
                num_bytes += summary.ByteSize()
                response.captures.append(summary)
            last = number
        return response

    def _with_labels(
        self, number: int, found: store_pb2.CaptureSummary, conditions: Sequence[Condition]
    ) -> store_pb2.CaptureSummary | None:
        """Return a copy of a summary with the capture's labels, or None if these do not meet the conditions."""
        labels = self._labels.of(number)
        if not matches(conditions, labels):
            return None
        summary = store_pb2.CaptureSummary(labels=labels)
        summary.MergeFrom(found)
        return summary

    def label_capture(
        self, request: store_pb2.LabelCaptureRequest, _context: grpc.ServicerContext
    ) -> store_pb2.LabelCaptureResponse:
        """See store.proto."""
        name = resolve_name(current_caller(), request)
        labels = self._writer.call(request.capture_id, lambda batch: batch.label(name, request))
        return store_pb2.LabelCaptureResponse(labels=labels)

    def read_chunks(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """See store.proto."""
        caller = current_caller()
        request = _parse(store_pb2.ReadChunksRequest, data)
        bind_request(request.capture_id)
        name = resolve_name(caller, request)
        yield from self._sent(
            context, caller.holder, request.shared_memory_key, lambda *calls: self._reader.read(name, request, *calls)
        )

    def read_captures(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """See store.proto."""
        caller = current_caller()
        request = _parse(store_pb2.ReadCapturesRequest, data)
        check_many(request)
        names = resolve_names(caller, request)
        yield from self._sent(
            context,
            caller.holder,
            request.shared_memory_key,
            lambda *calls: self._reader.read_many(names, request, *calls),
        )

    def search(self, data: bytes, context: grpc.ServicerContext) -> Iterator[store_pb2.SearchResponse]:
        """See store.proto."""
        caller = current_caller()
        request = _parse(store_pb2.SearchRequest, data)
        scope = resolve_scope(caller, request)
        check_search(request)
        with self.calls.running(), self.calls.reading(caller.holder), self.calls.searching(caller.holder):
            yield from self._searcher.search(
                request, scope, caller.own_tenant, lambda: not context.is_active(), self._metrics.searched_bytes.inc
            )

    def _sent(
        self,
        context: grpc.ServicerContext,
        holder: str,
        shared_memory_key: bytes,
        read: Callable[[Callable[[], bool], Callable[[Feed], object], ReadUse | None], Generator[bytes, None, None]],
    ) -> Iterator[bytes]:
        """Yield the responses of a read and count them.

        `read` is called with `is_cancelled`, `feed_seen`, and the use of the shared memory that the caller names.
        """
        memories = self._shared_memory.memories
        with self.calls.running(), self.calls.reading(holder), memories.reading(shared_memory_key) as memory:
            responses = read(lambda: not context.is_active(), lambda feed: context.add_callback(feed.wake), memory)
            placed = 0
            for response in ahead(responses):
                now = memory.num_bytes if memory is not None else 0
                self._metrics.read_chunks.inc()
                self._metrics.read_bytes.inc(len(response) + now - placed)
                self._metrics.shared_memory_read_bytes.inc(now - placed)
                placed = now
                yield response

    def delete_capture(
        self, request: store_pb2.DeleteCaptureRequest, _context: grpc.ServicerContext
    ) -> store_pb2.DeleteCaptureResponse:
        """See store.proto."""
        name = resolve_name(current_caller(), request)
        freed = self._writer.call(request.capture_id, lambda batch: batch.delete(name), reserve=True)
        return store_pb2.DeleteCaptureResponse(freed_bytes=freed)

    def delete_captures(
        self, request: store_pb2.DeleteCapturesRequest, _context: grpc.ServicerContext
    ) -> store_pb2.DeleteCapturesResponse:
        """See store.proto."""
        check_number("capture_ids", len(request.capture_ids), MAX_CAPTURES_PER_DELETION, "deletes")
        names = resolve_names(current_caller(), request)
        deleting = iter(self._writer.submit_deletions(name for name in names if name is not None))
        response = store_pb2.DeleteCapturesResponse()
        for capture_id, name in zip(request.capture_ids, names, strict=True):
            result = response.results.add()
            try:
                if name is None:
                    raise unknown_capture(capture_id)
                result.freed_bytes = next(deleting).result()
            except Failure as failure:
                result.error.CopyFrom(item_error(failure))
        return response

    def get_stats(
        self, _request: store_pb2.GetStatsRequest, _context: grpc.ServicerContext
    ) -> store_pb2.GetStatsResponse:
        """See store.proto."""
        caller = current_caller()
        response = self._whole_stats() if caller.is_admin else self._tenant_stats(caller)
        response.start_time.CopyFrom(self._start_time)
        response.server_version = self._version
        response.why_full = self._writer.room.why_full
        response.server_time.GetCurrentTime()
        response.own_tenant = caller.own_tenant
        return response

    def describe_store(
        self, _request: store_pb2.DescribeStoreRequest, _context: grpc.ServicerContext
    ) -> store_pb2.DescribeStoreResponse:
        """See store.proto."""
        return store_pb2.DescribeStoreResponse(
            server_version=self._version,
            instance=self._shared_memory.instance,
            shared_memory_socket=self._shared_memory.path,
            max_placed_chunk_bytes=MAX_PLACED_CHUNK_BYTES,
        )

    def _tenant_stats(self, caller: Caller) -> store_pb2.GetStatsResponse:
        """Return the tenant's own statistics, if the caller may read. Statistics of others are for admins only."""
        response = store_pb2.GetStatsResponse(tenant=store_pb2.TenantStats(tenant=caller.own_tenant))
        if caller.may(Right.READ):
            self._count_captures(response, caller.own_tenant)
            limits = self._limits_of(caller.own_tenant)
            if limits.max_bytes is not None:
                response.tenant.max_bytes = limits.max_bytes
            if limits.max_open_captures is not None:
                response.tenant.max_open_captures = limits.max_open_captures
        return response

    def _count_captures(self, response: store_pb2.GetStatsResponse, tenant: str | None) -> None:
        states = self._catalog.states(tenant)
        response.captures.extend(store_pb2.StateCount(state=state, count=count) for state, count in states.items())
        response.num_bytes = self._catalog.holdings(tenant).num_bytes

    def _whole_stats(self) -> store_pb2.GetStatsResponse:
        counters = self._writer.counters
        response = store_pb2.GetStatsResponse(
            num_chunks=self._db.num_chunks(),
            disk_bytes=self._db.disk_bytes(),
            max_bytes=self._db.max_bytes,
            chunks_written=counters.written,
            chunks_repeated=counters.repeated,
            chunks_rejected=counters.rejected,
            commits=counters.commits,
            used_bytes=self._db.used_bytes(),
            free_disk_bytes=self._db.free_disk_bytes(),
            append_limit_bytes=self._db.ordinary_bytes,
            retention=self._retention_stats(),
        )
        self._count_captures(response, None)
        if self._archive is not None:
            response.archive.CopyFrom(self._archive.stats())
        return response

    def _retention_stats(self) -> store_pb2.RetentionStats:
        counters = self._writer.counters
        stats = store_pb2.RetentionStats(
            max_bytes=self._retention.max_bytes or 0,
            captures_expired_by_age=counters.expired_by_age,
            captures_expired_by_size=counters.expired_by_size,
            bytes_expired=counters.bytes_expired,
        )
        if self._retention.max_age is not None:
            stats.max_age.FromNanoseconds(round(self._retention.max_age * 1e9))
        return stats

    def close(self) -> None:
        """End the threads of searches, once no call runs."""
        self._searcher.close()

    def end_streams(self) -> None:
        """End all writer streams. The Writer must have stopped, so that every accepted message is acknowledged."""
        with self._lock:
            self._stopping = True
            streams = list(self._append_streams)
        for stream in streams:
            stream.fail(_stopping())

    @contextmanager
    def _writing(self, caller: Caller) -> Iterator[AppendStream]:
        memories, count = self._shared_memory.memories, self._metrics.shared_memory_write_bytes.inc
        stream = AppendStream(self._writer.queue, caller, self._opens, memories.written, count)
        with self._lock:
            if self._stopping:
                raise _stopping()
            self._append_streams.add(stream)
        try:
            yield stream
        finally:
            with self._lock:
                self._append_streams.discard(stream)

    def _wait_for_end(
        self, name: CaptureName, request: store_pb2.GetCaptureRequest, context: grpc.ServicerContext
    ) -> None:
        _, feed = self._catalog.require(name)
        if feed is None:
            return
        wait_for_feed(self._catalog, feed, _seconds(request), context)
        if feed.deleted:
            raise unknown_capture(request.capture_id)
        if self._catalog.stopping and not feed.capture.ended:
            raise _stopping()

    def _wait_for_copy(
        self, archive: Archive, name: CaptureName, seconds: float, context: grpc.ServicerContext
    ) -> None:
        """Wait until a capture that has ended is in the archive.

        Raises:
            Failure: CHECKSUM_MISMATCH: a chunk is damaged, so the capture is never copied.
        """
        number, feed = self._catalog.require(name)
        if feed is not None:
            return

        def is_over() -> bool:
            summary = self._catalog.summary_of(number)
            is_pending = summary is not None and summary.archive_state == capture_pb2.ARCHIVE_STATE_PENDING
            return not is_pending or archive.cannot_copy(number) or self._catalog.stopping or not context.is_active()

        archive.wait(is_over, seconds)
        if archive.cannot_copy(number):
            raise damaged(name.capture_id)


def _parse(kind: type[_Request], data: bytes) -> _Request:
    """Parse a request. gRPC's own deserialization would answer malformed bytes with INTERNAL."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise invalid("message", f"cannot be parsed as {kind.DESCRIPTOR.name}: {error}") from None


def _capture_of(request: Message) -> str:
    """Return the ID of the capture that a request is about; empty if it names none."""
    if isinstance(request, store_pb2.OpenCaptureRequest):
        return request.description.capture_id
    return str(getattr(request, "capture_id", ""))


def _seconds(request: store_pb2.GetCaptureRequest) -> float:
    return min(request.wait.seconds + request.wait.nanos / 1e9, MAX_WAIT_SECONDS)


def _stopping() -> Failure:
    return Failure(Reason.ERROR_REASON_NOT_SERVING, "The store is stopping; try again later.")


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
