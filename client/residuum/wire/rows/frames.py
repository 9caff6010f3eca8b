"""Writes and parses the messages that carry chunks, without copying the chunk's payload.

`Chunk.payload` is the last field of its message, and `chunk` is the last field of the messages that carry one. So a
message is a short prefix followed by the array's own bytes: writing it takes one join, and any protobuf parser reads
it. The `parse_*` functions return the payload as a view of the message's bytes; protobuf would copy it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, Union

import crc32c as _crc32c
from google.protobuf.message import DecodeError

from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.limits import MAX_CHUNK_POSITIONS
from residuum.wire.rows.encodings import RowFormat
from residuum.wire.rows.shared_memory import Payloads, Place, SharedMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    import numpy.typing as npt

Buffer = Union[bytes, bytearray, memoryview]  # noqa: UP007 - evaluated at run time on Python 3.10

_Message = TypeVar(
    "_Message",
    capture_pb2.Chunk,
    capture_pb2.ChunkHeader,
    store_pb2.AppendChunksRequest,
    store_pb2.ReadChunksResponse,
)

_PAGE_BYTES = 4096
_RELEASES_GIL = 1
"""The mode of crc32c that lets go of the GIL for every size. By default it does so from 32 KiB on."""

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5

_CHUNK_HEADER = capture_pb2.Chunk.HEADER_FIELD_NUMBER
_CHUNK_CRC32C = capture_pb2.Chunk.CRC32C_FIELD_NUMBER
_CHUNK_LAYER_CRC32C = capture_pb2.Chunk.LAYER_CRC32C_FIELD_NUMBER
_CHUNK_PAYLOAD = capture_pb2.Chunk.PAYLOAD_FIELD_NUMBER
_APPEND_CHUNK = store_pb2.AppendChunksRequest.CHUNK_FIELD_NUMBER
_READ_CHUNK = store_pb2.ReadChunksResponse.CHUNK_FIELD_NUMBER
_READ_PLACED = store_pb2.ReadChunksResponse.PLACED_CHUNKS_FIELD_NUMBER


class FrameError(ValueError):
    """The bytes are not the expected message."""


@dataclass(frozen=True)
class ChunkView:
    """A parsed chunk whose payload is a view of the received bytes."""

    header: capture_pb2.ChunkHeader
    """Describes the payload."""
    crc32c: int
    """The received checksum; see `verify`."""
    payload: memoryview
    """The encoded rows; valid as long as the underlying buffer."""
    is_placed: bool = False
    """Whether the payload is in shared memory, and so valid only until it is released."""
    layer_crc32c: Sequence[int] = ()
    """The received checksum of each layer; may be empty."""

    def verify(self) -> bool:
        """Tell whether the payload matches its checksum."""
        return _matches(self.payload, self.crc32c)

    def verify_layers(self, layers: Sequence[int]) -> bool:
        """Tell whether some layers, given by their indices in the header, match their checksums.

        Without checksums of layers, tell whether the whole payload matches.
        """
        if not self.layer_crc32c:
            return self.verify()
        parts, found = layer_parts(self.header, self.payload), self.layer_crc32c
        return all(_matches(parts[layer], found[layer]) for layer in layers)

    @property
    def format(self) -> RowFormat:
        """How the rows are encoded."""
        return RowFormat.of(self.header)

    def split(self) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any]]:
        """Return the prefixes [layers], or None, and the encoded rows [layers, positions].

        Both have the dtypes of `format`, and are views of the payload.
        """
        return self.format.split(self.payload, len(self.header.layers), len(self.header.positions))

    def rows(self) -> npt.NDArray[Any]:
        """Return the decoded rows [layers, positions, width]. RAW rows are a view of the payload."""
        prefixes, rows = self.split()
        return self.format.decode(rows, prefixes if prefixes is None else prefixes[:, None])


@dataclass(frozen=True)
class AppendView:
    """A parsed AppendChunksRequest whose chunk, if it has one, is a view of the received bytes."""

    number: int
    """The message's number in its stream."""
    capture_id: str
    """The capture."""
    loss: store_pb2.RowLoss | None
    """The lost rows, if the message reports a loss."""
    chunk: memoryview | None
    """The bytes of the Chunk message; see `parse_chunk`."""
    tenant: str = ""
    """The capture's tenant, as the writer names it."""
    attempt: int = 0
    """The capture's `attempt`."""
    placed: store_pb2.PlacedChunk | None = None
    """The chunk, if its payload is in shared memory."""
    shared_memory_key: bytes = b""
    """The key of that memory."""


