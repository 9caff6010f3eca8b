"""Makes the database of a store from its archive, after its disk was lost: `python -m store_svc restore`.

The rows stay in the archive, and the store reads them from there. It can be killed and run again at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from residuum.v1 import archive_pb2, capture_pb2
from store_svc.archive import records
from store_svc.archive.layout import CAPTURES, CHUNKS, LayoutError, capture_path, unpack_capture
from store_svc.archive.objects import ArchiveError, ArchiveRefusedError, Objects
from store_svc.archive.owner import read_owner
from store_svc.captures.capture_names import CaptureName, name_of
from store_svc.captures.labels import write_labels
from store_svc.captures.numbers import skip_numbers
from store_svc.database.db import DamagedError, Database, StoreFullError, Table, Txn
from store_svc.database.keys import pack_number, unpack_number
from store_svc.settings import StoreSettings
from svc_common.logs import configure_logs, get_logger
from svc_common.settings import load_settings

_T = TypeVar("_T")

_THREADS = 16
_AT_ONCE = 64
"""Captures that are read and written together."""

_log = get_logger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Restore a database; return the exit status. The settings are those of the store, so that its command fits."""
    settings = load_settings(StoreSettings, "python -m store_svc restore", arguments)
    configure_logs(settings.log_level)
    if not settings.archive:
        _log.error("cannot restore: set --archive")
        return 1
    try:
        objects = Objects(settings.archive)
        db = Database(settings.path, settings.max_bytes, sync_roots=True, shards=settings.num_shards)
        try:
            restored = Restore(db, objects).run()
        finally:
            db.close()
    except (ArchiveError, DamagedError, StoreFullError, OSError) as error:
        _log.error("cannot restore", error=str(error))
        return 1
    _log.info("restored", captures=restored, path=str(settings.path))
    return 0


class Restore:
    """Restores the database of one store."""

    def __init__(self, db: Database, objects: Objects) -> None:
        """Restore a database that is new, or in which a restore was killed."""
        self._db = db
        self._objects = objects
        self._latest: dict[CaptureName, int] = {}

    def run(self) -> int:
        """Restore all captures; return how many there are.

        Raises:
            ArchiveError: The archive cannot be read, or is not one.
            DamagedError: The database has something else.
        """
        store_id = read_owner(self._objects)
        if store_id is None:
            raise ArchiveRefusedError(f"{self._objects.url} is not the archive of a store")
        self._db.write(lambda txn: _begin(txn, store_id))
        keys = [path.removeprefix(f"{CAPTURES}/") for path in self._objects.list(CAPTURES)]
        self._load_known()
        _log.info("restoring", captures=len(keys))
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="restore") as threads:
            for some in _parts(sorted(keys)):
                found = [item for item in threads.map(self._read, some) if item is not None]
                self._db.write(lambda txn: self._write(txn, found))  # noqa: B023
        leftovers = self._leftovers(set(keys))
        self._db.write(lambda txn: _end(txn, leftovers))
        self._db.sync()
        return len(self._latest)

    def _load_known(self) -> None:
        """Note the captures that an earlier run has restored."""
        with self._db.read() as txn:
            for key, value in txn.items(Table.ENDED):
                manifest = capture_pb2.CaptureManifest.FromString(bytes(value))
                self._latest[name_of(manifest.description)] = unpack_number(key)

    def _read(self, key: str) -> tuple[str, archive_pb2.ArchivedCapture] | None:
        try:
            return key, unpack_capture(self._objects.get(capture_path(key)))
        except LayoutError as error:
            _log.error("a capture cannot be restored", key=key, error=str(error))
            return None

    def _write(self, txn: Txn, found: list[tuple[str, archive_pb2.ArchivedCapture]]) -> None:
        for key, capture in found:
            name = name_of(capture.manifest.description)
            known = self._latest.get(name, 0)
            if known > capture.number:
                records.note_leftovers(txn, key)  # it was replaced, and its objects were not deleted yet
                continue
            if known and known < capture.number:
                self._forget(txn, name, known)
            self._latest[name] = capture.number
            _write_capture(txn, key, capture)

    def _forget(self, txn: Txn, name: CaptureName, number: int) -> None:
        records.note_deletion(txn, number)
        write_labels(txn, name.tenant, number, [])
        txn.delete(Table.ENDED, pack_number(number))
        txn.delete(Table.SEALS, pack_number(number))
        txn.put(Table.DOOMED, pack_number(number), b"")

    def _leftovers(self, keys: set[str]) -> set[str]:
        """Return the names of objects with chunks of captures that are not in the archive."""
        found = {path.split("/")[1] for path in self._objects.list(CHUNKS) if path.count("/") > 1}
        return found - keys


def _begin(txn: Txn, store_id: bytes) -> None:
    found = txn.get(Table.META, b"store_id")
    is_new = found is None and txn.next_key(Table.ENDED, b"") is None
    if not is_new and (txn.get(Table.META, records.RESTORING) is None or bytes(found or b"") != store_id):
        raise DamagedError("The folder has a database already. Restore into a new folder.")
    txn.put(Table.META, b"store_id", store_id)
    txn.put(Table.META, records.RESTORING, b"")
    records.claim(txn)
    txn.note_rows_elsewhere()


def _write_capture(txn: Txn, key: str, capture: archive_pb2.ArchivedCapture) -> None:
    number = capture.number
    labels = list(capture.manifest.labels)
    manifest = capture_pb2.CaptureManifest()
    manifest.CopyFrom(capture.manifest)
    manifest.ClearField("labels")
    skip_numbers(txn, number)
    txn.put(Table.ENDED, pack_number(number), manifest.SerializeToString())
    if capture.HasField("seal"):
        txn.put(Table.SEALS, pack_number(number), capture.seal.SerializeToString())
    write_labels(txn, manifest.description.tenant, number, labels)
    places = (records.Place(item.object, item.offset, item.num_bytes, item.crc32c) for item in capture.chunks)
    records.write_places(txn, zip((item.key for item in capture.chunks), places, strict=True))
    records.write_record(txn, number, records.Record(records.MOVED, key))


def _end(txn: Txn, leftovers: set[str]) -> None:
    for key in leftovers:
        records.note_leftovers(txn, key)
    txn.delete(Table.META, records.RESTORING)


def _parts(items: Sequence[_T]) -> Iterator[list[_T]]:
    rest = iter(items)
    while part := list(islice(rest, _AT_ONCE)):
        yield part
