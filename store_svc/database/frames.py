"""Frames: how the rows of a chunk are kept.

The frame of a chunk from a message is one value of FRAMES: the bytes of the Chunk. The frame of a chunk from shared
memory is two values: HEADS has the bytes of the Chunk without its payload, and FRAMES has the payload. So LMDB takes a
large payload straight from the memory of its writer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from residuum.wire.rows.frames import ChunkView, checksum, parse_chunk, parse_stored, payload_prefix, split_chunk


class PayloadChangedError(Exception):
    """A payload in shared memory does not match its checksum. Nothing was written."""


class PlacedFrame(NamedTuple):
    """A frame to write whose payload is in the memory of its writer, which may change it at any time."""

    head: bytes
    """The bytes of the Chunk without its payload."""
    payload: memoryview
    """The payload."""
    crc32c: int
    """The checksum of the payload."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole Chunk."""
        return len(payload_prefix(self.head, len(self.payload))) + len(self.payload)

    def check(self, written: memoryview) -> None:
        """Compare the checksum with a payload that was written.

        Raises:
            PayloadChangedError: They do not match.
        """
        if checksum(written) != self.crc32c:
            raise PayloadChangedError

    def copied(self) -> tuple[memoryview, ChunkView] | None:
        """Return the bytes of the Chunk and the parsed chunk, as a copy. None if the copy does not match its checksum.

        Raises:
            FrameError: The header does not describe the payload.
        """
        prefix = np.frombuffer(payload_prefix(self.head, len(self.payload)), dtype=np.uint8)
        frame = np.empty(len(prefix) + len(self.payload), dtype=np.uint8)
        frame[: len(prefix)] = prefix
        np.copyto(frame[len(prefix) :], np.frombuffer(self.payload, dtype=np.uint8))  # lets go of the GIL
        chunk = parse_chunk(frame.data)
        return (frame.data, chunk) if chunk.verify() else None


def frame_bytes(frame: bytes | memoryview | PlacedFrame) -> int:
    """Return the bytes of a whole Chunk."""
    return frame.num_bytes if isinstance(frame, PlacedFrame) else len(frame)


class StoredFrame(NamedTuple):
    """A frame as it is kept. The views are valid as long as their transaction."""

    head: bytes | memoryview
    """The bytes of the Chunk without its payload."""
    payload: memoryview
    """The payload."""

    @classmethod
    def of(cls, head: memoryview | None, value: memoryview) -> StoredFrame:
        """Make a frame from its values in HEADS, if it has one, and in FRAMES.

        Raises:
            FrameError: The value in FRAMES is not a Chunk.
        """
        return cls(head, value) if head is not None else cls(*split_chunk(value))

    @property
    def prefix(self) -> bytes:
        """The bytes of the Chunk before its payload."""
        return payload_prefix(self.head, len(self.payload))

    def parse(self) -> ChunkView:
        """Return the chunk. Its payload is a view.

        Raises:
            FrameError: The frame is damaged.
        """
        return parse_stored(self.head, self.payload)
