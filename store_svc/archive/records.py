"""What the database knows about the archive.

* ARCHIVED says of each capture how far its copy is, and the name of its objects.
* PLACES says where the archive has each frame. It is complete once the copy is.
* ARCHIVE_WORK lists what the archive must still be told. Deleting a capture or changing its labels notes it in the same
  transaction, so nothing is forgotten if the store is killed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from residuum.v1 import capture_pb2
from store_svc.database.db import DamagedError, Table, Txn
from store_svc.database.keys import pack_number, unpack_number

PENDING, COPIED = capture_pb2.ARCHIVE_STATE_PENDING, capture_pb2.ARCHIVE_STATE_COPIED
MOVED = capture_pb2.ARCHIVE_STATE_MOVED

ROWS_ONLY = b"rows"
"""The value of DOOMED for a capture whose frames are freed, because the archive has them."""

_DELETE, _LABELS = b"d", b"l"
"""The kinds of work: delete the objects of a name; write the labels of a number."""

_CLAIMED = b"archive_claimed"
"""META's key for whether the archive has been found to belong to this store."""

RESTORING = b"restoring"
"""META's key for a restore of the database that has not ended."""

_PLACE = struct.Struct(">IQII")


class Place(NamedTuple):
    """Where the archive has a frame."""

    object: int
    """The number of the object."""
    offset: int
    """Where the frame begins in it, in bytes."""
    num_bytes: int
    """Bytes of the whole Chunk."""
    crc32c: int
    """Their checksum."""

    @classmethod
    def unpack(cls, value: memoryview | bytes) -> Place:
        """Return the place with this value in PLACES."""
        return cls(*_PLACE.unpack(value))


class Record(NamedTuple):
    """How far the copy of a capture is."""

    state: capture_pb2.ArchiveState.ValueType
    """PENDING: objects may exist, but not all."""
    key: str
    """The name of its objects."""


def read_record(txn: Txn, number: int) -> Record | None:
    """Return the record of a capture; None if no object of it can exist."""
    value = txn.get(Table.ARCHIVED, pack_number(number))
    return None if value is None else unpack_record(value)


def unpack_record(value: memoryview) -> Record:
    """Return the record with this value in ARCHIVED."""
    data = bytes(value)
    return Record(capture_pb2.ArchiveState.ValueType(data[0]), data[1:].decode())


def write_record(txn: Txn, number: int, record: Record) -> None:
    """Write the record of a capture."""
    txn.put(Table.ARCHIVED, pack_number(number), bytes([record.state]) + record.key.encode())


def state_field(txn: Txn, number: int, *, has_archive: bool) -> bytes:
    """Return the state of an ended capture as a serialised CaptureManifest with no other field.

    Appended to a serialised manifest, it becomes its state. It is empty without an archive.
    """
    if not has_archive:
        return b""
    record = read_record(txn, number)
    state = record.state if record is not None else PENDING
    return capture_pb2.CaptureManifest(archive_state=state).SerializeToString()


def frames_table(record: Record | None) -> Table:
    """Return the table that has the keys of all frames of a capture: its rows may no longer be in the database."""
    return Table.PLACES if record is not None and record.state != PENDING else Table.FRAMES


def place_of(txn: Txn, key: bytes) -> Place | None:
    """Return where the archive has a frame; None if it does not."""
    value = txn.get(Table.PLACES, key)
    return None if value is None else Place.unpack(value)


def write_places(txn: Txn, places: Iterable[tuple[bytes, Place]]) -> None:
    """Write where the archive has frames."""
    for key, place in places:
        txn.put(Table.PLACES, key, _PLACE.pack(*place))


def note_deletion(txn: Txn, number: int) -> None:
    """Note that the objects of a capture, if there can be any, must be deleted, and forget its record."""
    record = read_record(txn, number)
    if record is not None:
        txn.delete(Table.ARCHIVED, pack_number(number))
        txn.delete(Table.ARCHIVE_WORK, _LABELS + pack_number(number))
        note_objects_to_delete(txn, record.key)


def note_objects_to_delete(txn: Txn, key: str) -> None:
    """Note that all objects of a name must be deleted."""
    txn.put(Table.ARCHIVE_WORK, _DELETE + key.encode(), b"")


def note_labels(txn: Txn, number: int) -> None:
    """Note that the labels of a capture have changed, if the archive has them or may soon."""
    if txn.get(Table.ARCHIVED, pack_number(number)) is not None:
        txn.put(Table.ARCHIVE_WORK, _LABELS + pack_number(number), b"")


def deletions(txn: Txn, limit: int, after: str = "") -> list[str]:
    """Return names whose objects must be deleted: the first ones after a name, or the first of all if none follows."""
    keys: list[str] = []
    key = txn.next_key(Table.ARCHIVE_WORK, _DELETE + after.encode() + b"\0")
    while key is not None and key.startswith(_DELETE) and len(keys) < limit:
        keys.append(key[len(_DELETE) :].decode())
        key = txn.next_key(Table.ARCHIVE_WORK, key + b"\0")
    return keys if keys or not after else deletions(txn, limit)


def label_changes(txn: Txn) -> list[int]:
    """Return the captures whose labels the archive does not have."""
    return [unpack_number(key[len(_LABELS) :]) for key, _ in txn.items(Table.ARCHIVE_WORK, _LABELS)]


def end_deletion(txn: Txn, key: str) -> None:
    """Note that the objects of a name are gone."""
    txn.delete(Table.ARCHIVE_WORK, _DELETE + key.encode())


def end_label_change(txn: Txn, number: int) -> None:
    """Note that the archive has the labels of a capture."""
    txn.delete(Table.ARCHIVE_WORK, _LABELS + pack_number(number))


def is_claimed(txn: Txn) -> bool:
    """Tell whether the database has an archive, which belongs to this store."""
    return txn.get(Table.META, _CLAIMED) is not None


def claim(txn: Txn) -> None:
    """Note that the database has an archive."""
    txn.put(Table.META, _CLAIMED, b"")


def check_restored(txn: Txn) -> None:
    """Check that a database is not half restored.

    Raises:
        DamagedError: It is.
    """
    if txn.get(Table.META, RESTORING) is not None:
        raise DamagedError("The database is half restored. Run `python -m store_svc restore` again until it ends.")
