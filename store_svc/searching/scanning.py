"""Scans one capture after the other: one lane of a search."""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.rows.encodings import EncodingError, RowFormat
from residuum.wire.rows.frame_keys import FrameKey, unpack_frame
from residuum.wire.rows.frames import FrameError
from store_svc.archive.fetching import Away, Fetcher
from store_svc.archive.records import Record, frames_table, place_of
from store_svc.captures.capture_names import name_of
from store_svc.captures.catalog import Catalog
from store_svc.database.db import Database, Table, Txn
from store_svc.database.frames import StoredFrame
from store_svc.database.keys import after_group, pack_number
from store_svc.reading.frame_access import located, reading_rows
from store_svc.reading.query import Query
from store_svc.searching.blocks import LayerRows, RowBlock, rows_of_chunk, rows_of_full_frame
from store_svc.searching.hits import BestHits, Hit
from store_svc.searching.scores import Scorer

_TICK_SECONDS = 0.02
"""How long a lane waits for the archive before it gives others a turn."""

_TRANSACTION_SECONDS = 0.01
"""Time after which a read transaction ends. LMDB cannot reuse the pages of deleted captures while it lasts."""

OPEN, NO_LAYER = store_pb2.LEFT_OUT_REASON_OPEN, store_pb2.LEFT_OUT_REASON_NO_LAYER
OTHER_WIDTH, ENCODING = store_pb2.LEFT_OUT_REASON_OTHER_WIDTH, store_pb2.LEFT_OUT_REASON_ENCODING
DAMAGED, GONE = store_pb2.LEFT_OUT_REASON_DAMAGED, store_pb2.LEFT_OUT_REASON_GONE

_FAILURES = {
    Reason.ERROR_REASON_UNKNOWN_CAPTURE: GONE,
    Reason.ERROR_REASON_UNKNOWN_LAYER: NO_LAYER,
    Reason.ERROR_REASON_UNKNOWN_SITE: NO_LAYER,
    Reason.ERROR_REASON_CHECKSUM_MISMATCH: DAMAGED,
}


class LeftOutError(Exception):
    """A capture cannot be searched."""

    def __init__(self, reason: store_pb2.LeftOutReason.ValueType) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Progress:
    """What a search has scanned. Lanes change it under its lock."""

    num_captures: int = 0
    captures_done: int = 0
    rows_scanned: int = 0
    bytes_scanned: int = 0
    rows_without_score: int = 0
    left_out: Counter[store_pb2.LeftOutReason.ValueType] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def message(self) -> store_pb2.SearchProgress:
        """Return it as a message."""
        with self.lock:
            return store_pb2.SearchProgress(
                num_captures=self.num_captures,
                captures_done=self.captures_done,
                rows_scanned=self.rows_scanned,
                bytes_scanned=self.bytes_scanned,
                rows_without_score=self.rows_without_score,
                left_out=[
                    store_pb2.LeftOutCaptures(reason=reason, count=count)
                    for reason, count in sorted(self.left_out.items())
                ],
            )


