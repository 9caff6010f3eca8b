"""Stored chunks: checks them, and puts them into responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from residuum.rpc.errors import Failure, Reason
from residuum.wire.limits import TARGET_CHUNK_BYTES
from residuum.wire.rows.frames import ChunkView, FrameError, check_header, read_prefix
from store_svc.database.frames import StoredFrame
from store_svc.reading.query import Query
from store_svc.reading.slicing import slice_chunk


def framed(prefix: bytes, payload: memoryview) -> bytes:
    """Return the ReadChunksResponse with a serialised Chunk, given in two parts."""
    return b"".join((read_prefix(len(prefix) + len(payload)), prefix, payload))


class Part(NamedTuple):
    """Some rows of a stored chunk: the indices of layers and positions in its header, ascending."""

    layers: Sequence[int]
    positions: Sequence[int]


def wanted_parts(frame: StoredFrame, query: Query) -> list[Part]:
    """Return the wanted rows of a stored chunk, in parts that are small enough for a message.

    Raises:
        Failure: CHECKSUM_MISMATCH: the chunk cannot be parsed.
    """
    chunk = parsed(frame, query.capture_id)
    layers, positions = query.cut(chunk.header)
    if not layers or not positions:
        return []
    count = max(1, TARGET_CHUNK_BYTES // chunk.format.payload_bytes(1, len(positions)))
    return [Part(layers[start : start + count], positions) for start in range(0, len(layers), count)]


def sliced(frame: StoredFrame, part: Part, capture_id: str) -> tuple[bytes, memoryview]:
    """Return a part of a stored chunk as a serialised Chunk, as `slice_chunk` does.

    Raises:
        Failure: CHECKSUM_MISMATCH.
    """
    chunk = parsed(frame, capture_id)
    check_layers(chunk, part.layers, capture_id)
    return slice_chunk(chunk, *part)


def check(chunk: ChunkView, capture_id: str) -> None:
    """Check the header of a stored chunk, and compare its payload with its checksum.

    Raises:
        Failure: CHECKSUM_MISMATCH.
    """
    try:
        check_header(chunk.header, len(chunk.payload))
    except FrameError:
        raise damaged(capture_id) from None
    if not chunk.verify():
        raise damaged(capture_id)


def parsed(frame: StoredFrame, capture_id: str) -> ChunkView:
    """Return a stored chunk, parsed.

    Raises:
        Failure: CHECKSUM_MISMATCH: it cannot be parsed.
    """
    try:
        return frame.parse()
    except FrameError:
        raise damaged(capture_id) from None


def check_layers(chunk: ChunkView, layers: Sequence[int], capture_id: str) -> None:
    """Compare some layers of a stored chunk, given by their indices, with their checksums.

    Raises:
        Failure: CHECKSUM_MISMATCH.
    """
    if not chunk.verify_layers(layers):
        raise damaged(capture_id)


def damaged(capture_id: str) -> Failure:
    """Return the failure of a read that finds a damaged chunk."""
    message = f"A stored chunk of {capture_id!r} is damaged: its checksum does not match its payload."
    return Failure(Reason.ERROR_REASON_CHECKSUM_MISMATCH, message, capture_id=capture_id)
