"""Packs parts of many captures into the few ReadCapturesResponses that answer a ReadCaptures, and unpacks them.

`CaptureRows` and `ReadChunksResponse` have the same field numbers for the manifest and the chunks. So the bytes of a
ReadChunksResponse are also fields of a CaptureRows, and both calls share the code that frames rows.
"""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.message import DecodeError

from residuum.v1 import errors_pb2, store_pb2
from residuum.wire.rows.frames import Buffer, FrameError, length_prefix, set_apart

BATCH_BYTES = 1 << 20
"""The size at which a message is sent. Measured: messages of 256 KiB to 2 MiB are read equally fast, larger ones are
slower. A field that is larger than this is sent as one larger message."""

_IS_LAST = store_pb2.CaptureRows(is_last=True).SerializeToString()
_CAPTURES = store_pb2.ReadCapturesResponse.CAPTURES_FIELD_NUMBER
_CHUNKS = store_pb2.CaptureRows.CHUNKS_FIELD_NUMBER


class CapturePart(NamedTuple):
    """A parsed CaptureRows."""

    rows: store_pb2.CaptureRows
    """The message without its chunks."""
    chunks: list[memoryview]
    """The serialised Chunks, as views of the received bytes; see `frames.parse_chunk`."""


def parse_captures(data: Buffer) -> list[CapturePart]:
    """Parse a ReadCapturesResponse without copying or parsing its chunks.

    Protobuf would copy each payload twice, and no other thread of Python could run meanwhile.

    Raises:
        FrameError: The bytes are not a ReadCapturesResponse.
    """
    parts, _ = set_apart(data, _CAPTURES)
    return [_parse_part(part) for part in parts]


def _parse_part(data: memoryview) -> CapturePart:
    chunks, rest = set_apart(data, _CHUNKS)
    try:
        return CapturePart(store_pb2.CaptureRows.FromString(rest), chunks)
    except DecodeError as error:
        raise FrameError(f"malformed CaptureRows: {error}") from None


def end_field(error: errors_pb2.ItemError | None = None) -> bytes:
    """Return the fields that end a capture: after its last row, or with an error."""
    if error is None:
        return _IS_LAST
    return store_pb2.CaptureRows(error=error, is_last=True).SerializeToString()


class CaptureBatch:
    """The parts of captures that wait to be sent as one message."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._index = -1
        self._fields: list[bytes] = []
        self._message = b""

    def framed(self, index: int, prefix: bytes, payload: memoryview) -> bytes:
        """Return the field with a serialised Chunk, to be added next.

        A large one is framed as a message of its own at once: framed later, it would be copied once more.

        Args:
            index: The capture's index in the request.
            prefix: The bytes of the Chunk before its payload.
            payload: The payload.
        """
        head = length_prefix(_CHUNKS, len(prefix) + len(payload))
        if len(payload) < BATCH_BYTES:
            return b"".join((head, prefix, payload))
        head = store_pb2.CaptureRows(index=index).SerializeToString() + head
        size = len(head) + len(prefix) + len(payload)
        self._message = b"".join((length_prefix(_CAPTURES, size), head, prefix, payload))
        return self._message

    def add(self, index: int, field: bytes, weight: int = 0) -> bytes:
        """Add a field of a capture.

        Args:
            index: The capture's index in the request.
            field: The serialised fields, such as those of a ReadChunksResponse, or what `framed` returned.
            weight: Bytes that it counts for beyond its own, for a payload in shared memory. Otherwise the memory could
                be full of payloads of a message that is not sent yet.

        Returns:
            The message that must be sent first, because there is no room for the field; empty if there is none.
        """
        size = len(field) + weight
        full = self.take() if self._size and self._size + size > BATCH_BYTES else b""
        if field is self._message:
            self._parts, self._size, self._message = [field], size, b""
            return full
        if index != self._index:
            self._end_part()
            self._index = index
        self._fields.append(field)
        self._size += size
        return full

    def take(self) -> bytes:
        """Return the waiting parts as one message, and begin the next one; empty if nothing waits."""
        self._end_part()
        message = b"".join(self._parts)
        self._parts, self._size, self._index = [], 0, -1
        return message

    def _end_part(self) -> None:
        if not self._fields:
            return
        self._fields.append(store_pb2.CaptureRows(index=self._index).SerializeToString())
        self._parts.append(length_prefix(_CAPTURES, sum(map(len, self._fields))))
        self._parts += self._fields
        self._fields = []