class Scan:
    """The captures of a search, which its lanes scan, and the best hits so far."""

    def __init__(
        self,
        db: Database,
        catalog: Catalog,
        request: store_pb2.SearchRequest,
        scorer: Scorer,
        numbers: array[int],
        fetcher: Fetcher | None = None,
    ) -> None:
        """Prepare to scan captures, given by their internal numbers. `fetcher` reads those in the archive."""
        self._fetcher = fetcher
        self._db = db
        self._catalog = catalog
        self._site = request.site or capture_pb2.SITE_RESID_POST
        self._rows_wanted = store_pb2.ReadCapturesRequest(
            layers=[request.layer], sites=[self._site], positions=request.positions
        )
        self._layer = request.layer
        self._scorer = scorer
        self._hits_of_one = min(request.max_hits_per_capture or request.max_hits, request.max_hits)
        self._numbers = iter(numbers)
        self._lock = threading.Lock()
        self._best = BestHits(request.max_hits)
        self.progress = Progress(num_captures=len(numbers))
        """What was scanned so far."""

    def lane(self) -> Generator[None, None, None]:
        """Scan captures until none is left. Yield after each step, which takes a few hundredths of a second at most."""
        block = RowBlock(self._scorer.width)
        while (number := self._next()) is not None:
            try:
                yield from self._scan(number, block)
            except LeftOutError as error:
                self._leave_out(error.reason)
            except Failure as failure:
                if failure.reason not in _FAILURES:
                    raise
                self._leave_out(_FAILURES[failure.reason])
            with self.progress.lock:
                self.progress.captures_done += 1
            yield

    def best(self, check: Callable[[], None]) -> list[Hit]:
        """Return the best hits, the best first, once all lanes have ended.

        Hits of captures that are gone or damaged are left out. `check` is called now and then, and may raise.
        """
        hits = self._best.best()
        bad: dict[int, store_pb2.LeftOutReason.ValueType] = {}
        for number, key in sorted({(hit.number, hit.key) for hit in hits}):
            check()
            if number not in bad and (reason := self._problem(key)) is not None:
                bad[number] = reason
                self._leave_out(reason)
        return [hit for hit in hits if hit.number not in bad]

    def _problem(self, key: bytes) -> store_pb2.LeftOutReason.ValueType | None:
        """Return why the rows of a frame cannot be used; None if they match their checksum."""
        with self._db.read() as txn:
            try:
                frame = txn.frame(key)
                if frame is not None:
                    chunk = frame.parse()
                    return None if chunk.verify_layers([list(chunk.header.layers).index(self._layer)]) else DAMAGED
            except FrameError:
                return DAMAGED
        with self._db.read() as txn:  # what comes from the archive was checked on its way
            return GONE if place_of(txn, key) is None else None

    def _next(self) -> int | None:
        with self._lock:
            return next(self._numbers, None)

    def _leave_out(self, reason: store_pb2.LeftOutReason.ValueType) -> None:
        with self.progress.lock:
            self.progress.left_out[reason] += 1

    def _scan(self, number: int, block: RowBlock) -> Generator[None, None, None]:
        """Scan a capture.

        Raises:
            LeftOutError: It cannot be searched.
            Failure: It is gone, or does not have the layer and site.
        """
        summary = self._catalog.summary_of(number)
        if summary is None:
            raise LeftOutError(GONE)
        with self._catalog.reading(name_of(summary)) as (found, feed):
            if found != number:
                raise LeftOutError(GONE)
            if feed is not None:
                raise LeftOutError(OPEN)
            capture = _CaptureScan(self._db, number, self._rows_wanted, self._site, self._layer, self._scorer.width)
            own = BestHits(self._hits_of_one)
            block.clear()
            at = pack_number(number)
            score = partial(self._score, block, own, capture, summary)
            while at:
                with reading_rows(self._db, number) as (txn, record):  # they may be dropped between two transactions
                    until = time.monotonic() + _TRANSACTION_SECONDS
                    while at and time.monotonic() < until:
                        at = capture.step(txn, at, record, block, score)
                yield
                yield from self._scan_away(capture, block, score)
            score()
            with self._db.read() as txn:
                if txn.get(Table.ENDED, pack_number(number)) is None:
                    raise LeftOutError(GONE)
            with self._lock:
                self._best.add(own.best())
        with self.progress.lock:
            self.progress.rows_without_score += capture.rows_without_score

    def _scan_away(
        self, capture: _CaptureScan, block: RowBlock, score: Callable[[], None]
    ) -> Generator[None, None, None]:
        """Scan the frames of a capture that are only in the archive. Yield while they are on their way.

        Raises:
            LeftOutError: A frame is damaged.
            Failure: ARCHIVE_UNREACHABLE or CHECKSUM_MISMATCH.
        """
        if not capture.away:
            return
        if self._fetcher is None:
            raise LeftOutError(GONE)
        for found in self._fetcher.ahead(capture.away, capture.capture_id, _TICK_SECONDS):
            if found is not None and found[1] is not None:
                capture.take_fetched(found[0], found[1], block, score)
            yield
        capture.away.clear()

    def _score(self, block: RowBlock, own: BestHits, capture: _CaptureScan, summary: store_pb2.CaptureSummary) -> None:
        """Keep the rows of a block that may be hits, and clear it."""
        rows = block.rows
        rough = self._scorer.rough_ranks(rows)
        with np.errstate(invalid="ignore"):
            likely = np.flatnonzero(~(rough < max(own.bar, self._best.bar)))
        if len(likely):
            scores = self._scorer.scores(rows[likely])
            ranks = self._scorer.ranks(scores)
            finite = np.isfinite(scores)
            capture.rows_without_score += int((~finite).sum())
            hits = []
            for at in np.flatnonzero(finite):
                key, sequence, position = block.origin(int(likely[at]))
                # A row that has no rank in float32 excludes no other row: while it is among the best, all are likely.
                rank = rough[likely[at]]
                rough_rank = float(rank) if np.isfinite(rank) else -np.inf
                hits.append(
                    Hit(
                        -float(ranks[at]), summary.capture_id, summary.tenant, sequence, position, rough_rank,
                        float(scores[at]), capture.number, key,
                    )
                )  # fmt: skip
            own.add(hits)
        with self.progress.lock:
            self.progress.rows_scanned += len(rows)
            self.progress.bytes_scanned += len(rows) * capture.row_bytes
        block.clear()


