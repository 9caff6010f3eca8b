"""Makes the database of a store from its archive, after its disk was lost: `python -m store_svc restore`.

The rows stay in the archive, and the store reads them from there. It can be killed and run again at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import NamedTuple, TypeVar

from residuum.rpc.objects import ArchiveError, ArchiveRefusedError, MissingObjectError, Objects
from residuum.v1 import archive_pb2, capture_pb2
from residuum.wire.rows.archive import (
    CAPTURES,
    CHUNKS,
    LayoutError,
    age_of,
    capture_path,
    is_capture_key,
    number_of,
    unpack_capture,
)
from store_svc.archive import records
from store_svc.archive.link import Link
from store_svc.archive.owner import read_owner
from store_svc.captures.capture_names import CaptureName, name_of
from store_svc.captures.labels import write_labels
from store_svc.captures.numbers import skip_numbers, take_number
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
            restore = Restore(db, objects)
            restored = restore.run()
        finally:
            db.close()
    except (ArchiveError, DamagedError, StoreFullError, OSError) as error:
        _log.error("cannot restore", error=str(error))
        return 1
    _log.info("restored", captures=restored, path=str(settings.path))
    if restore.damaged:
        _log.error(
            "damaged captures are left out; the log names them. All others are restored, and the store can be started",
            left_out=restore.damaged,
        )
    return 1 if restore.damaged else 0


class _Known(NamedTuple):
    """A capture that was restored."""

    number: int
    """Its number in this database."""
    age: tuple[int, int]
    """What `age_of` returns."""


class Restore:
    """Restores the database of one store."""

    def __init__(self, db: Database, objects: Objects) -> None:
        """Restore a database that is new, or in which a restore was killed."""
        self._db = db
        self._objects = objects
        self._link = Link()
        self._latest: dict[CaptureName, _Known] = {}
        self.damaged = 0
        """How many captures could not be restored."""

    def run(self) -> int:
        """Restore all captures; return how many there are. While the archive does not answer, try again.

        Raises:
            ArchiveError: The archive refuses to be read, or is not one.
            DamagedError: The database has something else.
        """
        store_id = self._until_done(lambda: read_owner(self._objects))
        if store_id is None:
            raise ArchiveRefusedError(f"{self._objects.url} is not the archive of a store")
        self._db.write(lambda txn: _begin(txn, store_id))
        keys = [path.removeprefix(f"{CAPTURES}/") for path in self._list(CAPTURES)]
        self._db.write(lambda txn: _skip_numbers(txn, keys))
        known = self._load_known()
        _log.info("restoring", captures=len(keys))
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="restore") as threads:
            try:
                for some in _parts(sorted(set(keys) - known)):
                    read = list(threads.map(self._read, some))
                    found = [item for item in read if isinstance(item, tuple)]
                    self.damaged += sum(isinstance(item, LayoutError) for item in read)
                    self._db.write(lambda txn: self._write(txn, found))  # noqa: B023
            except BaseException:
                self._link.stop()  # no thread tries again
                raise
        folders = {path.split("/")[1] for path in self._list(CHUNKS) if path.count("/") > 1}
        leftovers = set(filter(is_capture_key, folders)) - set(keys)
        self._db.write(lambda txn: _end(txn, leftovers))
        self._db.sync()
        return len(self._latest)

    def _until_done(self, operation: Callable[[], _T]) -> _T:
        """Run an operation again until it succeeds, unless another attempt cannot help."""
        while True:
            try:
                return self._link.once(operation)
            except (ArchiveRefusedError, MissingObjectError):
                raise
            except ArchiveError:
                self._link.pause()

    def _list(self, folder: str) -> list[str]:
        return self._until_done(lambda: list(self._objects.list(folder)))

    def _load_known(self) -> set[str]:
        """Note the captures that an earlier run has restored; return their names in the archive."""
        keys: set[str] = set()
        with self._db.read() as txn:
            for key, value in txn.items(Table.ENDED):
                manifest = capture_pb2.CaptureManifest.FromString(bytes(value))
                number = unpack_number(key)
                record = records.read_record(txn, number)
                if record is None:
                    continue
                keys.add(record.key)
                self._latest[name_of(manifest.description)] = _Known(number, age_of(record.key, manifest))
        return keys

    def _read(self, key: str) -> tuple[str, archive_pb2.ArchivedCapture] | Exception | None:
        """Return a capture with its name; the error if its object is damaged, or is not one; None if it is gone."""
        try:
            number_of(key)
            return key, unpack_capture(self._until_done(lambda: self._objects.get(capture_path(key))))
        except MissingObjectError:
            return None  # it was deleted after it was listed
        except (LayoutError, ValueError) as error:
            _log.error("a capture cannot be restored", key=key, error=str(error))
            return error

    def _write(self, txn: Txn, found: list[tuple[str, archive_pb2.ArchivedCapture]]) -> None:
        for key, capture in found:
            name = name_of(capture.manifest.description)
            known, age = self._latest.get(name), age_of(key, capture.manifest)
            if known is not None and known.age > age:
                records.note_objects_to_delete(txn, key)  # it was replaced, and its objects were not deleted yet
                continue
            if known is not None:
                self._forget(txn, name, known.number)
            number = _free_number(txn, capture.number)
            self._latest[name] = _Known(number, age)
            _write_capture(txn, number, key, capture)

    def _forget(self, txn: Txn, name: CaptureName, number: int) -> None:
        records.note_deletion(txn, number)
        write_labels(txn, name.tenant, number, [])
        txn.delete(Table.ENDED, pack_number(number))
        txn.delete(Table.SEALS, pack_number(number))
        txn.put(Table.DOOMED, pack_number(number), b"")


def _skip_numbers(txn: Txn, keys: list[str]) -> None:
    """Note that the numbers of all captures are in use, of those that cannot be restored, too."""
    for key in keys:
        with suppress(ValueError):  # it is not the name of a capture
            skip_numbers(txn, number_of(key))


def _free_number(txn: Txn, number: int) -> int:
    """Return a capture's number, or a new one if another capture has it.

    Numbers are not unique in the archive of a store that was made again from an old copy of its folder.
    """
    key = pack_number(number)
    skip_numbers(txn, number)
    is_taken = txn.get(Table.ENDED, key) is not None or txn.get(Table.DOOMED, key) is not None
    return take_number(txn) if is_taken else number


def _begin(txn: Txn, store_id: bytes) -> None:
    found = txn.get(Table.META, b"store_id")
    is_new = found is None and txn.next_key(Table.ENDED, b"") is None
    if not is_new and (txn.get(Table.META, records.RESTORING) is None or bytes(found or b"") != store_id):
        raise DamagedError("The folder has a database already. Restore into a new folder.")
    txn.put(Table.META, b"store_id", store_id)
    txn.put(Table.META, records.RESTORING, b"")
    records.claim(txn)
    txn.note_rows_elsewhere()


def _write_capture(txn: Txn, number: int, key: str, capture: archive_pb2.ArchivedCapture) -> None:
    labels = list(capture.manifest.labels)
    manifest = capture_pb2.CaptureManifest()
    manifest.CopyFrom(capture.manifest)
    manifest.ClearField("labels")
    txn.put(Table.ENDED, pack_number(number), manifest.SerializeToString())
    if capture.HasField("seal"):
        txn.put(Table.SEALS, pack_number(number), capture.seal.SerializeToString())
    write_labels(txn, manifest.description.tenant, number, labels)
    places = (records.Place(item.object, item.offset, item.num_bytes, item.crc32c) for item in capture.chunks)
    records.write_places(txn, zip((_renumbered(item.key, number) for item in capture.chunks), places, strict=True))
    records.write_record(txn, number, records.Record(records.MOVED, key))


def _renumbered(frame_key: bytes, number: int) -> bytes:
    """Return the key of a frame, which begins with the number of its capture."""
    start = pack_number(number)
    return start + frame_key[len(start) :]


def _end(txn: Txn, leftovers: set[str]) -> None:
    for key in leftovers:
        records.note_objects_to_delete(txn, key)
    txn.delete(Table.META, records.RESTORING)


def _parts(items: Sequence[_T]) -> Iterator[list[_T]]:
    rest = iter(items)
    while part := list(islice(rest, _AT_ONCE)):
        yield part
