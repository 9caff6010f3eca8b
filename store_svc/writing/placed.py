"""Takes chunks out of the shared memory of writers.

A writer can change its memory at any time, also by mistake. So LMDB copies a payload first, and what is compared with
the checksum is LMDB's copy. If they differ, nothing is committed. The writer then copies all payloads of the
transaction, finds the ones that do not match, and writes the others; see `Writer`.

A message may come late: its shipper died, its worker gave the extent to another shipper, and now has other rows there.
Such a message stores nothing wrong, for two reasons. The bytes do not match the message's checksum any more. And the
worker reuses an extent only when the store has acknowledged all its rows; of a row, the first write wins.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import store_pb2
from residuum.wire.limits import MAX_CHUNK_BYTES, MAX_ID_LENGTH, MAX_PLACED_CHUNK_BYTES
from residuum.wire.rows.frames import ChunkView, FrameError, check_header, check_layer_checksums, chunk_head
from store_svc.checks import invalid
from store_svc.database.frames import PlacedFrame


def placed_frame(
    memory: npt.NDArray[np.uint8], placed: store_pb2.PlacedChunk
) -> tuple[PlacedFrame, ChunkView] | Failure:
    """Return the frame of a chunk and the parsed chunk, or why the message can never be written.

    Args:
        memory: The writer's memory, uint8 [size].
        placed: Where the payload is.
    """
    header, size = placed.header, placed.num_bytes
    try:
        check_header(header, size)
        check_layer_checksums(header, placed.layer_crc32c)
    except FrameError as error:
        return invalid("placed_chunk", str(error))
    if placed.offset + size > len(memory):
        return invalid("placed_chunk", f"its payload ends at {placed.offset + size}, beyond the memory's end")
    payload = memory[placed.offset : placed.offset + size].data
    frame = PlacedFrame(chunk_head(header, placed.crc32c, placed.layer_crc32c), payload, placed.crc32c)
    if frame.num_bytes > MAX_PLACED_CHUNK_BYTES:
        return invalid("placed_chunk", f"a chunk has at most {MAX_PLACED_CHUNK_BYTES} bytes, not {frame.num_bytes}")
    part = frame.num_bytes - size + size // len(header.layers)
    if part > MAX_CHUNK_BYTES:  # a reader without shared memory gets it in a message
        return invalid("placed_chunk", f"with one layer, a chunk has at most {MAX_CHUNK_BYTES} bytes, not {part}")
    return frame, ChunkView(header, placed.crc32c, payload, layer_crc32c=placed.layer_crc32c)


def checksum_mismatch(capture_id: str) -> Failure:
    """Return why a chunk cannot be written whose payload does not match its checksum."""
    message = "The chunk's checksum does not match its payload: it was damaged on the way. Send it again."
    shown = capture_id[:MAX_ID_LENGTH]  # the caller chose the text, and an answer has room for 1024 rejections
    return Failure(Reason.ERROR_REASON_CHECKSUM_MISMATCH, message, capture_id=shown)


def unknown_memory() -> Failure:
    """Return the failure of a stream that names a memory which the store does not have."""
    return Failure(
        Reason.ERROR_REASON_UNKNOWN_MEMORY,
        "The store does not have the shared memory that a message names. Send the payloads in messages, or give the "
        "memory again.",
    )