class _CaptureScan:
    """The frames of one capture."""

    def __init__(
        self,
        db: Database,
        number: int,
        wanted: store_pb2.ReadCapturesRequest,
        site: capture_pb2.Site.ValueType,
        layer: int,
        width: int,
    ) -> None:
        """Look at the capture's manifest.

        Raises:
            LeftOutError: It is gone, or has rows that cannot be searched.
            Failure: It does not have the layer and site.
        """
        with db.read() as txn:
            value = txn.get(Table.ENDED, pack_number(number))
            if value is None:
                raise LeftOutError(GONE)
            manifest = capture_pb2.CaptureManifest.FromString(bytes(value))
        self.number = number
        self.capture_id = manifest.description.capture_id
        self.rows_without_score = 0
        self.away: list[Away] = []
        """Wanted frames that must be fetched from the archive."""
        self._prefix = pack_number(number)
        self._query = Query(wanted, manifest.description, manifest.sequences)
        if layer not in self._query.layers_at(site):
            raise LeftOutError(NO_LAYER)
        form = RowFormat.of_capture(manifest.description, site)
        if not form.decodes_to_rows:
            raise LeftOutError(ENCODING)
        if form.decoded_width != width:
            raise LeftOutError(OTHER_WIDTH)
        self.row_bytes = form.row_bytes
        self._form, self._layer = form, layer
        self._group: tuple[int, ...] = ()
        self._layers = self._index = 0

    def step(self, txn: Txn, at: bytes, record: Record | None, block: RowBlock, score: Callable[[], None]) -> bytes:
        """Copy the wanted rows of the first frame from a key on into a block; `score` empties it when it is full.

        Returns:
            The key to continue from, empty after the last frame.

        Raises:
            LeftOutError: The capture is gone or damaged.
        """
        found = txn.next_key(frames_table(record), at)
        if found is None or not found.startswith(self._prefix):
            return b""
        key = unpack_frame(found)
        if not self._query.wants_group(key):
            return after_group(found)
        if self._query.wants(key):
            where = located(txn, found, record)
            if isinstance(where, Away):
                self.away.append(where)
            else:
                self._take(found, lambda: txn.frame(found), block, score)
        return found + b"\0"

    def take_fetched(self, key: bytes, data: memoryview, block: RowBlock, score: Callable[[], None]) -> None:
        """Copy the wanted rows of a frame from the archive into a block; `score` empties it when it is full.

        Raises:
            LeftOutError: The frame is damaged.
        """
        self._take(key, lambda: StoredFrame.of(None, data), block, score)

    def _take(
        self, key: bytes, frame_of: Callable[[], StoredFrame | None], block: RowBlock, score: Callable[[], None]
    ) -> None:
        try:
            frame = frame_of()
            if frame is None:
                raise LeftOutError(GONE)
            rows = self._rows(unpack_frame(key), frame)
            if rows is not None:
                for _ in block.fill(key, rows):
                    score()
        except (FrameError, EncodingError):
            raise LeftOutError(DAMAGED) from None

    def _rows(self, key: FrameKey, frame: StoredFrame) -> LayerRows | None:
        """Return the wanted rows of a frame, or None."""
        if self._query.wants_positions(key):
            group = key[1:5]
            if group != self._group:
                layers = self._query.layers_between(key)
                self._group, self._layers, self._index = group, len(layers), layers.index(self._layer)
            positions = range(key.first_position, key.last_position + 1)
            rows = rows_of_full_frame(self._form, frame.payload, self._layers, self._index, key.sequence, positions)
            if rows is not None:
                return rows
        chunk = frame.parse()
        found, wanted = self._query.cut(chunk.header)
        return rows_of_chunk(chunk, found[0], wanted) if found and wanted else None
