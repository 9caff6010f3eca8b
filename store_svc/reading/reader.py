"""Serves the rows and the manifests of captures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice

from residuum.rpc.errors import Failure
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.rows.capture_batches import BATCH_BYTES, CaptureBatch, end_field
from residuum.wire.rows.frames import length_prefix
from store_svc.archive.fetching import Fetcher
from store_svc.archive.records import state_field
from store_svc.captures.capture_names import CaptureName, unknown_capture
from store_svc.captures.catalog import Catalog, Feed
from store_svc.captures.labels import read_labels
from store_svc.captures.lifecycle import Capture
from store_svc.database.db import Database, Table
from store_svc.database.keys import pack_number
from store_svc.item_errors import item_error
from store_svc.reading.frame_access import FrameAccess
from store_svc.reading.open_read import OpenRead, check_not_cancelled
from store_svc.reading.placing import Placing, joined
from store_svc.reading.query import Query, Selection
from store_svc.reading.responses import Responses
from store_svc.shared_memory.memories import ReadUse

_MANIFEST = store_pb2.ReadChunksResponse.MANIFEST_FIELD_NUMBER


class Reader:
    """Serves rows and manifests.

    The reader copies each frame in its own read transaction. A longer transaction would last as long as a slow client
    takes, and LMDB could not reuse the pages of deleted captures meanwhile.
    """

    def __init__(
        self,
        db: Database,
        catalog: Catalog,
        fetcher: Fetcher | None = None,
    ) -> None:
        """Create the reader.

        Args:
            db: The database.
            catalog: The published captures.
            fetcher: Reads rows that are only in the archive; None without one.
        """
        self._db = db
        self._catalog = catalog
        self._frames = FrameAccess(db, fetcher)

    def manifest(self, name: CaptureName) -> capture_pb2.CaptureManifest:
        """Return the current manifest of a capture.

        Raises:
            Failure: UNKNOWN_CAPTURE.
        """
        number, feed = self._catalog.require(name)
        if feed is not None:
            return self._live_manifest(feed.capture)
        return self._ended_manifest(number, name.capture_id)

    def read(
        self,
        name: CaptureName,
        request: store_pb2.ReadChunksRequest,
        is_cancelled: Callable[[], bool],
        feed_seen: Callable[[Feed], object],
        memory: ReadUse | None = None,
    ) -> Generator[bytes, None, None]:
        """Yield the serialised ReadChunksResponses that answer a request. The capture cannot expire meanwhile.

        Args:
            name: The capture.
            request: The rows to read.
            is_cancelled: Returns whether the caller has cancelled.
            feed_seen: Called with the feed that this may wait on, so that a cancellation can wake it.
            memory: The shared memory for large payloads.

        Raises:
            Failure: UNKNOWN_CAPTURE, UNKNOWN_LAYER, UNKNOWN_SITE, INVALID_FIELD, CHECKSUM_MISMATCH or NOT_SERVING.
        """
        placing = Placing(is_cancelled, memory)
        with self._catalog.reading(name) as (number, feed):
            if feed is None:
                yield from joined(self._read_ended(number, request, is_cancelled, placing), memory)
            else:
                feed_seen(feed)
                yield from joined(self._read_open(feed, request, is_cancelled, placing), memory)

    def read_many(
        self,
        names: Sequence[CaptureName | None],
        request: store_pb2.ReadCapturesRequest,
        is_cancelled: Callable[[], bool],
        feed_seen: Callable[[Feed], object],
        memory: ReadUse | None = None,
    ) -> Generator[bytes, None, None]:
        """Yield the serialised ReadCapturesResponses that answer a request.

        Args:
            names: The captures; None for one that does not exist for the caller.
            request: The rows to read of each.
            is_cancelled: As for `read`.
            feed_seen: As for `read`.
            memory: As for `read`.

        Raises:
            Failure: NOT_SERVING, or the caller has cancelled. Failures of one capture are in the responses.
        """
        batch = CaptureBatch()

        def placing(index: int) -> Placing:
            return Placing(is_cancelled, memory, partial(batch.framed, index))

        placed = 0
        for index, field in self._fields_of_many(names, request, is_cancelled, feed_seen, placing):
            if not field:  # the next field may take long to come
                if full := batch.take():
                    yield full
                continue
            now = memory.num_bytes if memory is not None else 0
            weight = (now - placed) * BATCH_BYTES // memory.message_bytes if memory is not None else 0
            if full := batch.add(index, field, weight):
                yield full
            placed = now
            if weight >= BATCH_BYTES:  # kept here, a large payload could leave no room in the memory for the next one
                yield batch.take()
        if rest := batch.take():
            yield rest

    def _fields_of_many(
        self,
        names: Sequence[CaptureName | None],
        request: store_pb2.ReadCapturesRequest,
        is_cancelled: Callable[[], bool],
        feed_seen: Callable[[Feed], object],
        placing: Callable[[int], Placing],
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the fields of the responses, each with the index of its capture.

        An empty field says that the next one may take long to come.
        """
        known = []
        for index, name in enumerate(names):
            if name is not None and self._catalog.number_of(name) is not None:
                known.append((index, name))
            else:
                yield index, end_field(item_error(unknown_capture(request.capture_ids[index])))
        open_ones = []
        for index, name in known:
            check_not_cancelled(is_cancelled)
            if request.follow and request.any_order and self._catalog.feed_named(name) is not None:
                open_ones.append((index, name))
            else:
                yield from self._fields_of_one(index, name, request, is_cancelled, feed_seen, placing)
        yield from self._fields_of_open(open_ones, request, is_cancelled, feed_seen, placing)

    def _fields_of_one(
        self,
        index: int,
        name: CaptureName,
        request: store_pb2.ReadCapturesRequest,
        is_cancelled: Callable[[], bool],
        feed_seen: Callable[[Feed], object],
        placing: Callable[[int], Placing],
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the fields of one capture from its beginning to its end."""
        try:
            with self._catalog.reading(name) as (number, feed):
                if feed is None:
                    fields = self._fields_of_ended(number, name.capture_id, request, is_cancelled, placing(index))
                else:
                    feed_seen(feed)
                    fields = self._read_open(feed, request, is_cancelled, placing(index))
                for field in fields:
                    yield index, field
        except Failure as error:
            yield index, end_field(item_error(error))
        else:
            yield index, end_field()

    def _fields_of_open(
        self,
        captures: Sequence[tuple[int, CaptureName]],
        request: store_pb2.ReadCapturesRequest,
        is_cancelled: Callable[[], bool],
        feed_seen: Callable[[Feed], object],
        placing: Callable[[int], Placing],
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the fields of open captures, of all of them as their rows are published."""
        news = threading.Event()
        reads: dict[int, OpenRead] = {}
        with ExitStack() as stack:
            for index, name in captures:
                try:
                    _, feed = stack.enter_context(self._catalog.reading(name))
                    if feed is None:  # it has ended meanwhile
                        yield from self._fields_of_one(index, name, request, is_cancelled, feed_seen, placing)
                        continue
                    read = self._open_read(feed, request, is_cancelled, placing(index))
                except Failure as error:
                    yield index, end_field(item_error(error))
                    continue
                feed_seen(feed)
                stack.enter_context(feed.watched(news))
                reads[index] = read
                yield index, read.begin()
            # A message of its own: in one part with the last manifest, protobuf would merge both.
            yield -1, b""
            while reads:
                news.clear()
                for index, read in list(reads.items()):
                    yield from self._news(index, read, is_cancelled)
                    if read.is_done:
                        del reads[index]
                yield -1, b""
                if reads:
                    news.wait()

    def _news(self, index: int, read: OpenRead, is_cancelled: Callable[[], bool]) -> Iterator[tuple[int, bytes]]:
        """Yield the fields of the rows that an open capture has got, and its end."""
        try:
            for field in filter(None, read.news(is_cancelled)):
                yield index, field
        except Failure as error:
            yield index, end_field(item_error(error))
            read.is_done = True
        else:
            if read.is_done:
                yield index, end_field()

    def _fields_of_ended(
        self, number: int, capture_id: str, request: Selection, is_cancelled: Callable[[], bool], placing: Placing
    ) -> Iterator[bytes]:
        """Yield the manifest and the rows of an ended capture, as fields of a response."""
        data = self._ended_record(number, capture_id)
        manifest = capture_pb2.CaptureManifest.FromString(data)
        query = Query(request, manifest.description, manifest.sequences)
        self._catalog.touch(number)
        frames = self._frames.wanted(number, query, is_cancelled)
        first = list(islice(frames, 1))  # if it cannot be fetched, the caller gets nothing, and knows that it must wait
        yield _manifest_field(data)
        yield from Responses(query, placing, is_cancelled).of(chain(first, frames))
        self._ended_record(number, capture_id)  # raises if it was deleted meanwhile

    def _read_ended(
        self, number: int, request: store_pb2.ReadChunksRequest, is_cancelled: Callable[[], bool], placing: Placing
    ) -> Iterator[bytes]:
        yield from self._fields_of_ended(number, request.capture_id, request, is_cancelled, placing)
        yield _manifest_field(self._ended_record(number, request.capture_id))

    def _read_open(
        self, feed: Feed, request: Selection, is_cancelled: Callable[[], bool], placing: Placing
    ) -> Iterator[bytes]:
        """Yield the responses for an open capture.

        An empty response says that the next one may take long to come.
        """
        read = self._open_read(feed, request, is_cancelled, placing)
        yield read.begin()
        yield b""
        while not read.is_done:
            read.wait(is_cancelled)
            yield from read.news(is_cancelled)

    def _open_read(
        self, feed: Feed, request: Selection, is_cancelled: Callable[[], bool], placing: Placing
    ) -> OpenRead:
        def rows(keys: Iterable[bytes], query: Query) -> Iterator[bytes]:
            frames = (self._frames.frame(key, query.capture_id, is_cancelled) for key in keys)
            return Responses(query, placing, is_cancelled).of(frames)

        return OpenRead(feed, request, self._catalog, rows, self._live_manifest)

    def _live_manifest(self, capture: Capture) -> capture_pb2.CaptureManifest:
        manifest = capture.manifest()
        with self._db.read() as txn:
            manifest.MergeFromString(read_labels(txn, capture.number))
        return manifest

    def _ended_manifest(self, number: int, capture_id: str) -> capture_pb2.CaptureManifest:
        return capture_pb2.CaptureManifest.FromString(self._ended_record(number, capture_id))

    def _ended_record(self, number: int, capture_id: str) -> bytes:
        """Return the serialised manifest of an ended capture."""
        with self._db.read() as txn:
            value = txn.get(Table.ENDED, pack_number(number))
            if value is None:
                raise unknown_capture(capture_id)
            state = state_field(txn, number, has_archive=self._catalog.has_archive)
            return bytes(value) + read_labels(txn, number) + state


def _manifest_field(data: bytes) -> bytes:
    """Return a serialised manifest as a response."""
    return length_prefix(_MANIFEST, len(data)) + data
