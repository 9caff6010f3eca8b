"""Turns stored frames into the responses of a read.

The rows of one layer are in many frames, one for each block of positions. Each chunk costs time at both ends, so such
rows are joined.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from residuum.v1 import capture_pb2
from residuum.wire.limits import MAX_CHUNK_BYTES, MAX_CHUNK_POSITIONS
from residuum.wire.rows.capture_batches import BATCH_BYTES
from residuum.wire.rows.checksums import combined
from residuum.wire.rows.frame_keys import unpack_frame
from residuum.wire.rows.frames import checksum, chunk_prefix
from store_svc.reading.frame_access import Frame, IsCancelled
from store_svc.reading.open_read import check_not_cancelled
from store_svc.reading.placing import Placing, Room
from store_svc.reading.query import Query
from store_svc.reading.slicing import checksum_of_layers, cut_into, slice_header, sliced_positions
from store_svc.reading.stored_chunks import Part, check, check_layers, damaged, parsed, sliced, wanted_parts

_MAX_PIECE_BYTES = BATCH_BYTES // 2
"""The most bytes of a frame's rows that are joined with others. To copy larger pieces once more would save few
chunks."""

_MAX_WAIT_SECONDS = 0.02
"""How long rows may wait for others. The time is checked when the next frame is found, so a wait for that one adds to
it. Rows in shared memory may wait longer, until a message is full."""


class _InRun(NamedTuple):
    """A frame in a run: frames with rows of the same layer, at ascending positions. A frame alone is a run, too."""

    frame: Frame
    is_first: bool
    is_last: bool


class Responses:
    """Makes the responses of one read: serialised ReadChunksResponses, or fields of a ReadCapturesResponse."""

    def __init__(self, query: Query, placing: Placing, is_cancelled: IsCancelled) -> None:
        """Answer a query.

        Args:
            query: The wanted rows.
            placing: Puts large payloads into shared memory, if the reader has one.
            is_cancelled: Returns whether the caller has cancelled.
        """
        self._query = query
        self._placing = placing
        self._is_cancelled = is_cancelled

    def of(self, frames: Iterable[Frame]) -> Iterator[bytes]:
        """Yield the responses with the wanted rows of frames.

        Joined rows are yielded before the next payload is placed in shared memory. Callers compare the placed bytes
        before and after a response to tell whether its payload is there.

        Raises:
            Failure: UNKNOWN_CAPTURE, CHECKSUM_MISMATCH or ARCHIVE_UNREACHABLE, or the caller has cancelled.
        """
        rows = _JoinedRows(self._query, self._placing)
        try:
            yield from self._of(frames, rows)
        finally:
            rows.give_up()

    def _of(self, frames: Iterable[Frame], rows: _JoinedRows) -> Iterator[bytes]:
        joins = False
        for frame, is_first, is_last in self._in_runs(frames):
            check_not_cancelled(self._is_cancelled)
            if is_first:
                joins = not is_last and rows.suits(frame)
            if not joins:
                yield from self._of_frame(frame)
                continue
            if not rows.add(frame):
                yield from rows.take()
                if not rows.add(frame):
                    yield from self._of_frame(frame)
            if is_last or rows.have_waited or frame.is_fetched:
                yield from rows.take()

    def _in_runs(self, frames: Iterable[Frame]) -> Iterator[_InRun]:
        """Yield the frames. It looks one frame ahead, but not from a frame of the archive."""
        before: Frame | None = None
        is_first = True
        for frame in frames:
            if before is not None:
                continues = self._continues(before, frame)
                yield _InRun(before, is_first, not continues)
                is_first = not continues
            before = frame
            if frame.is_fetched:  # the next one may take long to come
                yield _InRun(frame, is_first=True, is_last=True)
                before, is_first = None, True
        if before is not None:
            yield _InRun(before, is_first, is_last=True)

    def _continues(self, frame: Frame, following: Frame) -> bool:
        """Tell whether the second one of two frames is in the run of the first one."""
        if following.is_fetched:
            return False
        key, after = unpack_frame(frame.key), unpack_frame(following.key)
        if (key.sequence, key.site) != (after.sequence, after.site) or key.last_position >= after.first_position:
            return False
        layers = self._query.wanted_layers(key)
        return len(layers) == 1 and layers == self._query.wanted_layers(after)

    def _of_frame(self, frame: Frame) -> Iterator[bytes]:
        """Yield the responses with the wanted rows of one frame."""
        whole = self._query.wants_whole(unpack_frame(frame.key))
        response = self._placing.respond(frame, self._query, whole=whole)
        if response is None:
            yield from self._in_messages(frame, whole=whole)
        elif response:
            yield response

    def _in_messages(self, frame: Frame, *, whole: bool) -> Iterator[bytes]:
        parts: list[Part] = []
        response = b""
        with frame as stored:
            prefix = stored.prefix
            if whole and len(prefix) + len(stored.payload) <= MAX_CHUNK_BYTES:
                # Check first: the checksum faults the pages in without the GIL; the copy would hold it.
                check(parsed(stored, self._query.capture_id), self._query.capture_id)
                response = self._placing.framed(prefix, stored.payload)
            else:
                parts = wanted_parts(stored, self._query)
        if response:
            yield response
        for part in parts:
            with frame as stored:
                response = self._placing.framed(*sliced(stored, part, self._query.capture_id))
            yield response


class _JoinedRows:
    """Rows of one layer, in the order of their positions, that wait to be sent as one chunk.

    All chunks of a capture have the same format at a site: the store refuses others.
    """

    def __init__(self, query: Query, placing: Placing) -> None:
        self._query = query
        self._placing = placing
        self._header = capture_pb2.ChunkHeader()
        self._room: Room | None = None
        self._buffer: npt.NDArray[np.uint8] | None = None
        self._rows = np.empty(0, dtype=np.uint8)  # in the room or in the buffer
        self._size = 0
        self._crc32c = 0
        """The checksum that the rows should have."""
        self._since = 0.0

    @property
    def have_waited(self) -> bool:
        """Whether the first of the rows has waited long enough."""
        return self._size > 0 and time.monotonic() - self._since > _MAX_WAIT_SECONDS

    def suits(self, frame: Frame) -> bool:
        """Tell whether a run that begins with this frame is joined."""
        with frame as stored:
            chunk = parsed(stored, self._query.capture_id)
            layers, positions = self._query.cut(chunk.header)
            num_bytes = chunk.format.payload_bytes(len(layers), len(positions))
            return not chunk.format.prefix_bytes and num_bytes <= _MAX_PIECE_BYTES

    def add(self, frame: Frame) -> bool:
        """Add the wanted rows of a frame. Return False if they have no room."""
        with frame as stored:
            chunk = parsed(stored, self._query.capture_id)
            layers, positions = self._query.cut(chunk.header)
            if not layers or not positions:
                return True
            num_bytes = chunk.format.payload_bytes(1, len(positions))
            if not self._has_room(num_bytes, len(positions)):
                return False
            if not self._size:
                self._begin()
            piece = self._rows[self._size : self._size + num_bytes]
            cut_into(piece, chunk, layers, positions)  # lets go of the GIL
            known = checksum_of_layers(chunk, layers, positions)
            if known is None:
                check_layers(chunk, layers, self._query.capture_id)
                self._crc32c = checksum(piece.data, self._crc32c)
            else:
                self._crc32c = combined([self._crc32c, known], num_bytes)
        if self._size:
            self._header.positions.extend(sliced_positions(chunk, positions))
        else:
            self._header, self._since = slice_header(chunk, layers, positions), time.monotonic()
        self._size += num_bytes
        return True

    def _begin(self) -> None:
        """Choose where the next rows wait: in the shared memory if it has room, otherwise in a buffer."""
        self._room = self._placing.room(BATCH_BYTES)
        if self._room is not None:
            self._rows = self._room.bytes
            return
        if self._buffer is None:
            self._buffer = np.empty(BATCH_BYTES, dtype=np.uint8)
        self._rows = self._buffer

    def _has_room(self, num_bytes: int, positions: int) -> bool:
        if num_bytes > _MAX_PIECE_BYTES:
            return False
        return not self._size or (
            self._size + num_bytes <= BATCH_BYTES and len(self._header.positions) + positions <= MAX_CHUNK_POSITIONS
        )

    def take(self) -> Iterator[bytes]:
        """Yield the response with the rows that wait, if there are any.

        Raises:
            Failure: CHECKSUM_MISMATCH, if the rows go into a message. The reader checks rows in shared memory.
        """
        if not self._size:
            return
        payload = self._rows[: self._size]
        room, self._room = self._room, None
        if room is not None:
            response = room.respond(self._header, self._crc32c, self._size)
        else:
            response = self._placing.place(self._header, self._crc32c, payload)
        if response is None:
            if checksum(payload.data) != self._crc32c:
                raise damaged(self._query.capture_id)
            prefix = chunk_prefix(self._header, self._crc32c, self._size)
            response = self._placing.framed(prefix, payload.data)
        self._size = self._crc32c = 0
        yield response

    def give_up(self) -> None:
        """Give back the room of rows that will not be sent: the read failed, or its caller has gone."""
        if self._room is not None:
            self._room.give_back()
