"""Loads the catalog from the database when the store starts."""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.rows.frames import FrameError
from store_svc.archive.records import MOVED, read_record
from store_svc.captures.catalog import Catalog, CatalogLimits
from store_svc.captures.leases import Leases
from store_svc.captures.ledger import Cells
from store_svc.captures.lifecycle import Capture, restore, summarize
from store_svc.captures.numbers import doom_unopened
from store_svc.database.db import Database, Table, Txn
from store_svc.database.keys import unpack_number
from store_svc.reading.slicing import cells_of
from svc_common.logs import get_logger

_log = get_logger(__name__)


def load_catalog(
    db: Database, limits: CatalogLimits | None = None, leases: Leases | None = None, *, has_archive: bool = False
) -> Catalog:
    """Return the catalog of a database. The rows of open captures are rebuilt from their frames.

    A damaged frame of an open capture is deleted: its rows are missing, so the capture ends INCOMPLETE.

    Without an archive, copies do not count: only captures without rows in the database have a state of the archive.

    Raises:
        StoreFullError: There is no room to free frames.
        DamagedError: The database cannot be used.
    """
    if db.num_shards > 1:
        unopened = db.write(doom_unopened, reserve=True)
        if unopened:
            _log.info("frees rows of captures that were not committed before the last store ended", captures=unopened)
    catalog = Catalog(limits, leases, has_archive=has_archive)
    damaged: list[bytes] = []
    with db.read() as txn:
        for key, value in txn.items(Table.ENDED):
            manifest = capture_pb2.CaptureManifest.FromString(bytes(value))
            number = unpack_number(key)
            summary = summarize(manifest, manifest.num_rows)
            record = read_record(txn, number)
            if record is not None and (has_archive or record.state == MOVED):
                summary.archive_state = record.state
            catalog.open_ended(number, summary)
        for key, value in txn.items(Table.LIVE):
            loaded = _load(txn, key, capture_pb2.CaptureManifest.FromString(bytes(value)))
            catalog.open(loaded.capture, loaded.keys)
            damaged += loaded.damaged
    if damaged:
        db.write(partial(_delete_frames, keys=damaged), reserve=True)
    return catalog


def _delete_frames(txn: Txn, keys: list[bytes]) -> None:
    for key in keys:
        txn.delete(Table.FRAMES, key)


class _Loaded(NamedTuple):
    capture: Capture
    keys: list[bytes]
    """The keys of its frames."""
    damaged: list[bytes]
    """The keys of damaged frames, which do not count."""


def _load(txn: Txn, key: bytes, record: capture_pb2.CaptureManifest) -> _Loaded:
    keys: list[bytes] = []
    frames: list[tuple[Cells, int]] = []
    damaged: list[bytes] = []
    for frame_key in txn.frame_keys(key):
        try:
            frame = txn.frame(frame_key)
            assert frame is not None  # noqa: S101 - its key is there
            frames.append((cells_of(frame.parse().header), len(frame.prefix) + len(frame.payload)))
            keys.append(frame_key)
        except FrameError as error:
            damaged.append(frame_key)
            _log.error(
                "a chunk of an open capture is damaged. Its rows are lost, so the capture will end INCOMPLETE",
                request_id=record.description.capture_id,
                error=str(error),
            )
    losses = [store_pb2.RowLoss.FromString(bytes(value)) for _, value in txn.items(Table.LOSSES, key)]
    value = txn.get(Table.SEALS, key)
    seal = store_pb2.SealCaptureRequest.FromString(bytes(value)) if value is not None else None
    return _Loaded(restore(unpack_number(key), record, frames, losses, seal, time.monotonic()), keys, damaged)
