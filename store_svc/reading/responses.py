"""Turns stored frames into the responses of a read.

The rows of one layer are in many frames, one for each block of positions. Each message costs time at both ends, so such
rows are joined if they travel in messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from residuum.v1 import capture_pb2
from residuum.wire.checksums import combined
from residuum.wire.frame_keys import unpack_frame
from residuum.wire.frames import checksum, chunk_prefix
from residuum.wire.limits import MAX_CHUNK_BYTES, MAX_CHUNK_POSITIONS
from store_svc.reading.frame_access import Frame
from store_svc.reading.placing import Placing
from store_svc.reading.query import Query
from store_svc.reading.slicing import checksum_of_layers, cut_into, slice_header
from store_svc.reading.stored_chunks import Part, check_layers, check_whole, damaged, parsed, sliced, wanted_parts

_JOINED_BYTES = 1 << 20
"""The most bytes of rows in a joined chunk. Larger messages are not read faster."""

_MAX_PIECE_BYTES = _JOINED_BYTES // 2
"""The most bytes of a frame's rows that are joined with others. Larger ones would be copied once more for few messages
less."""


class Responses:
    """Makes the responses of one read: serialised ReadChunksResponses, or fields of a ReadCapturesResponse."""

    def __init__(self, query: Query, placing: Placing) -> None:
        """Answer a query.

        Args:
            query: The wanted rows.
            placing: Puts large payloads into shared memory, if the reader has one.
        """
        self._query = query
        self._placing = placing

    def of(self, frames: Iterable[Frame]) -> Iterator[bytes]:
        """Yield the responses with the wanted rows of frames.

        Raises:
            Failure: UNKNOWN_CAPTURE, CHECKSUM_MISMATCH or ARCHIVE_UNREACHABLE, or the caller has cancelled.
        """
        run: list[Frame] = []
        for frame in frames:
            if run and not self._continues(run[-1], frame):
                yield from self._of_run(run)
                run = []
            run.append(frame)
            if frame.is_fetched:  # the next one may take long to come
                yield from self._of_run(run)
                run = []
        yield from self._of_run(run)

    def _continues(self, frame: Frame, following: Frame) -> bool:
        """Tell whether the wanted rows of two frames are those of one layer, the second's at later positions."""
        key, after = unpack_frame(frame.key), unpack_frame(following.key)
        if (key.sequence, key.site) != (after.sequence, after.site) or key.last_position >= after.first_position:
            return False
        layers = self._query.wanted_layers(key)
        return len(layers) == 1 and layers == self._query.wanted_layers(after)

    def _of_run(self, frames: list[Frame]) -> Iterator[bytes]:
        """Yield the responses for frames each of which continues the one before."""
        if len(frames) == 1:
            yield from self._of_frame(frames[0])
            return
        joined = _JoinedRows(self._query, self._placing)
        for frame in frames:
            placed = self._placed(frame)
            if placed is None and joined.add(frame):
                continue
            yield from joined.take()
            if placed:
                yield placed
            elif placed is None and not joined.add(frame):
                yield from self._in_messages(frame)
        yield from joined.take()

    def _of_frame(self, frame: Frame) -> Iterator[bytes]:
        placed = self._placed(frame)
        if placed is None:
            yield from self._in_messages(frame)
        elif placed:
            yield placed

    def _placed(self, frame: Frame) -> bytes | None:
        """See `Placing.respond`."""
        return self._placing.respond(frame, self._query, whole=self._wants_whole(frame))

    def _in_messages(self, frame: Frame) -> Iterator[bytes]:
        """Yield the responses with the wanted rows of one frame, which travel in the messages."""
        parts: list[Part] = []
        response = b""
        with frame as stored:
            prefix = stored.prefix
            size = len(prefix) + len(stored.payload)
            if self._wants_whole(frame) and size <= MAX_CHUNK_BYTES:
                response = self._placing.framed(prefix, stored.payload)
            else:
                parts = wanted_parts(stored, self._query)
        if response:
            check_whole(memoryview(response)[-size:], self._query.capture_id)
            yield response
        for part in parts:
            with frame as stored:
                response = self._placing.framed(*sliced(stored, part, self._query.capture_id))
            yield response

    def _wants_whole(self, frame: Frame) -> bool:
        return self._query.wants_whole(unpack_frame(frame.key))


class _JoinedRows:
    """Rows of one layer, in the order of their positions, that wait to be sent as one chunk.

    All chunks of a capture have the same format at a site: the store refuses others.
    """

    def __init__(self, query: Query, placing: Placing) -> None:
        self._query = query
        self._placing = placing
        self._header = capture_pb2.ChunkHeader()
        self._rows = np.empty(0, dtype=np.uint8)
        self._size = 0
        self._crc32c = 0

    def add(self, frame: Frame) -> bool:
        """Add the wanted rows of a frame. Return False if they must be sent in another message than those that wait."""
        with frame as stored:
            chunk = parsed(stored, self._query.capture_id)
            layers, positions = self._query.cut(chunk.header)
            if not layers or not positions or chunk.format.prefix_bytes:
                return False
            num_bytes = chunk.format.payload_bytes(1, len(positions))
            if num_bytes > _MAX_PIECE_BYTES or not self._has_room(num_bytes, len(positions)):
                return False
            if not len(self._rows):
                self._rows = np.empty(_JOINED_BYTES, dtype=np.uint8)
            piece = self._rows[self._size : self._size + num_bytes]
            cut_into(piece, chunk, layers, positions)  # lets go of the GIL
            crc32c = checksum_of_layers(chunk, layers, positions)
            if crc32c is None:  # otherwise `take` compares the rows with it
                check_layers(chunk, layers, self._query.capture_id)
                crc32c = checksum(piece.data)
            header = slice_header(chunk, layers, positions)
        if self._size:
            self._header.positions.extend(header.positions)
            self._crc32c = combined([self._crc32c, crc32c], num_bytes)
        else:
            self._header, self._crc32c = header, crc32c
        self._size += num_bytes
        return True

    def _has_room(self, num_bytes: int, positions: int) -> bool:
        return not self._size or (
            self._size + num_bytes <= _JOINED_BYTES and len(self._header.positions) + positions <= MAX_CHUNK_POSITIONS
        )

    def take(self) -> Iterator[bytes]:
        """Yield the response with the rows that wait, if there are any.

        Raises:
            Failure: CHECKSUM_MISMATCH.
        """
        if not self._size:
            return
        payload = self._rows[: self._size].data
        if checksum(payload) != self._crc32c:
            raise damaged(self._query.capture_id)
        response = self._placing.framed(chunk_prefix(self._header, self._crc32c, self._size), payload)
        self._size = 0
        yield response
