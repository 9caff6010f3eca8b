"""Cuts rows into chunks that the store accepts, in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from residuum.v1 import capture_pb2
from residuum.wire.limits import MAX_CHUNK_BYTES, MAX_CHUNK_POSITIONS, TARGET_CHUNK_BYTES
from residuum.wire.rows import frames
from residuum.wire.rows.encodings import RowFormat

_HEADER_ROOM = 64 << 10
"""Bytes reserved for a chunk's header: 4096 positions of up to five bytes, hundreds of layers, and smaller fields."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an extent's rows that fits one chunk."""

    header: capture_pb2.ChunkHeader
    """Describes the rows of the payload."""
    payload: memoryview
    """The encoded rows, a view of the ring. A copy only if a layer with a prefix had to be cut."""


def payload_bytes(header: capture_pb2.ChunkHeader) -> int:
    """Return the size in bytes of the payload that a header describes.

    Raises:
        ValueError: The header's encoding, width, element type and options contradict each other.
    """
    return RowFormat.of(header).payload_bytes(len(header.layers), len(header.positions))


def cut(
    header: capture_pb2.ChunkHeader, payload: memoryview, target_bytes: int = TARGET_CHUNK_BYTES
) -> Iterator[Piece]:
    """Cut rows into pieces of at most `target_bytes`. A piece is larger only if it holds a single layer.

    Pieces are groups of whole layers of nearly equal size: rows just above the target become two halves, not a full
    piece and a small rest. A layer is cut by positions only if it does not fit one chunk.

    The call itself raises the errors. The iterator makes the pieces one by one, as they are used.

    Args:
        header: Describes the rows of the payload.
        payload: The encoded rows.
        target_bytes: The size of the pieces. A layer that does not fit a message is cut to fit one.

    Raises:
        ValueError: The payload does not have the size that the header describes, or one row exceeds a chunk.
    """
    if not len(payload) or payload_bytes(header) != len(payload):
        raise ValueError(f"the header describes {payload_bytes(header)} bytes, but the payload has {len(payload)}")
    form = RowFormat.of(header)
    layer_bytes = len(payload) // len(header.layers)
    if form.prefix_bytes + form.row_bytes > MAX_CHUNK_BYTES - _HEADER_ROOM:
        raise ValueError(
            f"a row of {form.prefix_bytes + form.row_bytes} bytes does not fit a chunk, which holds at most "
            f"{MAX_CHUNK_BYTES - _HEADER_ROOM}"
        )
    if layer_bytes <= MAX_CHUNK_BYTES - _HEADER_ROOM and len(header.positions) <= MAX_CHUNK_POSITIONS:
        return _by_layers(header, payload, layer_bytes, target_bytes)
    return _by_positions(header, payload, form)


def append_message(number: int, capture_id: str, piece: Piece, tenant: str = "", attempt: int = 0) -> bytes:
    """Return the serialised AppendChunksRequest of a piece, including its checksum. This copies the payload once."""
    crc32c = frames.checksum(piece.payload)
    chunk = frames.chunk_prefix(piece.header, crc32c, len(piece.payload))
    prefix = frames.append_prefix(number, capture_id, len(chunk) + len(piece.payload), tenant, attempt)
    return b"".join((prefix, chunk, piece.payload))


def _by_layers(
    header: capture_pb2.ChunkHeader, payload: memoryview, layer_bytes: int, target_bytes: int
) -> Iterator[Piece]:
    layers, positions = list(header.layers), list(header.positions)
    for start, end in _spans(len(layers), max(1, target_bytes // layer_bytes)):
        part = _part(header, layers[start:end], positions)
        yield Piece(part, payload[start * layer_bytes : end * layer_bytes])


def _by_positions(header: capture_pb2.ChunkHeader, payload: memoryview, form: RowFormat) -> Iterator[Piece]:
    """Cut each layer's rows by positions. Each part repeats the layer's prefix."""
    positions = list(header.positions)
    max_rows = min(max(1, (TARGET_CHUNK_BYTES - form.prefix_bytes) // form.row_bytes), MAX_CHUNK_POSITIONS)
    for number, layer in enumerate(header.layers):
        base = number * form.payload_bytes(1, len(positions)) + form.prefix_bytes
        prefix = payload[base - form.prefix_bytes : base]
        for start, end in _spans(len(positions), max_rows):
            part = _part(header, [layer], positions[start:end])
            rows = payload[base + start * form.row_bytes : base + end * form.row_bytes]
            yield Piece(part, memoryview(b"".join((prefix, rows))) if prefix else rows)


def _spans(total: int, max_length: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of runs that cover `total`: as few as `max_length` allows, of nearly equal length."""
    runs = -(-total // max_length)
    for run in range(runs):
        yield total * run // runs, total * (run + 1) // runs


def _part(header: capture_pb2.ChunkHeader, layers: list[int], positions: list[int]) -> capture_pb2.ChunkHeader:
    return capture_pb2.ChunkHeader(
        sequence=header.sequence,
        site=header.site,
        layers=layers,
        positions=positions,
        dtype=header.dtype,
        width=header.width,
        encoding=header.encoding,
        dimensions=header.dimensions,
        axis=header.axis,
        features=header.features,
    )
