"""The thread that drops rows from the database once they are in the archive."""

from __future__ import annotations

from store_svc.archive.access import ArchiveAccess
from store_svc.archive.copier import Copier
from store_svc.archive.link import StoppedError
from store_svc.database.db import Table
from svc_common.logs import get_logger

_DROPPED_AT_ONCE = 1024

_log = get_logger(__name__)


class Dropper:
    """Drops rows of copied captures while those in the database are too many. This needs no network."""

    def __init__(self, access: ArchiveAccess, copier: Copier, keep_bytes: int) -> None:
        """Drop rows.

        Args:
            access: The database.
            copier: Forgets captures that were deleted before they were copied.
            keep_bytes: Beyond these bytes of chunks, the rows of copied captures are dropped.
        """
        self.keep_bytes = keep_bytes
        self._access = access
        self._copier = copier

    def run(self) -> None:
        """Drop rows until the store stops."""
        try:
            while True:
                try:
                    self.drop()
                    self._copier.forget_deleted()
                except StoppedError:
                    raise
                except Exception:  # noqa: BLE001 - a bug: the thread must go on
                    _log.exception("dropping rows has failed")
                self._access.sleep()
        except StoppedError:
            return

    def drop(self) -> None:
        """Drop rows of copied captures while those in the database are too many, or the store is full."""
        while numbers := self._access.catalog.to_drop(self.excess(), _DROPPED_AT_ONCE):
            self._access.change(lambda batch: batch.drop_rows(numbers))

    def excess(self) -> int:
        """Return how many bytes of rows to drop."""
        access = self._access
        excess = access.catalog.num_bytes - self.keep_bytes
        if access.writer.room.why_full:
            with access.read() as txn:
                is_freeing = txn.next_key(Table.DOOMED, b"") is not None
            if not is_freeing:  # the rows that were dropped before were not enough
                excess = max(excess, access.db.ordinary_bytes // 8)
        return excess
