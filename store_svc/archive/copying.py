"""Copies one capture to the archive. The manifest comes last: without it, the capture is not in the archive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np

from residuum.v1 import archive_pb2, capture_pb2, store_pb2
from residuum.wire.limits import MAX_PLACED_CHUNK_BYTES
from residuum.wire.rows.archive import capture_path, chunks_path, pack_bytes
from residuum.wire.rows.frames import FrameError, checksum
from store_svc.archive.records import Place
from store_svc.captures.labels import read_labels
from store_svc.database.db import Table, Txn
from store_svc.database.keys import pack_number

COPIERS = 4
"""Captures that are copied at once."""

OBJECT_BYTES = 16 << 20
"""Bytes at which an object with chunks is written. It is written at once, so none is ever half there."""

_OBJECT_FRAMES = 32768
"""Frames at which an object is written even if it is small. They bound the memory for their places."""

_BUFFER_BYTES = OBJECT_BYTES + MAX_PLACED_CHUNK_BYTES + (1 << 20)
"""One chunk more, with its header."""

_KEYS_AT_ONCE = 512

Reads = Callable[[], AbstractContextManager[Txn]]
"""Begins a read transaction."""


class GoneError(Exception):
    """The capture was deleted."""


class DamagedCaptureError(Exception):
    """A chunk of the capture does not match its checksum, so it is not copied."""


def chunk_objects(read: Reads, number: int, key: str) -> Iterator[tuple[str, memoryview, list[tuple[bytes, Place]]]]:
    """Yield the objects with the chunks of a capture: the path, the content, and where each frame is in it.

    The content is valid until the next one is asked for.

    Raises:
        GoneError: The capture was deleted meanwhile.
        DamagedCaptureError: A chunk is damaged.
    """
    buffer = np.empty(_BUFFER_BYTES, dtype=np.uint8)
    places: list[tuple[bytes, Place]] = []
    size = at = 0
    for frame_key in _frame_keys(read, number):
        num_bytes = _copy_frame(read, frame_key, buffer[size:])
        places.append((frame_key, Place(at, size, num_bytes, checksum(buffer[size : size + num_bytes].data))))
        size += num_bytes
        if size >= OBJECT_BYTES or len(places) == _OBJECT_FRAMES:
            yield chunks_path(key, at), buffer[:size].data, places
            places, size, at = [], 0, at + 1
    if places:
        yield chunks_path(key, at), buffer[:size].data, places


def capture_object(read: Reads, number: int, key: str) -> tuple[str, bytes, bytes]:
    """Return the object that makes a capture exist in the archive: the path, the content, and the labels in it.

    Args:
        read: Begins a read transaction.
        number: The capture's internal number.
        key: Its name in the archive.

    Raises:
        GoneError: The capture was deleted.
    """
    with read() as txn:
        value = txn.get(Table.ENDED, pack_number(number))
        if value is None:
            raise GoneError
        labels = read_labels(txn, number)
        manifest = capture_pb2.CaptureManifest.FromString(bytes(value) + labels)
        message = archive_pb2.ArchivedCapture(manifest=manifest, number=number)
        if (seal := txn.get(Table.SEALS, pack_number(number))) is not None:
            message.seal.CopyFrom(store_pb2.SealCaptureRequest.FromString(bytes(seal)))
        # Serialised one by one, and joined: a message with all of them would take several times the memory.
        data = bytearray(message.SerializeToString())
        for frame_key, value in txn.items(Table.PLACES, pack_number(number)):
            data += _entry(frame_key, Place.unpack(value)).SerializeToString()
    return capture_path(key), pack_bytes(data), labels


def _entry(key: bytes, place: Place) -> archive_pb2.ArchivedCapture:
    chunk = archive_pb2.ArchivedChunk(
        key=key, object=place.object, offset=place.offset, num_bytes=place.num_bytes, crc32c=place.crc32c
    )
    return archive_pb2.ArchivedCapture(chunks=[chunk])


def _frame_keys(read: Reads, number: int) -> Iterator[bytes]:
    prefix = at = pack_number(number)
    while True:
        keys: list[bytes] = []
        with read() as txn:
            while len(keys) < _KEYS_AT_ONCE:
                found = txn.next_key(Table.FRAMES, at)
                if found is None or not found.startswith(prefix):
                    break
                keys.append(found)
                at = found + b"\0"
        yield from keys
        if len(keys) < _KEYS_AT_ONCE:
            return


def _copy_frame(read: Reads, key: bytes, target: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    """Copy the bytes of a Chunk, and return how many there are."""
    with read() as txn:
        try:
            frame = txn.frame(key)
            if frame is None:
                raise GoneError
            if not frame.parse().verify():
                raise DamagedCaptureError
        except FrameError:
            raise DamagedCaptureError from None
        prefix = frame.prefix
        size = len(prefix) + len(frame.payload)
        target[: len(prefix)] = np.frombuffer(prefix, dtype=np.uint8)
        np.copyto(target[len(prefix) : size], np.frombuffer(frame.payload, dtype=np.uint8))
    return size
