"""The writer's queue, and the work items in it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import store_pb2
from residuum.wire.rows.frames import ChunkView
from store_svc.captures.capture_names import CaptureName
from store_svc.database.frames import PlacedFrame, frame_bytes
from store_svc.writing.changes import Batch
from store_svc.writing.placed import checksum_mismatch

_LEAST_GROUP_BYTES, MOST_GROUP_BYTES = 32 << 20, 96 << 20
"""Bytes of chunks in one transaction. For one file, larger transactions are no faster, and delay acknowledgements.
`memory_bound` counts the greatest."""

_SHARD_BYTES = 12 << 20
"""Bytes of chunks for each shard. With less, the shards wait for each other longer than they write."""

_GROUP_COMMANDS = 2048
"""Commands after which a transaction takes no more. Without a limit, thousands of waiting calls would make one long
transaction: all of them, and rows that came before or among them, would be acknowledged only at its end."""


class Acks(Protocol):
    """The stream that an append came from. The writer calls these methods in its thread, so they must not block."""

    failed: bool
    """Whether `fail` was called. The writer then drops the stream's queued messages."""

    def committed(self, number: int, rejections: list[store_pb2.ChunkRejection]) -> None:
        """Note that every message up to this number is committed or rejected."""

    def synced(self, number: int) -> None:
        """Note that every message up to this number is synced or rejected."""

    def fail(self, failure: Failure) -> None:
        """Note that nothing after the last acknowledgement was written."""

    def finished(self) -> None:
        """Note that every message queued before `WorkQueue.finish` is committed and synced."""


Content: TypeAlias = "tuple[memoryview | PlacedFrame, ChunkView] | store_pb2.RowLoss | Failure"
"""What a message carries: a chunk, as a frame and parsed; or a loss; or the reason why it can never be written."""


@dataclass
class Append:
    """A message of a stream. It passed all checks that do not need its capture."""

    stream: Acks
    """The stream that it came from."""
    number: int
    """Its number in the stream."""
    name: CaptureName
    """The capture."""
    content: Content
    """What it carries."""
    size: int
    """Bytes that it takes in the queue."""
    attempt: int = 0
    """The capture's attempt, as the writer names it."""

    @property
    def capture_id(self) -> str:
        """The capture's ID."""
        return self.name.capture_id

    @property
    def num_bytes(self) -> int:
        """Bytes of the chunk; 0 if the message carries none."""
        return frame_bytes(self.content[0]) if isinstance(self.content, tuple) else 0

    def copy(self) -> None:
        """Copy a payload that is in shared memory, and compare the copy with its checksum."""
        if isinstance(self.content, tuple) and isinstance(self.content[0], PlacedFrame):
            self.content = self.content[0].copied() or checksum_mismatch(self.capture_id)

    def apply(self, batch: Batch) -> bool | None:
        """Apply the message to a batch. For a chunk, return whether any row was stored.

        Raises:
            Failure: The message can never be written.
        """
        if isinstance(self.content, Failure):
            raise self.content
        if isinstance(self.content, store_pb2.RowLoss):
            batch.lose(self.name, self.content, self.attempt)
            return None
        frame, chunk = self.content
        return batch.append(self.name, frame, chunk, self.attempt)


@dataclass
class Command:
    """A change that a unary call, or the writer itself, asks for."""

    run: Callable[[Batch], Any]
    """The change. It may run several times, each time with a new batch."""
    capture_id: str
    """The capture that it changes."""
    reserve: bool
    """Whether it may use the space reserved for ending and deleting captures."""
    future: Future[Any] = field(default_factory=Future)
    """Receives the change's result after the commit."""