def checksum(payload: Buffer, before: int = 0) -> int:
    """Return the CRC-32C of a payload; `before` is that of the bytes before it, if it is not all."""
    return int(_crc32c.crc32c(payload, before))


def _matches(payload: memoryview, crc32c: int) -> bool:
    """Compare a payload with its checksum.

    This is often the first time that the payload is touched, and its pages may have to come from the disk. So this lets
    go of the GIL, except for what is on one or two pages.
    """
    return int(_crc32c.crc32c(payload, 0, _RELEASES_GIL if len(payload) >= _PAGE_BYTES else -1)) == crc32c


def layer_parts(header: capture_pb2.ChunkHeader, payload: memoryview) -> list[memoryview]:
    """Return the part of a payload that each layer takes. All have the same size."""
    size = len(payload) // len(header.layers)
    return [payload[at : at + size] for at in range(0, len(payload), size)]


def chunk_prefix(
    header: capture_pb2.ChunkHeader, crc32c: int, payload_bytes: int, layer_crc32c: Sequence[int] = ()
) -> bytes:
    """Return the bytes of a Chunk before its payload. With the payload appended, they are the whole message."""
    return payload_prefix(chunk_head(header, crc32c, layer_crc32c), payload_bytes)


def chunk_head(header: capture_pb2.ChunkHeader, crc32c: int, layer_crc32c: Sequence[int] = ()) -> bytes:
    """Return the bytes of a Chunk without its payload field."""
    return capture_pb2.Chunk(header=header, crc32c=crc32c, layer_crc32c=layer_crc32c).SerializeToString()


def payload_prefix(head: Buffer, payload_bytes: int) -> bytes:
    """Return the bytes of a Chunk before its payload, from those before its payload field."""
    return b"".join((head, length_prefix(_CHUNK_PAYLOAD, payload_bytes)))


def append_prefix(number: int, capture_id: str, chunk_bytes: int, tenant: str = "", attempt: int = 0) -> bytes:
    """Return the bytes of an AppendChunksRequest before a Chunk of `chunk_bytes` bytes."""
    message = store_pb2.AppendChunksRequest(number=number, capture_id=capture_id, tenant=tenant, attempt=attempt)
    return message.SerializeToString() + length_prefix(_APPEND_CHUNK, chunk_bytes)


def read_prefix(chunk_bytes: int) -> bytes:
    """Return the bytes of a ReadChunksResponse before a Chunk of `chunk_bytes` bytes."""
    return length_prefix(_READ_CHUNK, chunk_bytes)


def split_chunk(data: Buffer) -> tuple[memoryview, memoryview]:
    """Return the bytes of a Chunk before its payload field, and the payload, without copying or parsing them.

    Raises:
        FrameError: The bytes are not a Chunk with its payload at the end.
    """
    view = memoryview(data)
    for number, value, raw in _raw_fields(view):
        if number == _CHUNK_PAYLOAD and isinstance(value, memoryview):
            return view[: len(view) - len(raw)], value
    raise FrameError("the chunk has no payload")


def placed_response(head: bytes, place: Place, num_bytes: int) -> bytes:
    """Return the ReadChunksResponse of a chunk whose payload is in shared memory. Several of them, joined, are one.

    Args:
        head: The bytes of the Chunk before its payload. PlacedChunk numbers these fields as Chunk does.
        place: Where the payload is.
        num_bytes: Its length.
    """
    placed = store_pb2.PlacedChunk(offset=place.offset, num_bytes=num_bytes, end=place.end).SerializeToString()
    return b"".join((length_prefix(_READ_PLACED, len(head) + len(placed)), head, placed))


def length_prefix(number: int, size: int) -> bytes:
    """Return the bytes of a field before its `size` bytes of content: a message, bytes or a text."""
    return _tag(number, _LENGTH_DELIMITED) + _varint(size)


def set_apart(data: Buffer, number: int) -> tuple[list[memoryview], bytes]:
    """Return the values of the length-delimited fields with this number as views, and the bytes of all other fields.

    Raises:
        FrameError: The bytes are not a message.
    """
    values: list[memoryview] = []
    rest: list[memoryview] = []
    for found, value, raw in _raw_fields(memoryview(data)):
        if found == number and isinstance(value, memoryview):
            values.append(value)
        else:
            rest.append(raw)
    return values, b"".join(rest)


