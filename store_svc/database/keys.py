"""Keys of the database. Numbers are big-endian, so that LMDB's byte order is numeric order."""

from __future__ import annotations

import hashlib
import struct

from residuum.wire.rows.frame_keys import FRAME_KEY_BYTES

_NUMBER = struct.Struct(">Q")
_LOSS = struct.Struct(">QI")

MAX_LAYERS = 1 << 16
"""Number of layers that a key can tell apart."""

LABEL_DIGEST_BYTES = 16
"""Length of the digest that stands for a label's value in the index. A value may be too long for a key of LMDB."""

GROUP_BYTES = 17
"""Length of the prefix that the keys of one group of layers share."""


def after_group(key: bytes) -> bytes:
    """Return a key that sorts after every frame of the same capture, sequence, site and group of layers."""
    return key[:GROUP_BYTES] + b"\xff" * (FRAME_KEY_BYTES - GROUP_BYTES + 1)


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
