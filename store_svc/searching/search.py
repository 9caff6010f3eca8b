"""Searches: select the captures, scan them in the threads of all searches, and return the best hits."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from itertools import groupby

import numpy as np
import numpy.typing as npt

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.labels import matches
from residuum.wire.limits import (
    MAX_CAPTURES_PER_READ,
    MAX_SEARCH_CONTEXT,
    MAX_SEARCH_HITS,
    MAX_SEARCH_WIDTH,
)
from residuum.wire.selection import check_positions
from store_svc.archive.fetching import Fetcher
from store_svc.captures.capture_names import CaptureName
from store_svc.captures.catalog import Catalog
from store_svc.captures.labels import LabelReader
from store_svc.checks import check_states, invalid, read_where
from store_svc.database.db import Database, Table
from store_svc.database.keys import pack_number
from store_svc.reading.open_read import check_not_cancelled
from store_svc.searching.hits import Hit
from store_svc.searching.scanning import Scan
from store_svc.searching.scores import Scorer
from store_svc.searching.texts import TokenTexts
from store_svc.searching.turns import Turns

MAX_THREADS = 4
"""Threads of all searches, on a machine with many cores. More would wait for Python's lock, and each keeps hits."""

_PROGRESS_SECONDS = 0.25
_MESSAGE_BYTES = 1 << 20
"""The size at which a message with hits is sent."""
_HITS_AT_ONCE = 256
"""Hits whose texts are looked up together, because each manifest is read once for them."""
_CHECKED_AT_ONCE = 1024
"""Captures that are selected before the store checks whether the caller is still there."""


