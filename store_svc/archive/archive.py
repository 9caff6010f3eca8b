"""The archive of a store: its threads copy ended captures, delete deleted ones, and drop rows from the database.

Nothing waits for these threads: neither writers nor readers. If the archive does not work, they try again. What they
have to do is in the database.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from residuum.rpc.objects import ArchiveError, ArchiveRefusedError, Objects
from residuum.v1 import store_pb2
from store_svc.archive import records
from store_svc.archive.access import LOOK_SECONDS, ArchiveAccess, ArchiveCounters
from store_svc.archive.copier import Copier
from store_svc.archive.copying import COPIERS
from store_svc.archive.dropper import Dropper
from store_svc.archive.fetching import Fetcher
from store_svc.archive.keeper import Keeper
from store_svc.archive.link import Link
from store_svc.captures.catalog import Catalog
from store_svc.database.db import Database
from store_svc.writing.writer import Writer
from svc_common.logs import get_logger

_log = get_logger(__name__)


class Archive:
    """The archive of a serving store."""

    def __init__(
        self, objects: Objects, db: Database, catalog: Catalog, writer: Writer, *, store_id: bytes, keep_bytes: int
    ) -> None:
        """Prepare; `start` starts the threads.

        Args:
            objects: Where the archive is.
            db: The database.
            catalog: The published captures.
            writer: Makes all changes of the database.
            store_id: The store's own ID.
            keep_bytes: Beyond these bytes of chunks, the rows of copied captures are dropped from the database.
        """
        self.url = objects.url
        self.fetcher = Fetcher(objects)
        """Reads from the archive."""
        self._access = ArchiveAccess(objects, db, catalog, writer, store_id)
        self._copier = Copier(self._access)
        self._dropper = Dropper(self._access, self._copier, keep_bytes)
        self._keeper = Keeper(self._access, self._copier)
        self._threads = [
            threading.Thread(target=work, name="archive", daemon=True)
            for work in (*[self._copier.run] * COPIERS, self._keeper.run, self._dropper.run)
        ]

    @property
    def link(self) -> Link:
        """Whether the archive can be written."""
        return self._access.link

    @property
    def counters(self) -> ArchiveCounters:
        """What was done since the store started."""
        return self._access.counters

    def check(self) -> None:
        """Check that the archive can be written, and is this store's. Call it before the writer starts.

        If the archive does not answer, the store serves nevertheless, and checks it later.

        Raises:
            ArchiveRefusedError: It is not this store's, or cannot be written.
        """
        try:
            self._access.check_owner()
        except ArchiveRefusedError:
            raise
        except ArchiveError as error:
            _log.warning("the archive does not answer; the store serves without it until it does", error=str(error))
        else:
            self._access.db.write(records.claim, reserve=True)
            self._access.catalog.is_archive_claimed = True

    def start(self) -> None:
        """Start the threads. Call it after `check`, and before the writer starts."""
        self._copier.load()
        for thread in self._threads:
            thread.start()

    def stop(self, seconds: float) -> None:
        """Stop using the database, and end the threads, except those that wait for the archive for longer than this."""
        self._access.stop()
        until = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(until - time.monotonic(), 0.0))
        self._keeper.close()
        self._access.end_reads()

    def end_reads(self) -> None:
        """End the reads that wait for the archive."""
        self.fetcher.stop()

    def ended(self, number: int) -> None:
        """Note that a capture has ended, so that it is copied."""
        self._copier.add(number)

    def wait(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Wait until something is over, but at most for some seconds. It is asked after each copy, and now and then."""
        until = time.monotonic() + seconds
        with self._access.changed:
            while not is_over() and (left := until - time.monotonic()) > 0:
                self._access.changed.wait(min(left, LOOK_SECONDS))

    def stats(self) -> store_pb2.ArchiveStats:
        """Return what is in the archive, and what was copied and read since the store started."""
        states = self._access.catalog.archive_states()
        return store_pb2.ArchiveStats(
            url=self.url,
            captures_pending=states.get(records.PENDING, 0),
            captures_copied=states.get(records.COPIED, 0),
            captures_moved=states.get(records.MOVED, 0),
            why_behind=self.link.why_behind,
            captures_not_copied=self.num_not_copied,
            bytes_copied=self.counters.bytes_copied,
            bytes_fetched=self.fetcher.num_bytes,
        )

    def cannot_copy(self, number: int) -> bool:
        """Return whether a capture cannot be copied, because a chunk is damaged."""
        return self._copier.is_damaged(number)

    @property
    def num_not_copied(self) -> int:
        """Captures that cannot be copied, because a chunk is damaged. The log names them."""
        return self._copier.num_damaged

    @property
    def seconds_behind(self) -> float:
        """Age of the oldest capture that waits to be copied, in seconds; 0 if none waits."""
        return self._copier.seconds_behind
