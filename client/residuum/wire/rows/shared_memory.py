"""Shared memory between a store and a peer on the same machine: messages of the socket, and the use of a ring.

`DescribeStore` in store.proto describes the exchange. Nothing here does I/O.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Final, NamedTuple, Protocol

VERSION: Final = 1
KEY_BYTES: Final = 16
INSTANCE_BYTES: Final = 16

READ: Final = 1
"""The kind of a memory into which the store puts the payloads of reads."""
WRITE: Final = 2
"""The kind of a memory from which the store takes the payloads of appends."""

MIN_PLACED_BYTES: Final = 64 << 10
"""The smallest payload that goes through shared memory. Smaller ones share messages, which costs less."""

MIN_READ_BYTES: Final = 8 << 20
"""The smallest memory for reading. Some chunks wait in it for others that share their message, and a chunk that does
not fit before the end of the memory leaves up to 2 MiB empty."""
MAX_UNRELEASED_BYTES: Final = 2 << 20
"""A reader releases payloads that it does not need any more before they add up to this."""
MAX_READ_BYTES: Final = 64 << 20
"""The largest memory for reading."""
MAX_WRITE_BYTES: Final = 1 << 40
"""The largest memory for writing: far above any ring. The store maps it, and keeps nothing of it."""

SEAL_FUTURE_WRITE: Final = 0x10
"""The seal F_SEAL_FUTURE_WRITE of Linux 5.1. Nobody can map the memory for writing any more, or free pages of it."""

MAX_MESSAGE_BYTES: Final = 64
"""More than any message of the socket has."""

_MAGIC = b"residuum"
_HELLO = struct.Struct("<8sBB16s")
_WELCOME = struct.Struct("<8sB16s")
_RELEASED = struct.Struct("<Q")


class SharedMemoryError(Exception):
    """The peer does not keep to the rules of shared memory. The message says which one it broke."""


class Hello(NamedTuple):
    """The first message of a peer. The descriptor of its memory travels with it."""

    kind: int
    """READ or WRITE."""
    key: bytes
    """Names the memory in calls; random, because whoever knows it can use the memory."""

    def encode(self) -> bytes:
        """Return the message's bytes."""
        return _HELLO.pack(_MAGIC, VERSION, self.kind, self.key)

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Parse the message.

        Raises:
            SharedMemoryError: The bytes are not this message.
        """
        if len(data) != _HELLO.size:
            raise SharedMemoryError(f"its first message has {len(data)} bytes, not {_HELLO.size}")
        magic, version, kind, key = _HELLO.unpack(data)
        _check_start(magic, version)
        if kind not in {READ, WRITE}:
            raise SharedMemoryError(f"it names the unknown kind {kind}")
        return cls(kind, key)


def encode_welcome(instance: bytes) -> bytes:
    """Return the bytes of the store's answer to a Hello."""
    return _WELCOME.pack(_MAGIC, VERSION, instance)


def decode_welcome(data: bytes) -> bytes:
    """Return the `instance` in the store's answer.

    Raises:
        SharedMemoryError: The bytes are not this message.
    """
    if len(data) != _WELCOME.size:
        raise SharedMemoryError(f"it answered {len(data)} bytes, not {_WELCOME.size}")
    magic, version, instance = _WELCOME.unpack(data)
    _check_start(magic, version)
    return bytes(instance)


def encode_released(end: int) -> bytes:
    """Return the bytes of a message that releases the memory up to `end`; see `PlacedChunk.end`."""
    return _RELEASED.pack(end)


def decode_released(data: bytes) -> int:
    """Return the `end` of a release.

    Raises:
        SharedMemoryError: The bytes are not this message.
    """
    if len(data) != _RELEASED.size:
        raise SharedMemoryError(f"it sent a message of {len(data)} bytes, not {_RELEASED.size}")
    return int(_RELEASED.unpack(data)[0])


def _check_start(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise SharedMemoryError("it does not speak this protocol")
    if version != VERSION:
        raise SharedMemoryError(f"it speaks version {version} of the protocol, not {VERSION}")


class Place(NamedTuple):
    """A free piece of a ring."""

    offset: int
    """Where it begins, in bytes."""
    end: int
    """The bytes that were used up to its end, counted from the beginning, with those left out."""


class RingUse:
    """Which bytes of a ring are in use. Pieces are taken in order, and released in order.

    A piece is never split: if it does not fit before the end of the ring, it begins at the start, and the bytes at the
    end are left out.
    """

    def __init__(self, size: int) -> None:
        """Begin with an unused ring of `size` bytes."""
        self._size = size
        self.taken = 0
        """The `end` of the last piece that was taken."""
        self.released = 0
        """The `end` of the last piece that was released."""
        self._ends: deque[int] = deque()

    @property
    def is_unused(self) -> bool:
        """Whether all pieces are released."""
        return not self._ends

    def take(self, num_bytes: int) -> Place | None:
        """Take the next piece, of at most the ring's size; return None if there is no room for it now."""
        at = self.taken % self._size
        start = self.taken if at + num_bytes <= self._size else self.taken + self._size - at
        end = start + num_bytes
        in_use_from = start if self.is_unused else self.released
        if end - in_use_from > self._size:
            return None
        self.taken = end
        self._ends.append(end)
        return Place(start % self._size, end)

    def shorten(self, place: Place, size: int, kept: int) -> Place:
        """Give back the end of the piece that was taken last, or all of it; return what is left.

        Args:
            place: The piece.
            size: Its size.
            kept: How many of its bytes to keep.

        Raises:
            SharedMemoryError: The peer has released the piece already.
        """
        if not self._ends or self._ends[-1] != place.end:
            raise SharedMemoryError(f"it released {place.end}, before it got that payload")
        self._ends.pop()
        self.taken = place.end - size + kept
        if kept:
            self._ends.append(self.taken)
        return Place(place.offset, self.taken)

    def release(self, end: int) -> None:
        """Release all pieces up to the one with this `end`.

        Raises:
            SharedMemoryError: No piece that is in use has this end.
        """
        if end not in self._ends:
            raise SharedMemoryError(f"it released {end}, which is the end of no payload that it holds")
        while self._ends.popleft() != end:
            pass
        self.released = end


class Payloads(Protocol):
    """The memory that payloads of a read are in."""

    def take(self, offset: int, num_bytes: int, end: int) -> memoryview:
        """Return a payload, valid until it is released.

        Raises:
            SharedMemoryError: There is no such payload.
        """
        ...
