"""The service's methods: each parses, asks the right part, and answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from residuum.rpc.errors import Failure, Reason
from residuum.rpc.logs import bind_request
from residuum.v1 import store_pb2
from residuum.wire.limits import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, MAX_WAIT_SECONDS
from store_svc.append import AppendStream
from store_svc.calls import Calls
from store_svc.catalog import Catalog, unknown_capture
from store_svc.checks import check_description, invalid
from store_svc.db import Database
from store_svc.metrics import StoreMetrics
from store_svc.pages import make_token, read_token
from store_svc.reader import Reader
from store_svc.retention import RetentionPolicy
from store_svc.writer import Writer

_Request = TypeVar("_Request", bound=Message)

_SCANNED_FOR_A_PAGE = 20_000
"""Captures that one ListCaptures looks at: whatever the filter, it is answered within a fraction of a second."""

SERVICE = "residuum.v1.StoreService"
"""The full name of the service."""


class StoreServicer:
    """The methods of StoreService, over the parts of a store."""

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
    ) -> None:
        """Make a servicer.

        Args:
            db: The database, for figures.
            catalog: What is published.
            writer: Where changes go; it must be running.
            store_id: Binds page tokens to this store.
            version: The version of the server.
            retention: What the writer keeps, to tell it.
            calls: Counts the calls.
            metrics: Counts what is acknowledged and read.
        """
        self._db = db
        self._catalog = catalog
        self._writer = writer
        self._reader = Reader(db, catalog)
        self._store_id = store_id
        self._version = version
        self._retention = retention
        self.calls = calls
        """The calls that run."""
        self._metrics = metrics
        self._lock = threading.Lock()
        self._append_streams: set[AppendStream] = set()
        self._stopping = False
        self._start_time = Timestamp()
        self._start_time.GetCurrentTime()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of all methods. Chunks pass it as bytes: protobuf would copy each payload twice."""
        unary: dict[str, tuple[Callable[[Any, grpc.ServicerContext], Message], type[Message]]] = {
            "OpenCapture": (self.open_capture, store_pb2.OpenCaptureRequest),
            "SealCapture": (self.seal_capture, store_pb2.SealCaptureRequest),
            "GetCapture": (self.get_capture, store_pb2.GetCaptureRequest),
            "ListCaptures": (self.list_captures, store_pb2.ListCapturesRequest),
            "DeleteCapture": (self.delete_capture, store_pb2.DeleteCaptureRequest),
            "GetStats": (self.get_stats, store_pb2.GetStatsRequest),
        }
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(self._unary(method, kind), None, _serialize)
            for name, (method, kind) in unary.items()
        }
        methods["AppendChunks"] = grpc.stream_stream_rpc_method_handler(self.append_chunks, None, _serialize)
        methods["ReadChunks"] = grpc.unary_stream_rpc_method_handler(self.read_chunks, None, None)
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
        self, request: store_pb2.OpenCaptureRequest, _context: grpc.ServicerContext
    ) -> store_pb2.OpenCaptureResponse:
        """See store.proto."""
        check_description(request.description)
        self._writer.call(request.description.capture_id, lambda batch: batch.open(request.description))
        return store_pb2.OpenCaptureResponse()

    def append_chunks(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[store_pb2.AppendChunksResponse]:
        """See store.proto."""
        with self.calls.running(), self.calls.writing(), self._writing() as stream:
            if context.add_callback(stream.cancel):
                threading.Thread(target=stream.pump, args=(messages,), name="append", daemon=True).start()
                for response in stream.responses():
                    self._metrics.acks.inc()
                    yield response

    def seal_capture(
        self, request: store_pb2.SealCaptureRequest, _context: grpc.ServicerContext
    ) -> store_pb2.SealCaptureResponse:
        """See store.proto."""
        manifest = self._writer.call(request.capture_id, lambda batch: batch.seal(request), reserve=True)
        return store_pb2.SealCaptureResponse(manifest=manifest)

    def get_capture(
        self, request: store_pb2.GetCaptureRequest, context: grpc.ServicerContext
    ) -> store_pb2.GetCaptureResponse:
        """See store.proto."""
        if _seconds(request) > 0:
            with self.calls.reading():
                self._wait_for_end(request, context)
        return store_pb2.GetCaptureResponse(manifest=self._reader.manifest(request.capture_id))

    def list_captures(
        self, request: store_pb2.ListCapturesRequest, _context: grpc.ServicerContext
    ) -> store_pb2.ListCapturesResponse:
        """See store.proto."""
        before = read_token(self._store_id, request)
        size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        response = store_pb2.ListCapturesResponse()
        last = 0
        scan = self._catalog.newest(before, request.prefix, request.states)
        for at, (number, summary) in enumerate(scan):
            if at >= _SCANNED_FOR_A_PAGE or (summary is not None and len(response.captures) == size):
                response.next_page_token = make_token(self._store_id, request, last)
                break
            if summary is not None:
                response.captures.append(summary)
            last = number
        return response

    def read_chunks(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """See store.proto."""
        request = _parse(store_pb2.ReadChunksRequest, data)
        bind_request(request.capture_id)
        with self.calls.running(), self.calls.reading():
            responses = self._reader.read(
                request,
                is_cancelled=lambda: not context.is_active(),
                feed_seen=lambda feed: context.add_callback(feed.wake),
            )
            for response in responses:
                self._metrics.read_chunks.inc()
                self._metrics.read_bytes.inc(len(response))
                yield response

    def delete_capture(
        self, request: store_pb2.DeleteCaptureRequest, _context: grpc.ServicerContext
    ) -> store_pb2.DeleteCaptureResponse:
        """See store.proto."""
        freed = self._writer.call(request.capture_id, lambda batch: batch.delete(request.capture_id), reserve=True)
        return store_pb2.DeleteCaptureResponse(freed_bytes=freed)

    def get_stats(
        self, _request: store_pb2.GetStatsRequest, _context: grpc.ServicerContext
    ) -> store_pb2.GetStatsResponse:
        """See store.proto."""
        counters, states = self._writer.counters, self._catalog.states()
        response = store_pb2.GetStatsResponse(
            captures=[store_pb2.StateCount(state=state, count=count) for state, count in states.items()],
            num_bytes=self._catalog.num_bytes,
            num_chunks=self._db.num_chunks(),
            disk_bytes=self._db.disk_bytes(),
            max_bytes=self._db.max_bytes,
            chunks_written=counters.written,
            chunks_repeated=counters.repeated,
            chunks_rejected=counters.rejected,
            commits=counters.commits,
            start_time=self._start_time,
            server_version=self._version,
            used_bytes=self._db.used_bytes(),
            free_disk_bytes=self._db.free_disk_bytes(),
            append_limit_bytes=self._db.ordinary_bytes,
            retention=self._retention_stats(),
        )
        response.server_time.GetCurrentTime()
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

    def end_streams(self) -> None:
        """End the streams of writers; the Writer must have stopped, so that everything they sent is acknowledged."""
        with self._lock:
            self._stopping = True
            streams = list(self._append_streams)
        for stream in streams:
            stream.fail(_stopping())

    @contextmanager
    def _writing(self) -> Iterator[AppendStream]:
        stream = AppendStream(self._writer.queue)
        with self._lock:
            if self._stopping:
                raise _stopping()
            self._append_streams.add(stream)
        try:
            yield stream
        finally:
            with self._lock:
                self._append_streams.discard(stream)

    def _wait_for_end(self, request: store_pb2.GetCaptureRequest, context: grpc.ServicerContext) -> None:
        _, feed = self._catalog.require(request.capture_id)
        if feed is None:
            return
        context.add_callback(feed.wake)
        with feed.condition:
            feed.condition.wait_for(
                lambda: feed.capture.ended or feed.deleted or self._catalog.stopping or not context.is_active(),
                _seconds(request),
            )
            if feed.deleted:
                raise unknown_capture(request.capture_id)
            if self._catalog.stopping and not feed.capture.ended:
                raise _stopping()


def _parse(kind: type[_Request], data: bytes) -> _Request:
    """Parse a request. A deserializer of gRPC's would answer malformed bytes with INTERNAL."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise invalid("message", f"cannot be parsed as {kind.DESCRIPTOR.name}: {error}") from None


def _capture_of(request: Message) -> str:
    """Return the capture that a request is about; empty if it is about none, or all."""
    if isinstance(request, store_pb2.OpenCaptureRequest):
        return request.description.capture_id
    return str(getattr(request, "capture_id", ""))


def _seconds(request: store_pb2.GetCaptureRequest) -> float:
    return min(request.wait.seconds + request.wait.nanos / 1e9, MAX_WAIT_SECONDS)


def _stopping() -> Failure:
    return Failure(Reason.ERROR_REASON_NOT_SERVING, "The store is stopping; try again later.")


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