def placed_view(chunk: store_pb2.PlacedChunk, payloads: Payloads | None) -> ChunkView:
    """Return a chunk whose payload is in shared memory, after checking that its header describes its payload.

    Raises:
        FrameError: The header does not match the payload, or there is no such payload.
    """
    if payloads is None:
        raise FrameError("its payload is in shared memory, which the reader did not offer")
    try:
        payload = payloads.take(chunk.offset, chunk.num_bytes, chunk.end)
    except SharedMemoryError as error:
        raise FrameError(str(error)) from None
    check_header(chunk.header, len(payload))
    return ChunkView(chunk.header, chunk.crc32c, payload, is_placed=True)


def parse_chunk(data: Buffer, *, is_to_be_kept: bool = False) -> ChunkView:
    """Parse a Chunk and check that its header describes its payload, without copying the payload.

    Args:
        data: The bytes of the Chunk.
        is_to_be_kept: Check also that the payload is its last field, so that `split_chunk` can split it.

    Raises:
        FrameError: The bytes are not a Chunk, its header does not match its payload, or it cannot be kept.
    """
    header, crc32c, payload = None, 0, None
    layer_crc32c: tuple[int, ...] = ()
    for number, value in _fields(memoryview(data)):
        if is_to_be_kept and payload is not None:
            raise FrameError("the payload must be the last field of a chunk")
        if number == _CHUNK_HEADER and isinstance(value, memoryview):
            header = _parse(capture_pb2.ChunkHeader, value)
        elif number == _CHUNK_CRC32C and isinstance(value, int):
            crc32c = value
        elif number == _CHUNK_LAYER_CRC32C:  # packed, as protobuf writes it, or one by one
            layer_crc32c += (value,) if isinstance(value, int) else _fixed32s(value)
        elif number == _CHUNK_PAYLOAD and isinstance(value, memoryview):
            payload = value
    if header is None:
        raise FrameError("the chunk has no header")
    payload = memoryview(b"") if payload is None else payload
    check_header(header, len(payload))
    check_layer_checksums(header, layer_crc32c)
    return ChunkView(header, crc32c, payload, layer_crc32c=layer_crc32c)


def parse_stored(head: Buffer, payload: memoryview) -> ChunkView:
    """Parse a Chunk from the bytes before its payload field and its payload. The Chunk was checked when it was written.

    Raises:
        FrameError: The head is not that of a Chunk, or the payload has another size than it says.
    """
    chunk = _parse(capture_pb2.Chunk, memoryview(head))
    _check_size(chunk.header, len(chunk.header.layers), len(chunk.header.positions), len(payload))
    check_layer_checksums(chunk.header, chunk.layer_crc32c)
    return ChunkView(chunk.header, chunk.crc32c, payload, layer_crc32c=chunk.layer_crc32c)


def parse_append(data: Buffer) -> AppendView:
    """Parse an AppendChunksRequest without copying or parsing the chunk in it.

    Raises:
        FrameError: The bytes are not an AppendChunksRequest with a chunk, a placed chunk or a loss.
    """
    chunks, rest = set_apart(data, _APPEND_CHUNK)
    chunk = chunks[-1] if chunks else None
    message = _parse(store_pb2.AppendChunksRequest, memoryview(rest))
    loss = message.loss if message.HasField("loss") else None
    placed = message.placed_chunk if message.HasField("placed_chunk") else None
    if sum(content is not None for content in (chunk, loss, placed)) != 1:
        raise FrameError("the message must carry either a chunk or a loss")
    return AppendView(
        message.number, message.capture_id, loss, chunk, message.tenant, message.attempt, placed,
        message.shared_memory_key,
    )  # fmt: skip


def placed_append(
    number: int, capture_id: str, placed: store_pb2.PlacedChunk, key: bytes, tenant: str = "", attempt: int = 0
) -> bytes:
    """Return the AppendChunksRequest of a chunk whose payload is in the shared memory that `key` names."""
    return store_pb2.AppendChunksRequest(
        number=number, capture_id=capture_id, tenant=tenant, attempt=attempt, shared_memory_key=key, placed_chunk=placed
    ).SerializeToString()


