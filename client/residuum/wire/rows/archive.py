"""The objects of an archive: their names and their contents.

    owner                          which store the archive belongs to
    captures/KEY                   an ArchivedCapture: the capture is in the archive if this object exists
    chunks/KEY/00000, 00001, ...   the capture's chunks, one after the other, in the order of their keys

KEY is made of the capture's number in its store and a digest of its name, so that no ID decides a path.
Objects are written whole. Those of chunks never change: a copy that begins again writes the same bytes.
"""

from __future__ import annotations

import hashlib
import re
import struct
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from residuum.v1 import archive_pb2, capture_pb2
from residuum.wire.rows.frames import checksum

_M = TypeVar("_M", bound=Message)

OWNER = "owner"
"""The object that says which store the archive belongs to."""

CAPTURES = "captures"
"""The folder of the captures' own objects."""

CHUNKS = "chunks"
"""The folder of chunks."""

PROBE = "probe"
"""The folder of objects that show whether the store can write and delete."""

_KEY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")

_MAGIC = b"residuum archive 1\n"
_HEAD = struct.Struct(f">{len(_MAGIC)}sI")


class LayoutError(Exception):
    """An object does not have the content that it should have."""


def capture_key(number: int, description: capture_pb2.CaptureDescription, opened: int) -> str:
    """Return the name of a capture in the archive.

    Args:
        number: Its internal number.
        description: Its description.
        opened: When it was opened, in nanoseconds. After a power cut or a restore, another capture may get the number.
    """
    text = f"{description.tenant}\0{description.capture_id}\0{description.attempt}\0{opened}".encode()
    return f"{number:016x}-{hashlib.blake2b(text, digest_size=8).hexdigest()}"


def number_of(key: str) -> int:
    """Return the internal number of a capture with this name.

    Raises:
        ValueError: It is not what `capture_key` returns, so the object or folder is not of an archive.
    """
    if not is_capture_key(key):
        raise ValueError(f"{key!r} is not the name of a capture")
    return int(key.partition("-")[0], 16)


def is_capture_key(key: str) -> bool:
    """Return whether `capture_key` can have returned a name. Others may put objects and folders into an archive."""
    return _KEY.fullmatch(key) is not None


def age_of(key: str, manifest: capture_pb2.CaptureManifest) -> tuple[int, int]:
    """Return what is greater for the newer of two captures with one name. The older one was replaced.

    Args:
        key: The capture's name in the archive.
        manifest: Its manifest.
    """
    # The time comes first: a store that goes on from an old copy of its folder starts again at a lower number. The
    # number decides between equal times. If the clock went back between two captures with one name, the wrong one
    # counts as newer. Both are in the archive only until the store has deleted the older one.
    return manifest.open_time.ToNanoseconds(), number_of(key)


def capture_path(key: str) -> str:
    """Return the path of a capture's own object."""
    return f"{CAPTURES}/{key}"


def chunks_folder(key: str) -> str:
    """Return the folder of a capture's chunks."""
    return f"{CHUNKS}/{key}"


def chunks_path(key: str, number: int) -> str:
    """Return the path of an object with chunks."""
    return f"{CHUNKS}/{key}/{number:05d}"


def pack(message: Message) -> bytes:
    """Return the content of an object that holds a message."""
    return pack_bytes(message.SerializeToString())


def pack_bytes(data: bytes | bytearray) -> bytes:
    """Return the content of an object that holds a serialised message."""
    return _HEAD.pack(_MAGIC, checksum(data)) + data


def unpack_capture(data: bytes) -> archive_pb2.ArchivedCapture:
    """Return the message of a capture's object.

    Raises:
        LayoutError: The object is damaged, or of a newer version.
    """
    return _unpack(data, archive_pb2.ArchivedCapture())


def unpack_owner(data: bytes) -> archive_pb2.ArchiveOwner:
    """Return the message of the owner's object.

    Raises:
        LayoutError: The object is damaged, or of a newer version.
    """
    return _unpack(data, archive_pb2.ArchiveOwner())


def _unpack(data: bytes, message: _M) -> _M:
    head = data[: _HEAD.size]
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise LayoutError("it does not begin as an object of this version")
    body = data[_HEAD.size :]
    if checksum(body) != _HEAD.unpack(head)[1]:
        raise LayoutError("its checksum does not match")
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise LayoutError(f"it cannot be parsed: {error}") from None
    return message
