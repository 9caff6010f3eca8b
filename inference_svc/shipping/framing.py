"""Cutting rows into chunks that the store accepts, without copying any of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from residuum.v1 import capture_pb2
from residuum.wire import frames
from residuum.wire.encodings import RowFormat
from residuum.wire.limits import MAX_CHUNK_BYTES, MAX_CHUNK_POSITIONS, TARGET_CHUNK_BYTES

_HEADER_ROOM = 64 << 10
"""For a chunk's header: 4096 positions of up to five bytes each, hundreds of layers, and the rest."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an extent's rows that fits one chunk."""

    header: capture_pb2.ChunkHeader
    """What the payload holds."""
    payload: memoryview
    """The encoded rows, where they lie in the ring; a copy only if a layer with a prefix had to be cut."""


def payload_bytes(header: capture_pb2.ChunkHeader) -> int:
    """Return the bytes that a header describes.

    Raises:
        ValueError: The header's encoding, width, element type and options do not go together.
    """
    return RowFormat.of(header).payload_bytes(len(header.layers), len(header.positions))


def cut(header: capture_pb2.ChunkHeader, payload: memoryview) -> Iterator[Piece]:
    """Cut rows into pieces of about TARGET_CHUNK_BYTES, which none exceeds unless one layer's rows do.

    Groups of whole layers are as equal as can be: rows just above the target become two halves, not a whole and a
    rest. Layers are cut by positions only where a single one would not fit a chunk.

    What cannot be cut is refused by the call itself; the pieces are made one by one, as they are asked for.

    Args:
        header: What the payload holds.
        payload: The encoded rows.

    Raises:
        ValueError: Header and payload do not fit each other, or one row alone exceeds a chunk.
    """
    if not len(payload) or payload_bytes(header) != len(payload):
        raise ValueError(f"the header describes {payload_bytes(header)} bytes, the payload has {len(payload)}")
    form = RowFormat.of(header)
    layer_bytes = len(payload) // len(header.layers)
    if form.prefix_bytes + form.row_bytes > MAX_CHUNK_BYTES - _HEADER_ROOM:
        raise ValueError(f"a row of {form.prefix_bytes + form.row_bytes} bytes does not fit a chunk")
    if layer_bytes <= MAX_CHUNK_BYTES - _HEADER_ROOM and len(header.positions) <= MAX_CHUNK_POSITIONS:
        return _by_layers(header, payload, layer_bytes)
    return _by_positions(header, payload, form)


def append_message(number: int, capture_id: str, piece: Piece, tenant: str = "") -> bytes:
    """Return the bytes of an AppendChunksRequest, checksum included. The payload is copied here, once."""
    crc32c = frames.checksum(piece.payload)
    chunk = frames.chunk_prefix(piece.header, crc32c, len(piece.payload))
    prefix = frames.append_prefix(number, capture_id, len(chunk) + len(piece.payload), tenant)
    return b"".join((prefix, chunk, piece.payload))


def _by_layers(header: capture_pb2.ChunkHeader, payload: memoryview, layer_bytes: int) -> Iterator[Piece]:
    layers, positions = list(header.layers), list(header.positions)
    for start, end in _spans(len(layers), max(1, TARGET_CHUNK_BYTES // layer_bytes)):
        part = _part(header, layers[start:end], positions)
        yield Piece(part, payload[start * layer_bytes : end * layer_bytes])


def _by_positions(header: capture_pb2.ChunkHeader, payload: memoryview, form: RowFormat) -> Iterator[Piece]:
    """Cut each layer's rows; what stands before a layer's rows comes before each of the parts."""
    positions = list(header.positions)
    most = min(max(1, (TARGET_CHUNK_BYTES - form.prefix_bytes) // form.row_bytes), MAX_CHUNK_POSITIONS)
    for number, layer in enumerate(header.layers):
        base = number * form.payload_bytes(1, len(positions)) + form.prefix_bytes
        prefix = payload[base - form.prefix_bytes : base]
        for start, end in _spans(len(positions), most):
            part = _part(header, [layer], positions[start:end])
            rows = payload[base + start * form.row_bytes : base + end * form.row_bytes]
            yield Piece(part, memoryview(b"".join((prefix, rows))) if prefix else rows)


def _spans(total: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the fewest runs of at most `most` that cover `total`, as equal as can be."""
    runs = -(-total // most)
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
    )
