"""The keys of stored chunks, in a store's database and in its archive. They say what is in a chunk."""

from __future__ import annotations

import struct
from typing import NamedTuple

_FRAME = struct.Struct(">QIBHHII")

FRAME_KEY_BYTES = _FRAME.size
"""Length of a key."""


class FrameKey(NamedTuple):
    """The key of a stored frame. Numbers are big-endian, so that the order of bytes is numeric order.

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
    """Return the FrameKey that these bytes pack.

    Raises:
        struct.error: They are not a key.
    """
    return FrameKey(*_FRAME.unpack(key))
