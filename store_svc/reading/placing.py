"""Puts large payloads into the shared memory of a reader, instead of into messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from residuum.v1 import capture_pb2
from residuum.wire.rows.frames import checksum, chunk_head, placed_response
from residuum.wire.rows.shared_memory import MIN_PLACED_BYTES, Place
from store_svc.database.frames import StoredFrame
from store_svc.reading.frame_access import Frame
from store_svc.reading.query import Query
from store_svc.reading.slicing import checksum_of_layers, cut_into, slice_chunk, slice_header
from store_svc.reading.stored_chunks import check_layers, framed, parsed
from store_svc.shared_memory.memories import ReadUse


class Room:
    """Room for a payload in the memory of a read."""

    def __init__(self, memory: ReadUse, place: Place, payload: npt.NDArray[np.uint8]) -> None:
        self._memory = memory
        self._place = place
        self.bytes = payload
        """The bytes to write to; uint8 [size]."""

    def respond(self, header: capture_pb2.ChunkHeader, crc32c: int, num_bytes: int) -> bytes | None:
        """Return the response with a chunk whose payload is the first bytes of the room. The rest is given back.

        Returns:
            The serialised ReadChunksResponse. None: the payload belongs in the message, and all of the room is given
            back. Until the next payload is placed, `bytes` still holds it.
        """
        if not _fits(num_bytes, self._memory):
            self.give_back()
            return None
        place = self._memory.shorten(self._place, len(self.bytes), num_bytes)
        return placed_response(chunk_head(header, crc32c), place, num_bytes)

    def give_back(self) -> None:
        """Give back all of the room."""
        self._memory.shorten(self._place, len(self.bytes), 0)


class Placing:
    """Places the payloads of one read.

    Rows are copied from LMDB's pages straight into the memory, in a read transaction. Joined rows that find no room
    there are collected in a buffer. `Placing` waits for room outside of any transaction.
    """

    def __init__(
        self,
        is_cancelled: Callable[[], bool],
        memory: ReadUse | None,
        framed: Callable[[bytes, memoryview], bytes] = framed,
    ) -> None:
        """Place payloads in a memory.

        Args:
            is_cancelled: Returns whether the caller has cancelled.
            memory: The memory; None to place no payload.
            framed: Returns the response with a serialised Chunk, given in two parts, whose payload is not placed.
        """
        self._is_cancelled = is_cancelled
        self._memory = memory
        self.framed = framed

    def room(self, num_bytes: int) -> Room | None:
        """Take room for a payload that is not known yet; None if there is none now, or payloads belong in messages."""
        memory = self._memory
        taken = memory.take_room(num_bytes) if memory is not None and num_bytes <= memory.max_bytes else None
        return Room(memory, *taken) if memory is not None and taken is not None else None

    def place(self, header: capture_pb2.ChunkHeader, crc32c: int, payload: npt.NDArray[np.uint8]) -> bytes | None:
        """Return the response with a chunk whose payload is copied into the memory.

        Returns:
            The serialised ReadChunksResponse. None: the payload belongs in the message.
        """
        memory = self._memory
        if memory is None or not _fits(len(payload), memory):
            return None
        head = chunk_head(header, crc32c)
        while not memory.is_over:
            copied = _copy(head, payload, memory)
            if copied is not None:
                return copied
            memory.wait(self._is_cancelled)
        return None

    def respond(self, frame: Frame, query: Query, *, whole: bool) -> bytes | None:
        """Return the response with the wanted rows of a frame.

        Returns:
            The serialised ReadChunksResponse, empty if the frame has no wanted row. None: the payload belongs in the
            message.

        Raises:
            Failure: UNKNOWN_CAPTURE, CHECKSUM_MISMATCH or ARCHIVE_UNREACHABLE.
        """
        memory = self._memory
        while memory is not None and not memory.is_over:
            with frame as stored:
                if not _fits(len(stored.payload), memory):
                    return None
                if whole:
                    copied = _copy(bytes(stored.head), np.frombuffer(stored.payload, dtype=np.uint8), memory)
                else:
                    copied = self._copy_slice(stored, query, memory)
            if copied is not None:
                return copied
            memory.wait(self._is_cancelled)
        return None

    def _copy_slice(self, frame: StoredFrame, query: Query, memory: ReadUse) -> bytes | None:
        """Copy the wanted rows of a chunk, and return the response; return None if there is no room."""
        chunk = parsed(frame, query.capture_id)
        layers, positions = query.cut(chunk.header)
        if not layers or not positions:
            return b""
        num_bytes = chunk.format.payload_bytes(len(layers), len(positions))
        if num_bytes < MIN_PLACED_BYTES:
            check_layers(chunk, layers, query.capture_id)
            return self.framed(*slice_chunk(chunk, layers, positions))
        room = memory.take(num_bytes)
        if room is None:
            return None
        place, payload = room
        cut_into(payload, chunk, layers, positions)
        crc32c = checksum_of_layers(chunk, layers, positions)
        if crc32c is None:  # otherwise the reader compares the payload with it
            check_layers(chunk, layers, query.capture_id)
            crc32c = checksum(payload.data)
        head = chunk_head(slice_header(chunk, layers, positions), crc32c)
        return placed_response(head, place, num_bytes)


def joined(responses: Iterator[bytes], memory: ReadUse | None) -> Iterator[bytes]:
    """Yield responses. Those whose payloads are in shared memory are joined: each message costs time at both ends.

    An empty response says that the next one may take long to come.
    """
    waiting: list[bytes] = []
    placed = sent = 0
    for response in responses:
        now = memory.num_bytes if memory is not None else 0
        if now > placed:
            waiting.append(response)
        if waiting and (memory is None or now == placed or now - sent >= memory.message_bytes):
            yield b"".join(waiting)
            waiting, sent = [], now
        if now == placed and response:
            yield response
        placed = now
    if waiting:
        yield b"".join(waiting)


def _fits(num_bytes: int, memory: ReadUse) -> bool:
    """Tell whether a chunk with a payload of this size is placed, as soon as there is room."""
    return MIN_PLACED_BYTES <= num_bytes <= memory.max_bytes


def _copy(head: bytes, payload: npt.NDArray[np.uint8], memory: ReadUse) -> bytes | None:
    """Copy a chunk's payload, and return the response; return None if there is no room.

    The reader compares the payload with its checksum, so the store does not.
    """
    room = memory.take(len(payload))
    if room is None:
        return None
    place, target = room
    np.copyto(target, payload)  # lets go of the GIL
    return placed_response(head, place, len(payload))