@dataclass
class Work:
    """The work of one transaction."""

    commands: list[Command] = field(default_factory=list)
    """Commands, which run first."""
    appends: list[Append] = field(default_factory=list)
    """Messages, in the order of their streams."""
    endings: list[Acks] = field(default_factory=list)
    """Streams whose last messages these were."""

    def __bool__(self) -> bool:
        return bool(self.commands or self.appends)

    @property
    def capture_ids(self) -> list[str]:
        """The capture of each command and message."""
        return [*(item.capture_id for item in self.commands), *(item.capture_id for item in self.appends)]

    def parts(self) -> list[Work]:
        """Return the work split into one part for each command and message."""
        return [*(Work(commands=[item]) for item in self.commands), *(Work(appends=[item]) for item in self.appends)]

    def fail(self, why: Callable[[str], Failure]) -> None:
        """Fail every command and stream of this work. `why` returns the Failure for a capture ID."""
        for command in self.commands:
            if not command.future.done():
                command.future.set_exception(why(command.capture_id))
        for item in self.appends:
            item.stream.fail(why(item.capture_id))
        for stream in self.endings:
            stream.fail(why(""))


class Waiting(NamedTuple):
    """The size of a queue."""

    messages: int
    """Waiting messages."""
    num_bytes: int
    """Bytes that they take in the queue."""


class _Queued(NamedTuple):
    """A message, or the end of a stream, in the queue."""

    item: Append | Acks
    after: int
    """How many commands were queued before it."""


class WorkQueue:
    """A queue that is bounded by bytes. Commands overtake waiting messages; messages never overtake commands."""

    def __init__(self, num_shards: int = 1) -> None:
        """Begin empty, for a database with this number of shards."""
        self._group_bytes = min(max(_LEAST_GROUP_BYTES, num_shards * _SHARD_BYTES), MOST_GROUP_BYTES)
        # As many bytes as a transaction may wait for it, and as many for the next one. At this limit `append` blocks,
        # and gRPC's flow control slows the clients down.
        self._max_bytes = 2 * self._group_bytes
        self._condition = threading.Condition()
        self._commands: deque[Command] = deque()
        self._commands_queued = self._commands_taken = 0
        self._messages: deque[_Queued] = deque()
        self._bytes = 0
        self._closed = False

    def call(self, *commands: Command) -> None:
        """Queue commands. They come into one transaction, or into consecutive ones if these are full.

        Raises:
            Failure: NOT_SERVING if the queue is closed.
        """
        with self._condition:
            self._check_open()
            self._commands.extend(commands)
            self._commands_queued += len(commands)
            self._condition.notify_all()

    def append(self, item: Append) -> None:
        """Queue a message, waiting until there is room.

        Raises:
            Failure: NOT_SERVING if the queue is closed.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._bytes < self._max_bytes or self._closed)
            self._check_open()
            self._messages.append(_Queued(item, self._commands_queued))
            self._bytes += item.size
            self._condition.notify_all()

    def finish(self, stream: Acks) -> None:
        """Queue the end of a stream.

        Raises:
            Failure: NOT_SERVING if the queue is closed.
        """
        with self._condition:
            self._check_open()
            self._messages.append(_Queued(stream, self._commands_queued))
            self._condition.notify_all()

    def waiting(self) -> Waiting:
        """Return how much is waiting."""
        with self._condition:
            return Waiting(len(self._messages), self._bytes)

    def close(self) -> None:
        """Accept no more work. Queued work can still be taken."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def take(self, timeout: float | None) -> Work | None:
        """Take the work of the next transaction, waiting for it if necessary.

        Args:
            timeout: Seconds to wait; None waits without limit.

        Returns:
            The work, empty after the timeout; None if the queue is closed and empty.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._commands or self._messages or self._closed, timeout)
            if self._closed and not self._commands and not self._messages:
                return None
            work = Work()
            self._take_commands(work)
            self._take_messages(work)
            self._condition.notify_all()
            return work

    def _take_commands(self, work: Work) -> None:
        while self._commands and len(work.commands) < _GROUP_COMMANDS:
            work.commands.append(self._commands.popleft())
        self._commands_taken += len(work.commands)

    def _take_messages(self, work: Work) -> None:
        """Take messages, but none that was queued after a command that still waits: it may open their capture."""
        size = 0
        while self._messages and size < self._group_bytes and self._messages[0].after <= self._commands_taken:
            item = self._messages.popleft().item
            if isinstance(item, Append):
                work.appends.append(item)
                size += item.size
            else:
                work.endings.append(item)
        self._bytes -= size

    def _check_open(self) -> None:
        if self._closed:
            raise Failure(Reason.ERROR_REASON_NOT_SERVING, "The store is stopping; try again later.")
