"""One AppendChunks stream: queues its messages and sends its acknowledgements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import numpy.typing as npt

from residuum.rpc.errors import Failure
from residuum.v1 import store_pb2
from residuum.wire.limits import MAX_CHUNK_BYTES
from residuum.wire.rows.frames import AppendView, ChunkView, FrameError, parse_append, parse_chunk
from store_svc.captures.capture_names import CaptureName, unknown_capture, written_tenant
from store_svc.checks import invalid
from store_svc.writing.early_rows import ArrivedOpens, OpenWaits
from store_svc.writing.placed import checksum_mismatch, placed_frame, unknown_memory
from store_svc.writing.write_queue import Append, Content, WorkQueue
from svc_common.logs import get_logger
from svc_common.security.tokens_file import Caller

_log = get_logger(__name__)

_MAX_REJECTIONS = 1024
"""Rejections in one answer. When as many wait, because a client does not read its answers, its messages wait too."""

_ITEM_BYTES = 4096
"""Bytes counted for each message on top of its own, so that the queue also bounds tiny messages."""


class AppendStream:
    """A writer stream.

    One thread runs `pump`, which reads and queues messages. The call's own thread runs `responses`, which sends
    acknowledgements as they come. With a single thread, a writer that waits for an acknowledgement before it sends more
    would deadlock.
    """

    def __init__(
        self,
        queue: WorkQueue,
        caller: Caller,
        opens: ArrivedOpens,
        memory_of: Callable[[bytes], npt.NDArray[np.uint8] | None] = lambda _: None,
        count_placed: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Prepare for a stream.

        Args:
            queue: The writer's queue.
            caller: Who writes.
            opens: The opens that have arrived. Rows of other captures wait for theirs.
            memory_of: Returns the shared memory that a key names, uint8 [size], or None.
            count_placed: Called with the bytes of each payload that came in shared memory.
        """
        self._caller = caller
        self._memory_of = memory_of
        self._count_placed = count_placed
        self.failed = False
        """Whether the stream has failed. The writer then drops its queued messages."""
        self._queue = queue
        self._waits = OpenWaits(opens)
        self._condition = threading.Condition()
        self._committed = 0
        self._synced = 0
        self._rejections: list[store_pb2.ChunkRejection] = []
        self._failure: Failure | None = None
        self._finished = False
        self._news = False

    def pump(self, messages: Iterator[bytes]) -> None:
        """Queue the messages of a stream until it is half-closed, fails or is cancelled."""
        try:
            last = 0
            for data in messages:
                item = self._parse(data, last)
                last = item.number
                self._wait_for_open(item)
                if not self._wait_for_room():
                    return
                self._queue.append(item)
            self._queue.finish(self)
        except Failure as failure:
            self.fail(failure)
        except grpc.RpcError:
            self.cancel()  # the client has disconnected: queued messages are still written, but need no answer

    def responses(self) -> Iterator[store_pb2.AppendChunksResponse]:
        """Yield acknowledgements until everything is committed and synced.

        Raises:
            Failure: The stream has failed.
        """
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._news)
                response, failure, finished = self._take_news()
            if response is not None:
                yield response
            if failure is not None:
                try:
                    raise failure
                finally:
                    del failure  # its traceback refers to this frame: break the reference cycle
            if finished:
                return

    def committed(self, number: int, rejections: list[store_pb2.ChunkRejection]) -> None:
        """Note that every message up to this number is committed or rejected."""
        with self._condition:
            self._committed = number
            self._rejections += rejections
            self._notify()

    def synced(self, number: int) -> None:
        """Note that every message up to this number is synced or rejected."""
        with self._condition:
            self._synced = number
            self._notify()

    def fail(self, failure: Failure) -> None:
        """End the stream with a failure: nothing after the last acknowledgement was written."""
        with self._condition:
            if not self.failed:
                self._failure = failure
            self.failed = True
            self._notify()

    def finished(self) -> None:
        """End the stream: every message is committed and synced."""
        self.cancel()

    def cancel(self) -> None:
        """End the stream without waiting for more acknowledgements."""
        with self._condition:
            self._finished = True
            self._notify()

    def _notify(self) -> None:
        self._news = True
        self._condition.notify_all()

    def _take_news(self) -> tuple[store_pb2.AppendChunksResponse | None, Failure | None, bool]:
        now, later = self._rejections[:_MAX_REJECTIONS], self._rejections[_MAX_REJECTIONS:]
        # Rejected messages count as committed, so an answer must not reach past a rejection that it does not carry.
        committed = later[0].number - 1 if later else self._committed
        response = store_pb2.AppendChunksResponse(
            committed_through=committed, synced_through=min(self._synced, committed), rejections=now
        )
        self._rejections = later
        self._news = bool(later)
        self._condition.notify_all()
        failure, finished = (None, False) if later else (self._failure, self._finished)
        if failure is not None:
            self._failure = None  # its traceback will refer to this stream: leave no reference cycle
        return response if committed else None, failure, finished

    def _wait_for_open(self, item: Append) -> None:
        """Wait for the open of a message's capture, unless the message is refused anyway."""
        if isinstance(item.content, Failure):
            return
        if not self._waits.wait_for(item.name, item.attempt, lambda: self.failed or self._finished):
            _log.warning("rows were not written: their capture was not opened", capture_id=item.name.capture_id)

    def _wait_for_room(self) -> bool:
        """Wait until the client has read its rejections. Return whether the stream goes on."""
        with self._condition:
            self._condition.wait_for(lambda: len(self._rejections) < _MAX_REJECTIONS or self.failed or self._finished)
            return not self.failed and not self._finished

    def _parse(self, data: bytes, last: int) -> Append:
        try:
            message = parse_append(data)
        except (FrameError, ValueError) as error:
            raise invalid("message", f"cannot be parsed: {error}") from None
        if message.number <= last:
            raise invalid("number", f"message numbers must ascend, but {message.number} follows {last}")
        content = self._content(message)
        tenant = written_tenant(self._caller, message.tenant)
        if tenant is None:
            content = unknown_capture(message.capture_id)
        name = CaptureName(tenant or "", message.capture_id)
        size = len(data) + _ITEM_BYTES + (message.placed.num_bytes if message.placed is not None else 0)
        return Append(self, message.number, name, content, size, message.attempt)

    def _content(self, message: AppendView) -> Content:
        if message.chunk is not None:
            return _content(message.chunk, message.capture_id)
        if message.placed is None:
            assert message.loss is not None  # noqa: S101 - parse_append returns one of the three
            return message.loss
        memory = self._memory_of(message.shared_memory_key)
        if memory is None:
            raise unknown_memory()
        content = placed_frame(memory, message.placed)
        if not isinstance(content, Failure):
            self._count_placed(message.placed.num_bytes)
        return content


def _content(data: memoryview, capture_id: str) -> tuple[memoryview, ChunkView] | Failure:
    if len(data) > MAX_CHUNK_BYTES:
        return invalid("chunk", f"a chunk has at most {MAX_CHUNK_BYTES} bytes, not {len(data)}")
    try:
        chunk = parse_chunk(data, is_to_be_kept=True)
    except FrameError as error:
        return invalid("chunk", str(error))
    if not chunk.verify():
        return checksum_mismatch(capture_id)
    return data, chunk
