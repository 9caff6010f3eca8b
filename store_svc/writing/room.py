"""Tracks whether the store has room for waiting writes."""

from __future__ import annotations

import math
import time

from residuum.rpc.errors import Failure, Reason
from store_svc.database.db import Database, StoreFullError
from svc_common.logs import get_logger

_LEAST_BYTES = 64 << 10
"""The store has room again only if at least this many bytes fit."""

_INDEX_BYTES = 64 << 10
"""Room for the pages of the index that a message changes."""

_log = get_logger(__name__)


class Room:
    """Knows whether the store is full: from the first refused write until a write as large as the refused one fits.

    Only the writer thread changes it; any thread may read `why_full`.
    """

    def __init__(self, db: Database) -> None:
        """Start with a store that has room."""
        self._db = db
        self._needed = 0
        self.why_full = ""
        """Why the store is full, in words; empty if it has room."""
        self.full_since = -math.inf
        """When the store became full: the monotonic clock, in seconds."""
        self.regained = -math.inf
        """When the store last had room again: the monotonic clock, in seconds."""

    def refused(self, error: StoreFullError, num_bytes: int = 0) -> None:
        """Note that a write of this many bytes did not fit."""
        if not self.why_full:
            _log.warning("the store is full", error=str(error))
            self.full_since = time.monotonic()
        self.why_full = str(error)
        self._needed = max(self._needed, num_bytes, _LEAST_BYTES)

    def wrote(self, num_bytes: int) -> None:
        """Note that a write of this many bytes was committed."""
        if self.why_full and num_bytes >= self._needed:
            self._regain()

    def try_again(self, *, freed: bool = False) -> None:
        """If the store is full, test whether it still is: write as much as was refused, and delete it again.

        Only a write can tell. LMDB cannot use every free page at any time, and a quota or a bad disk does not show in
        the file system's figures.

        Args:
            freed: Whether frames were just deleted. LMDB uses freed pages only two transactions later.
        """
        for _ in range(3 if freed else 1):
            if self.why_full:
                self._try(freed=freed)

    def _try(self, *, freed: bool) -> None:
        size = self._needed + _INDEX_BYTES
        try:
            self._db.try_room(size)
        except StoreFullError as error:
            self.why_full = str(error)
            if freed:
                self._db.commit_nothing()
        else:
            self._regain()

    def _regain(self) -> None:
        _log.info("the store has room again")
        self.why_full = ""
        self._needed = 0
        self.regained = time.monotonic()


def store_full(why: str, capture_id: str) -> Failure:
    """Return the Failure for a store without room."""
    message = f"The store is full: {why}. Delete captures (residuum rm), or raise --max-bytes or the disk's space."
    return Failure(Reason.ERROR_REASON_STORE_FULL, message, capture_id=capture_id)
