"""Stored chunks: checks them, and puts them into responses."""

from __future__ import annotations

from residuum.rpc.errors import Failure, Reason
from residuum.wire.frames import ChunkView, FrameError, parse_chunk, read_prefix
from store_svc.reading.query import Query
from store_svc.reading.slicing import slice_chunk


def framed(chunk: bytes | memoryview) -> bytes:
    """Return the ReadChunksResponse with a serialised Chunk."""
    return b"".join((read_prefix(len(chunk)), chunk))


def sliced(frame: memoryview, query: Query) -> bytes:
    """Return the response with the wanted rows of a stored chunk; empty if it has none.

    Raises:
        Failure: CHECKSUM_MISMATCH.
    """
    chunk = verified(frame, query.capture_id)
    layers, positions = query.cut(chunk.header)
    return framed(slice_chunk(chunk, layers, positions)) if layers and positions else b""


def verified(frame: memoryview, capture_id: str) -> ChunkView:
    """Return a stored chunk, after comparing its payload with its checksum.

    Raises:
        Failure: CHECKSUM_MISMATCH.
    """
    try:
        chunk = parse_chunk(frame)
    except FrameError:
        raise damaged(capture_id) from None
    if not chunk.verify():
        raise damaged(capture_id)
    return chunk


def damaged(capture_id: str) -> Failure:
    """Return the failure of a read that finds a damaged chunk."""
    message = f"A stored chunk of {capture_id!r} is damaged: its checksum does not match its payload."
    return Failure(Reason.ERROR_REASON_CHECKSUM_MISMATCH, message, capture_id=capture_id)
