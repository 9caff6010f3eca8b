"""The thread that keeps the archive as the database is: it deletes deleted captures, and writes changed labels."""

from __future__ import annotations

from bisect import bisect_right

from residuum.rpc.objects import ArchiveError
from residuum.wire.rows.archive import capture_path, chunks_folder, is_capture_key, number_of
from store_svc.archive import records
from store_svc.archive.access import ArchiveAccess
from store_svc.archive.copier import Copier
from store_svc.archive.copying import GoneError, capture_object
from store_svc.archive.link import StoppedError
from store_svc.archive.workers import Workers
from store_svc.writing.changes import Batch
from svc_common.logs import get_logger

_DELETERS = 8
"""Captures that are deleted at once."""

_OBJECTS_AT_ONCE = 100
"""Objects that are deleted between two looks at whether the store is stopping."""

_DELETED_AT_ONCE = 64

_log = get_logger(__name__)


class Keeper:
    """Deletes from the archive what was deleted, and writes changed labels."""

    def __init__(self, access: ArchiveAccess, copier: Copier) -> None:
        self._access = access
        self._copier = copier
        self._deleters = Workers(_DELETERS, "archive-delete")
        self._undeleted = ""  # the last capture of the batch that could not be deleted whole
        self._unwritten = 0  # the capture whose labels could not be written last

    def run(self) -> None:
        """Keep the archive until the store stops."""
        link = self._access.link
        try:
            while True:
                try:
                    self._claim()
                    try:
                        while self._delete_some():
                            pass
                    finally:  # an object that cannot be deleted keeps no label from being written
                        self._write_labels()
                except ArchiveError:
                    link.pause()
                except StoppedError:
                    raise
                except Exception:  # noqa: BLE001 - a bug: the thread must go on
                    _log.exception("the archive's work has failed")
                    link.pause()
                self._access.sleep()
        except StoppedError:
            return

    def close(self) -> None:
        """End the threads that delete."""
        self._deleters.close()

    def _claim(self) -> None:
        access = self._access
        if not access.is_claimed:
            access.link.once(access.check_owner)
            access.change(Batch.claim_archive)

    def _delete_some(self) -> bool:
        """Delete the objects of deleted captures. Return whether there may be more.

        After a failure, the next call begins with the captures after them, as for labels.

        Raises:
            ArchiveError: The archive does not work.
        """
        access = self._access
        with access.read() as txn:
            keys = records.deletions(txn, _DELETED_AT_ONCE, self._undeleted)
        if foreign := [key for key in keys if not is_capture_key(key)]:
            _log.warning("folders in the archive that are not of captures are left alone", folders=foreign)
            access.change(lambda batch: batch.end_deletions(foreign))
            return True
        copied_now = self._copier.copied_now()
        keys = [key for key in keys if number_of(key) not in copied_now]
        if not keys:
            return False
        access.change(lambda batch: batch.begin_deletions(keys))
        deletions = {key: self._deleters.submit(self._delete, key) for key in keys}
        deleted = [key for key, deletion in deletions.items() if deletion.exception() is None]
        access.change(lambda batch: batch.end_deletions(deleted))
        access.counters.captures_deleted += len(deleted)
        if len(deleted) < len(keys):
            self._undeleted = keys[-1]
        for deletion in deletions.values():
            deletion.result()
        return True

    def _delete(self, key: str) -> None:
        """Delete the objects of a capture. Its own object goes first: without it, the capture does not exist."""
        link, objects = self._access.link, self._access.objects
        link.once(lambda: objects.delete([capture_path(key)]))
        paths = link.once(lambda: list(objects.list(chunks_folder(key))))
        for start in range(0, len(paths), _OBJECTS_AT_ONCE):
            part = paths[start : start + _OBJECTS_AT_ONCE]
            link.once(lambda: objects.delete(part))  # noqa: B023

    def _write_labels(self) -> None:
        """Write the own objects of captures again whose labels have changed.

        After a failure, the next call begins with the captures after it: one object that cannot be written keeps no
        others from being written.

        Raises:
            ArchiveError: The archive does not work.
        """
        access = self._access
        with access.read() as txn:
            numbers = sorted(records.label_changes(txn))
        first = bisect_right(numbers, self._unwritten)
        for number in numbers[first:] + numbers[:first]:
            with access.read() as txn:
                record = records.read_record(txn, number)
            if record is None or record.state == records.PENDING:
                continue
            try:
                path, data, labels = capture_object(access.read, number, record.key)
            except GoneError:
                continue
            try:
                access.link.once(lambda: access.objects.put(path, data))  # noqa: B023
            except ArchiveError:
                self._unwritten = number
                raise
            access.change(lambda batch: batch.note_labels_copied(number, labels))  # noqa: B023
