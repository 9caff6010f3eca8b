"""What waits for the writer, and the queue in which it waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import store_pb2
from residuum.wire.frames import ChunkView
from store_svc.captures.capture_names import CaptureName
from store_svc.writing.changes import Batch

_GROUP_BYTES = 32 << 20
"""Chunks in one transaction. More do not make it faster, and hold up acknowledgements."""

_QUEUE_BYTES = 64 << 20
"""Chunks that may wait. Beyond it `append` waits, and by gRPC's flow control so do the clients."""


class Acks(Protocol):
    """The stream that an append came from. The writer calls it in its own thread, so nothing here may block."""

    failed: bool
    """Whether `fail` was called. What is still queued of the stream is dropped."""

    def committed(self, number: int, rejections: list[store_pb2.ChunkRejection]) -> None:
        """Every message up to this number is committed, or rejected."""

    def synced(self, number: int) -> None:
        """Every message up to this number is synced, or rejected."""

    def fail(self, failure: Failure) -> None:
        """Nothing after the last acknowledgement was written."""

    def finished(self) -> None:
        """Everything that was queued before `WorkQueue.finish` is committed and synced."""


@dataclass
class Append:
    """A message of a stream, checked as far as that needs no capture."""

    stream: Acks
    """Where it came from."""
    number: int
    """Its number in the stream."""
    name: CaptureName
    """The capture."""
    content: tuple[memoryview, ChunkView] | store_pb2.RowLoss | Failure
    """A chunk, as bytes and parsed; or a loss; or why it can never be written."""
    size: int
    """What it takes of the queue's room, in bytes."""

    @property
    def capture_id(self) -> str:
        """The id of the capture."""
        return self.name.capture_id

    @property
    def num_bytes(self) -> int:
        """Bytes of the chunk, as it came."""
        return len(self.content[0]) if isinstance(self.content, tuple) else 0

    def apply(self, batch: Batch) -> bool | None:
        """Do what the message asks for; tell, for a chunk, whether anything was stored.

        Raises:
            Failure: It can never be written.
        """
        if isinstance(self.content, Failure):
            raise self.content
        if isinstance(self.content, store_pb2.RowLoss):
            batch.lose(self.name, self.content)
            return None
        frame, chunk = self.content
        return batch.append(self.name, frame, chunk)


@dataclass
class Command:
    """A change that a call asks for."""

    run: Callable[[Batch], Any]
    """The change; it may run several times, each time in another batch."""
    capture_id: str
    """The capture that it is about."""
    reserve: bool
    """Whether it may use the room that is kept for ending and deleting captures."""
    future: Future[Any] = field(default_factory=Future)
    """What the change returned, once that is committed."""


@dataclass
class Work:
    """What one transaction is made of."""

    commands: list[Command] = field(default_factory=list)
    """Changes, which go first."""
    appends: list[Append] = field(default_factory=list)
    """Messages, in the order of their streams."""
    endings: list[Acks] = field(default_factory=list)
    """Streams of which these were the last messages."""

    def __bool__(self) -> bool:
        return bool(self.commands or self.appends)

    @property
    def capture_ids(self) -> list[str]:
        """The captures that it is about, once for each piece of it."""
        return [*(item.capture_id for item in self.commands), *(item.capture_id for item in self.appends)]

    def parts(self) -> list[Work]:
        """Return the same work as one piece for each command and message."""
        return [*(Work(commands=[item]) for item in self.commands), *(Work(appends=[item]) for item in self.appends)]

    def fail(self, why: Callable[[str], Failure]) -> None:
        """Tell everyone whose work this is that it was not done; `why` is given the capture."""
        for command in self.commands:
            if not command.future.done():
                command.future.set_exception(why(command.capture_id))
        for item in self.appends:
            item.stream.fail(why(item.capture_id))
        for stream in self.endings:
            stream.fail(why(""))


class Waiting(NamedTuple):
    """What waits in a queue."""

    messages: int
    """Messages of streams."""
    num_bytes: int
    """What they take of the queue's room."""


class WorkQueue:
    """A queue with room for so many bytes. Commands pass the messages that wait."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._commands: list[Command] = []
        self._messages: deque[Append | Acks] = deque()
        self._bytes = 0
        self._closed = False

    def call(self, command: Command) -> None:
        """Queue a command.

        Raises:
            Failure: NOT_SERVING, the queue is closed.
        """
        with self._condition:
            self._check_open()
            self._commands.append(command)
            self._condition.notify_all()

    def append(self, item: Append) -> None:
        """Queue a message; waits for room.

        Raises:
            Failure: NOT_SERVING, the queue is closed.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._bytes < _QUEUE_BYTES or self._closed)
            self._check_open()
            self._messages.append(item)
            self._bytes += item.size
            self._condition.notify_all()

    def finish(self, stream: Acks) -> None:
        """Queue the end of a stream.

        Raises:
            Failure: NOT_SERVING, the queue is closed.
        """
        with self._condition:
            self._check_open()
            self._messages.append(stream)
            self._condition.notify_all()

    def waiting(self) -> Waiting:
        """Return what waits."""
        with self._condition:
            return Waiting(len(self._messages), self._bytes)

    def close(self) -> None:
        """Take no more; what is queued can still be taken."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def take(self, timeout: float | None) -> Work | None:
        """Take the work of one transaction.

        Args:
            timeout: Seconds to wait for it; None waits until there is some.

        Returns:
            The work, which is empty after the timeout; None if the queue is closed and nothing is left.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._commands or self._messages or self._closed, timeout)
            if self._closed and not self._commands and not self._messages:
                return None
            work = Work(commands=self._commands)
            self._commands = []
            self._take_messages(work)
            self._condition.notify_all()
            return work

    def _take_messages(self, work: Work) -> None:
        size = 0
        while self._messages and size < _GROUP_BYTES:
            item = self._messages.popleft()
            if isinstance(item, Append):
                work.appends.append(item)
                size += item.size
            else:
                work.endings.append(item)
        self._bytes -= size

    def _check_open(self) -> None:
        if self._closed:
            raise Failure(Reason.ERROR_REASON_NOT_SERVING, "The store is stopping; try again later.")
