"""Stored chunks: checks them, and puts them into responses."""

from __future__ import annotations

from residuum.rpc.errors import Failure, Reason
from residuum.wire.frames import ChunkView, FrameError, parse_chunk, read_prefix
from residuum.wire.limits import TARGET_CHUNK_BYTES
from store_svc.reading.query import Query
from store_svc.reading.slicing import slice_chunk


def framed(chunk: bytes | memoryview) -> bytes:
    """Return the ReadChunksResponse with a serialised Chunk."""
    return b"".join((read_prefix(len(chunk)), chunk))


def responses(frame: memoryview, query: Query) -> list[bytes]:
    """Return the responses with the wanted rows of a stored chunk, each small enough for a message.

    Raises:
        Failure: CHECKSUM_MISMATCH.
    """
    chunk, layers, positions = wanted(frame, query)
    if not layers:
        return []
    count = max(1, TARGET_CHUNK_BYTES // chunk.format.payload_bytes(1, len(positions)))
    parts = (layers[start : start + count] for start in range(0, len(layers), count))
    return [framed(slice_chunk(chunk, part, positions)) for part in parts]


def wanted(frame: memoryview, query: Query) -> tuple[ChunkView, list[int], list[int]]:
    """Return a stored chunk, and the indices of its wanted layers and positions, neither if no row is wanted.

    The wanted layers match their checksums.

    Raises:
        Failure: CHECKSUM_MISMATCH.
    """
    try:
        chunk = parse_chunk(frame)
    except FrameError:
        raise damaged(query.capture_id) from None
    layers, positions = query.cut(chunk.header)
    if not layers or not positions:
        return chunk, [], []
    if not chunk.verify_layers(layers):
        raise damaged(query.capture_id)
    return chunk, layers, positions


def check_whole(chunk: bytes | memoryview, capture_id: str) -> None:
    """Compare the payload of a chunk with its checksum.

    Raises:
        Failure: CHECKSUM_MISMATCH.
    """
    try:
        is_right = parse_chunk(chunk).verify()
    except FrameError:
        is_right = False
    if not is_right:
        raise damaged(capture_id)


def damaged(capture_id: str) -> Failure:
    """Return the failure of a read that finds a damaged chunk."""
    message = f"A stored chunk of {capture_id!r} is damaged: its checksum does not match its payload."
    return Failure(Reason.ERROR_REASON_CHECKSUM_MISMATCH, message, capture_id=capture_id)
