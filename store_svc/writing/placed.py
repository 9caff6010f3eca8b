"""Takes chunks out of the shared memory of writers.

A writer can change its memory at any time, also by mistake. So the store copies a payload first, and checks and keeps
only the copy.

A message may come late: its shipper died, its worker gave the extent to another shipper, and now has other rows there.
Such a message stores nothing wrong, for two reasons. The bytes do not match the message's checksum any more. And the
worker reuses an extent only when the store has acknowledged all its rows; of a row, the first write wins.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import store_pb2
from residuum.wire.frames import ChunkView, FrameError, check_header, check_layer_checksums, chunk_prefix
from residuum.wire.limits import MAX_CHUNK_BYTES, MAX_PLACED_CHUNK_BYTES
from store_svc.checks import invalid


def copy_placed(
    memory: npt.NDArray[np.uint8], placed: store_pb2.PlacedChunk, capture_id: str
) -> tuple[memoryview, ChunkView] | Failure:
    """Return the bytes of a Chunk and the parsed chunk, or why the message can never be written.

    Args:
        memory: The writer's memory, uint8 [size].
        placed: Where the payload is.
        capture_id: The capture.
    """
    size = placed.num_bytes
    try:
        check_header(placed.header, size)
        check_layer_checksums(placed.header, placed.layer_crc32c)
    except FrameError as error:
        return invalid("placed_chunk", str(error))
    prefix = chunk_prefix(placed.header, placed.crc32c, size, placed.layer_crc32c)
    if len(prefix) + size > MAX_PLACED_CHUNK_BYTES:
        return invalid("placed_chunk", f"a chunk has at most {MAX_PLACED_CHUNK_BYTES} bytes, not {len(prefix) + size}")
    part = len(prefix) + size // len(placed.header.layers)
    if part > MAX_CHUNK_BYTES:  # a reader without shared memory gets it in a message
        return invalid("placed_chunk", f"with one layer, a chunk has at most {MAX_CHUNK_BYTES} bytes, not {part}")
    if placed.offset + size > len(memory):
        return invalid("placed_chunk", f"its payload ends at {placed.offset + size}, beyond the memory's end")
    frame = np.empty(len(prefix) + size, dtype=np.uint8)
    frame[: len(prefix)] = np.frombuffer(prefix, dtype=np.uint8)
    np.copyto(frame[len(prefix) :], memory[placed.offset : placed.offset + size])  # lets go of the GIL
    chunk = ChunkView(placed.header, placed.crc32c, frame.data[len(prefix) :])
    return (frame.data, chunk) if chunk.verify() else checksum_mismatch(capture_id)


def checksum_mismatch(capture_id: str) -> Failure:
    """Return why a chunk cannot be written whose payload does not match its checksum."""
    message = "The chunk's checksum does not match its payload: it was damaged on the way. Send it again."
    return Failure(Reason.ERROR_REASON_CHECKSUM_MISMATCH, message, capture_id=capture_id)


def unknown_memory() -> Failure:
    """Return the failure of a stream that names a memory which the store does not have."""
    return Failure(
        Reason.ERROR_REASON_UNKNOWN_MEMORY,
        "The store does not have the shared memory that a message names. Send the payloads in messages, or give the "
        "memory again.",
    )
