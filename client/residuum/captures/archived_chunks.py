"""The chunks of a capture in an archive: which ones a read needs, and their bytes, fetched ahead in large ranges."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby

from residuum.exceptions import DamagedCapture
from residuum.v1 import archive_pb2, store_pb2
from residuum.wire.rows.archive import chunks_path
from residuum.wire.rows.frame_keys import FrameKey, unpack_frame
from residuum.wire.rows.frames import ChunkView, FrameError, checksum, parse_chunk
from residuum.wire.selection import wanted_positions

Fetch = Callable[[str, int, int], memoryview]
"""Returns the bytes of an object, by its path, their start and their number."""

_RANGE_BYTES = 4 << 20
"""The most bytes of a range of several chunks."""

_AHEAD = 4
"""Ranges of one read that are fetched at once."""


def chunks_of(
    capture: archive_pb2.ArchivedCapture, key: str, request: store_pb2.ReadChunksRequest, fetch: Fetch
) -> Iterator[tuple[ChunkView, int]]:
    """Yield the chunks that can have rows that a request wants, in the order of their keys, each with its bytes.

    Args:
        capture: The capture.
        key: Its name in the archive.
        request: What is read.
        fetch: Reads from the archive.

    Raises:
        DamagedCapture: A chunk does not match its checksum.
    """
    name = capture.manifest.description.capture_id
    waiting: deque[tuple[list[archive_pb2.ArchivedChunk], Future[memoryview]]] = deque()
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="fetch") as pool:
        try:
            for part in _ranges(capture, request):
                first, last = part[0], part[-1]
                length = last.offset + last.num_bytes - first.offset
                waiting.append((part, pool.submit(fetch, chunks_path(key, first.object), first.offset, length)))
                if len(waiting) > _AHEAD:
                    yield from _unpacked(*waiting.popleft(), name)
            while waiting:
                yield from _unpacked(*waiting.popleft(), name)
        finally:
            for _, future in waiting:
                future.cancel()


def _ranges(
    capture: archive_pb2.ArchivedCapture, request: store_pb2.ReadChunksRequest
) -> Iterator[list[archive_pb2.ArchivedChunk]]:
    """Yield the wanted chunks in groups that are neighbours in one object."""
    prompt = len(capture.manifest.description.prompt_token_ids)
    wanted = (chunk for chunk in capture.chunks if _is_wanted(_key(capture, chunk), request, prompt))
    end, begun, number = (-1, -1), 0, 0

    def group(chunk: archive_pb2.ArchivedChunk) -> int:
        nonlocal end, begun, number
        if (chunk.object, chunk.offset) != end or chunk.offset + chunk.num_bytes - begun > _RANGE_BYTES:
            number, begun = number + 1, chunk.offset
        end = (chunk.object, chunk.offset + chunk.num_bytes)
        return number

    for _, chunks in groupby(wanted, group):
        yield list(chunks)


def _is_wanted(key: FrameKey, request: store_pb2.ReadChunksRequest, prompt_tokens: int) -> bool:
    if request.sequences and key.sequence not in request.sequences:
        return False
    if request.sites and key.site not in request.sites:
        return False
    if request.layers and not any(key.first_layer <= layer <= key.last_layer for layer in request.layers):
        return False
    span = key.last_position - key.first_position + 1
    return bool(wanted_positions(request.positions, prompt_tokens, key.first_position, span).any())


def _key(capture: archive_pb2.ArchivedCapture, chunk: archive_pb2.ArchivedChunk) -> FrameKey:
    try:
        return unpack_frame(chunk.key)
    except struct.error:
        raise DamagedCapture(
            f"The archive's index of the capture {capture.manifest.description.capture_id} is damaged, or of a newer "
            "version."
        ) from None


def _unpacked(
    part: list[archive_pb2.ArchivedChunk], fetched: Future[memoryview], name: str
) -> Iterator[tuple[ChunkView, int]]:
    data, start = fetched.result(), part[0].offset
    for chunk in part:
        content = data[chunk.offset - start : chunk.offset - start + chunk.num_bytes]
        try:
            view = _checked(chunk, content)
        except FrameError as error:
            raise DamagedCapture(
                f"A chunk of the capture {name} in the archive is damaged: {error}. Its rows are lost, unless the "
                "store still has them.",
                reason="CHECKSUM_MISMATCH",
                metadata={"capture_id": name},
            ) from None
        yield view, chunk.num_bytes


def _checked(chunk: archive_pb2.ArchivedChunk, content: memoryview) -> ChunkView:
    if len(content) != chunk.num_bytes or checksum(content) != chunk.crc32c:
        raise FrameError("its checksum does not match")
    return parse_chunk(content)