def parse_read(
    data: Buffer, payloads: Payloads | None = None
) -> capture_pb2.CaptureManifest | ChunkView | list[ChunkView]:
    """Parse a ReadChunksResponse without copying the payload of its chunk.

    Args:
        data: The message.
        payloads: The shared memory that its payload may be in.

    Returns:
        The manifest or the chunk that the message carries, or the chunks whose payloads are in shared memory.

    Raises:
        FrameError: The bytes are not a ReadChunksResponse.
    """
    for number, value in _fields(memoryview(data)):
        if number == _READ_CHUNK and isinstance(value, memoryview):
            return parse_chunk(value)
    message = _parse(store_pb2.ReadChunksResponse, memoryview(data))
    if message.placed_chunks:
        return [placed_view(chunk, payloads) for chunk in message.placed_chunks]
    if not message.HasField("manifest"):
        raise FrameError("the message carries neither a manifest nor a chunk")
    return message.manifest


def check_header(header: capture_pb2.ChunkHeader, payload_bytes: int) -> None:
    """Check that a chunk's header describes a payload of this length.

    Raises:
        FrameError: It does not.
    """
    layers, positions = list(header.layers), list(header.positions)
    if not layers or not positions or not header.width:
        raise FrameError("a chunk needs at least one layer, one position and a width")
    if len(positions) > MAX_CHUNK_POSITIONS:
        raise FrameError(f"a chunk holds at most {MAX_CHUNK_POSITIONS} positions, not {len(positions)}")
    if not _ascends(layers) or not _ascends(positions):
        raise FrameError("the layers and the positions of a chunk must ascend")
    _check_size(header, len(layers), len(positions), payload_bytes)


def _check_size(header: capture_pb2.ChunkHeader, layers: int, positions: int, payload_bytes: int) -> None:
    try:
        expected = RowFormat.of(header).payload_bytes(layers, positions)
    except ValueError as error:
        raise FrameError(str(error)) from None
    if expected != payload_bytes:
        raise FrameError(f"the chunk's header describes {expected} bytes, but its payload has {payload_bytes}")


def check_layer_checksums(header: capture_pb2.ChunkHeader, layer_crc32c: Sequence[int]) -> None:
    """Check that a chunk has no checksums of layers, or one for each.

    Raises:
        FrameError: It has another number of them.
    """
    if layer_crc32c and len(layer_crc32c) != len(header.layers):
        raise FrameError(f"the chunk has {len(layer_crc32c)} checksums of layers, but {len(header.layers)} layers")


def _fixed32s(data: memoryview) -> tuple[int, ...]:
    """Return the numbers of a packed field of fixed32.

    Raises:
        FrameError: The field is truncated.
    """
    if len(data) % 4:
        raise FrameError("a field of 32-bit numbers in the message is truncated")
    return struct.unpack(f"<{len(data) // 4}I", data)


def _ascends(numbers: list[int]) -> bool:
    return numbers == sorted(set(numbers))


def _parse(kind: type[_Message], data: memoryview) -> _Message:
    try:
        return kind.FromString(bytes(data))
    except DecodeError as error:
        raise FrameError(f"malformed {kind.DESCRIPTOR.name}: {error}") from None


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    for number, value, _ in _raw_fields(data):
        yield number, value


def _raw_fields(data: memoryview) -> Iterator[tuple[int, int | memoryview, memoryview]]:
    """Yield (field number, value, the whole field's bytes) for each top-level field of a message."""
    at = 0
    while at < len(data):
        start = at
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        value: int | memoryview
        if kind == _VARINT:
            value, at = _read_varint(data, at)
        elif kind == _LENGTH_DELIMITED:
            size, at = _read_varint(data, at)
            value, at = data[at : at + size], at + size
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
            value, at = int.from_bytes(data[at : at + size], "little"), at + size
        else:
            raise FrameError(f"field {number} has the unknown wire type {kind}")
        if at > len(data):
            raise FrameError(f"field {number} extends beyond the end of the message")
        yield number, value, data[start:at]


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:  # noqa: PLR2004 - a varint has at most ten bytes of seven bits
            raise FrameError("a varint in the message is truncated or too long")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the continuation bit
            return value, at
        shift += 7


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:  # noqa: PLR2004 - the continuation bit
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
