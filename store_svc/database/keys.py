"""Keys of the database. Numbers are big-endian, so that LMDB's byte order is numeric order."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

_NUMBER = struct.Struct(">Q")
_FRAME = struct.Struct(">QIBHHII")
_LOSS = struct.Struct(">QI")

MAX_LAYERS = 1 << 16
"""Number of layers that a key can tell apart."""

LABEL_DIGEST_BYTES = 16
"""Length of the digest that stands for a label's value in the index. A value may be too long for a key of LMDB."""

GROUP_BYTES = 17
"""Length of the prefix that the keys of one group of layers share."""


class FrameKey(NamedTuple):
    """The key of a stored frame.

    Keys are unique: the cells (layer, position) of stored frames are disjoint, so no two frames share both their first
    layer and their first position. The key holds the last layer and position so that a scan can skip a frame without
    touching its page.
    """

    number: int
    """The capture's internal number."""
    sequence: int
    """The sequence."""
    site: int
    """The site."""
    first_layer: int
    """The first layer in the frame."""
    last_layer: int
    """The last layer in the frame."""
    first_position: int
    """The first position in the frame."""
    last_position: int
    """The last position in the frame."""

    def pack(self) -> bytes:
        """Return the key's bytes."""
        return _FRAME.pack(*self)


def unpack_frame(key: bytes) -> FrameKey:
    """Return the FrameKey that these bytes pack."""
    return FrameKey(*_FRAME.unpack(key))


def after_group(key: bytes) -> bytes:
    """Return a key that sorts after every frame of the same capture, sequence, site and group of layers."""
    return key[:GROUP_BYTES] + b"\xff" * (_FRAME.size - GROUP_BYTES + 1)


def pack_number(number: int) -> bytes:
    """Return the key of a capture's records, which is also the prefix of its frames' and losses' keys."""
    return _NUMBER.pack(number)


def unpack_number(key: bytes) -> int:
    """Return the capture's internal number from a record's key."""
    return int(_NUMBER.unpack(key)[0])


def label_prefix(tenant: str, name: str, value: str) -> bytes:
    """Return what the index keys of all captures of a tenant with one value of a label start with.

    Args:
        tenant: The tenant.
        name: The label's name.
        value: The canonical text of its value.
    """
    text = f"{tenant}\0{name}\0{value}".encode()
    return hashlib.blake2b(text, digest_size=LABEL_DIGEST_BYTES).digest()


def pack_loss(number: int, index: int) -> bytes:
    """Return the key of a capture's loss number `index`, counted from 0."""
    return _LOSS.pack(number, index)