class Searcher:
    """Runs the searches of a store."""

    def __init__(self, db: Database, catalog: Catalog, fetcher: Fetcher | None = None) -> None:
        """Search a database, and perhaps what is only in its archive."""
        self._fetcher = fetcher
        self._db = db
        self._catalog = catalog
        self._labels = LabelReader(db)
        cores = len(os.sched_getaffinity(0))
        self._turns = Turns(max(1, min(cores // 2, MAX_THREADS)))  # the other cores are for reads and writes

    def search(
        self,
        request: store_pb2.SearchRequest,
        scope: str | None,
        own_tenant: str,
        is_cancelled: Callable[[], bool],
        scanned: Callable[[int], None],
    ) -> Iterator[store_pb2.SearchResponse]:
        """Yield the responses to a request.

        Args:
            request: The request, which `check_search` has checked.
            scope: The tenant whose captures are searched; None for those of all tenants.
            own_tenant: The tenant of `capture_ids`, if `scope` is None.
            is_cancelled: Returns whether the caller has cancelled.
            scanned: Called with the bytes that were scanned since the last call.

        Raises:
            Failure: INVALID_FIELD or NOT_SERVING, or the caller has cancelled.
        """
        scorer = Scorer(vector_of(request), request.measure, request.order)
        numbers, unknown = self._select(request, scope, own_tenant, is_cancelled)
        scan = Scan(self._db, self._catalog, request, scorer, numbers, self._fetcher)
        num_bytes = 0
        with self._turns.working(scan.lane) as lanes:
            is_done = False
            while not is_done:
                is_done = lanes.wait(_PROGRESS_SECONDS)
                if self._catalog.stopping:
                    raise Failure(Reason.ERROR_REASON_NOT_SERVING, "The store is stopping; try again later.")
                check_not_cancelled(is_cancelled)
                progress = scan.progress.message()
                scanned(progress.bytes_scanned - num_bytes)
                num_bytes = progress.bytes_scanned
                if not is_done:
                    yield store_pb2.SearchResponse(progress=progress)
        hits = scan.best(lambda: check_not_cancelled(is_cancelled))
        yield from self._results(scan, hits, request.context_tokens, unknown)

    def close(self) -> None:
        """End the threads, once no search runs."""
        self._turns.close()

    def _select(
        self, request: store_pb2.SearchRequest, scope: str | None, own_tenant: str, is_cancelled: Callable[[], bool]
    ) -> tuple[array[int], list[str]]:
        """Return the internal numbers of the selected captures, and the given IDs that do not exist."""
        numbers: array[int] = array("Q")
        if request.capture_ids:
            unknown = []
            tenant = own_tenant if scope is None else scope
            for capture_id in dict.fromkeys(request.capture_ids):
                number = self._catalog.number_of(CaptureName(tenant, capture_id))
                if number is None:
                    unknown.append(capture_id)
                else:
                    numbers.append(number)
            return numbers, unknown
        conditions = read_where(request.where)
        among = self._labels.candidates(conditions, scope, None)
        found = self._catalog.newest(None, request.prefix, request.states, scope, among)
        for at, (number, summary) in enumerate(found):
            if at % _CHECKED_AT_ONCE == 0:
                check_not_cancelled(is_cancelled)
            if summary is not None and (not conditions or matches(conditions, self._labels.of(number))):
                numbers.append(number)
        return numbers, []

    def _results(
        self, scan: Scan, hits: list[Hit], context: int, unknown: list[str]
    ) -> Iterator[store_pb2.SearchResponse]:
        response = store_pb2.SearchResponse(progress=scan.progress.message())
        num_bytes = 0
        for message in self._messages(hits, context):
            if num_bytes + message.ByteSize() > _MESSAGE_BYTES:
                yield response
                response, num_bytes = store_pb2.SearchResponse(progress=response.progress), 0
            num_bytes += message.ByteSize()
            response.hits.append(message)
        response.is_last = True
        response.unknown_capture_ids.extend(unknown)
        yield response

    def _messages(self, hits: list[Hit], context: int) -> Iterator[store_pb2.SearchHit]:
        """Yield hits as messages, without those of captures that are gone by now."""
        for first in range(0, len(hits), _HITS_AT_ONCE):
            part = hits[first : first + _HITS_AT_ONCE]
            messages: dict[Hit, store_pb2.SearchHit] = {}
            for number, own in groupby(sorted(part, key=_number_of), key=_number_of):
                with self._db.read() as txn:
                    value = txn.get(Table.ENDED, pack_number(number))
                    data = None if value is None else bytes(value)
                if data is not None:
                    texts = TokenTexts(capture_pb2.CaptureManifest.FromString(data))
                    messages.update((hit, texts.message(hit, context)) for hit in own)
            yield from (messages[hit] for hit in part if hit in messages)


def _number_of(hit: Hit) -> int:
    return hit.number


def vector_of(request: store_pb2.SearchRequest) -> npt.NDArray[np.float32]:
    """Return the vector of a request, float32 [width].

    Raises:
        Failure: INVALID_FIELD if it is malformed.
    """
    data = request.vector
    if not data or len(data) % 4 or len(data) > 4 * MAX_SEARCH_WIDTH:
        wanted = f"must be 1 to {MAX_SEARCH_WIDTH} float32 values, 4 bytes each, not {len(data)} bytes"
        raise invalid("vector", wanted)
    vector = np.frombuffer(data, dtype="<f4").astype(np.float32)
    if not np.isfinite(vector).all():
        raise invalid("vector", "must have finite values")
    if not vector.any():
        raise invalid("vector", "is zero, so it has no direction")
    return vector


def check_search(request: store_pb2.SearchRequest) -> None:
    """Check a request.

    Raises:
        Failure: INVALID_FIELD if a field is wrong.
    """
    vector_of(request)
    for field, value, kind in (
        ("site", request.site, capture_pb2.Site),
        ("measure", request.measure, store_pb2.SearchMeasure),
        ("order", request.order, store_pb2.SearchOrder),
    ):
        if value not in kind.values():
            raise invalid(field, f"there is no {field} {int(value)}")
    check_states(request.states)
    if not 1 <= request.max_hits <= MAX_SEARCH_HITS:
        raise invalid("max_hits", f"must be 1 to {MAX_SEARCH_HITS}, not {request.max_hits}")
    if request.context_tokens > MAX_SEARCH_CONTEXT:
        raise invalid("context_tokens", f"must be at most {MAX_SEARCH_CONTEXT}, not {request.context_tokens}")
    if len(request.capture_ids) > MAX_CAPTURES_PER_READ:
        given = len(request.capture_ids)
        raise invalid("capture_ids", f"must be at most {MAX_CAPTURES_PER_READ} captures, not {given}")
    if request.capture_ids and (request.prefix or request.states or request.where):
        raise invalid("capture_ids", "cannot be combined with prefix, states or where")
    read_where(request.where)
    try:
        check_positions(request.positions)
    except ValueError as error:
        raise invalid("positions", str(error)) from None
