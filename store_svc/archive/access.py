"""What the threads of an archive share: the archive, the database, and the news that wakes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from residuum.rpc.errors import Failure, Reason
from residuum.rpc.objects import Objects
from store_svc.archive import owner, records
from store_svc.archive.link import Link
from store_svc.captures.catalog import Catalog
from store_svc.database.db import Database, Txn
from store_svc.writing.changes import Batch
from store_svc.writing.writer import Writer

_T = TypeVar("_T")

LOOK_SECONDS = 1.0
"""How often a thread looks for work that nobody has told it of."""

_PASSING = (Reason.ERROR_REASON_STORE_FULL, Reason.ERROR_REASON_NOT_SERVING)
"""Why a change may fail now and succeed later, unless the store is stopping."""


@dataclass
class ArchiveCounters:
    """Counts of the archive's work since the store started."""

    captures_copied: int = 0
    bytes_copied: int = 0
    captures_deleted: int = 0


class ArchiveAccess:
    """The way of the archive's threads to the archive and to the database. Thread-safe."""

    def __init__(self, objects: Objects, db: Database, catalog: Catalog, writer: Writer, store_id: bytes) -> None:
        """Use an archive and a database.

        Args:
            objects: Where the archive is.
            db: The database.
            catalog: The published captures.
            writer: Makes all changes of the database.
            store_id: The store's own ID.
        """
        self.objects = objects
        self.db = db
        self.catalog = catalog
        self.writer = writer
        self.link = Link()
        """Whether the archive can be written."""
        self.counters = ArchiveCounters()
        self.changed = threading.Condition()
        """Guards what captures wait for, and wakes the threads."""
        self._store_id = store_id
        self._db_use = threading.Lock()

    @property
    def is_claimed(self) -> bool:
        """Whether the archive is known to be this store's."""
        return self.catalog.is_archive_claimed

    def check_owner(self) -> None:
        """Check that the archive is this store's, or make it so.

        Raises:
            ArchiveRefusedError: It is not this store's, or cannot be written.
            ArchiveError: It does not answer.
        """
        with self.read() as txn:
            was_claimed = records.is_claimed(txn)
        owner.claim(self.objects, self._store_id, was_claimed=was_claimed)

    @contextmanager
    def read(self) -> Iterator[Txn]:
        """Begin a read transaction. After `stop`, the database may be closed, so this raises StoppedError."""
        with self._db_use:
            self.link.check()
            with self.db.read() as txn:
                yield txn

    def change(self, change: Callable[[Batch], _T], capture_id: str = "") -> _T:
        """Change the database, as soon as it has room.

        Raises:
            Failure: The change itself failed.
            StoppedError: The store is stopping.
        """
        while True:
            self.link.check()
            try:
                return self.writer.call(capture_id, change, reserve=True)
            except Failure as failure:
                if failure.reason not in _PASSING:
                    raise
                with self.changed:
                    self.changed.wait(LOOK_SECONDS)

    def sleep(self) -> None:
        """Wait for news, but not for long.

        Raises:
            StoppedError: The store is stopping.
        """
        with self.changed:
            self.link.check()
            self.changed.wait(LOOK_SECONDS)
        self.link.check()

    def stop(self) -> None:
        """End all waits. The archive is written no more."""
        self.link.stop()
        with self.changed:
            self.changed.notify_all()

    def end_reads(self) -> None:
        """Wait until no thread reads the database. From now on, `read` raises StoppedError, if `stop` was called."""
        with self._db_use:
            pass
