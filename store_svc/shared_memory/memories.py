"""The memories that peers have given to the store, and their use by calls."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt

from residuum.wire.rows.shared_memory import (
    MAX_MESSAGE_BYTES,
    MAX_READ_BYTES,
    MAX_UNRELEASED_BYTES,
    MAX_WRITE_BYTES,
    MIN_READ_BYTES,
    READ,
    SEAL_FUTURE_WRITE,
    WRITE,
    Place,
    RingUse,
    SharedMemoryError,
    decode_released,
)

MAX_MEMORIES = 256
"""Memories, and connections that have not given one yet, that the store has at once."""

MAX_READ_BYTES_IN_ALL = 1 << 30
"""Bytes of all memories for reading. They count as the peers' memory."""

_PATIENCE_SECONDS = 5.0
"""How long a read waits for a peer that releases nothing, before it sends payloads in messages."""

_MESSAGE_BYTES = 3 << 20
"""A message for each chunk of 2 MiB costs more than the chunk; more payloads in one are no faster."""

_TICK_SECONDS = 0.5
"""How often a waiting read checks whether its caller has gone."""

_REQUIRED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Memory:
    """A mapped memory, and the connection that keeps it."""

    def __init__(self, kind: int, key: bytes, connection: socket.socket, mapped: mmap.mmap) -> None:
        """Wrap a memory; `Memories.add` makes one."""
        self.kind = kind
        self.key = key
        self.connection = connection
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)
        """The memory, uint8 [size]. Read-only if it is for writing."""
        self.use = RingUse(len(self.bytes))
        self.lock = threading.Lock()
        self.is_borrowed = False
        """Whether a read uses it."""
        self.is_gone = False
        """Whether the connection has ended, or the peer broke a rule."""

    def take_releases(self, *, only_if_idle: bool = False) -> None:
        """Take the releases that have come. With `only_if_idle`, leave them to the read that uses the memory, if any.

        Raises:
            SharedMemoryError: The peer broke a rule.
            OSError: The connection has ended.
        """
        with self.lock:
            while not self.is_gone and not (only_if_idle and self.is_borrowed):
                try:
                    data = self.connection.recv(MAX_MESSAGE_BYTES)
                except BlockingIOError:
                    return
                if not data:
                    raise ConnectionResetError("the peer closed the connection")
                if self.kind != READ:
                    raise SharedMemoryError("it sent a message, and has nothing to release")
                self.use.release(decode_released(data))


class ReadUse:
    """The use of a memory by one read. All methods are called by one thread at a time."""

    def __init__(self, memory: Memory, drop: Callable[[Memory, Exception], None]) -> None:
        """Begin to use a memory."""
        self._memory = memory
        self._drop = drop
        self._given_up = False
        self._drained = memory.use.taken
        """The `taken` of the ring when the releases were last taken."""
        self.num_bytes = 0
        """Bytes of payloads that were put into the memory."""
        self.message_bytes = min(_MESSAGE_BYTES, len(memory.bytes) // 8)
        """Bytes of payloads at which a message is sent. The memory has room for several such messages, so that the
        store copies while the reader does."""
        self.max_bytes = (len(memory.bytes) - self.message_bytes - MAX_UNRELEASED_BYTES) // 2
        """Bytes of the largest chunk that always finds room in the end, also if payloads of a message that is not sent
        yet, and some that the peer has not released yet, lie in the middle of the memory."""

    @property
    def is_over(self) -> bool:
        """Whether further payloads go into messages."""
        return self._given_up or self._memory.is_gone

    def take(self, num_bytes: int) -> tuple[Place, npt.NDArray[np.uint8]] | None:
        """Take room for a payload: its place, and its bytes, uint8 [num_bytes]. None if there is no room now."""
        room = self.take_room(num_bytes)
        if room is not None:
            self.num_bytes += num_bytes
        return room

    def take_room(self, num_bytes: int) -> tuple[Place, npt.NDArray[np.uint8]] | None:
        """Take room for a payload whose size is not known yet. `shorten` must follow before anything else is taken."""
        use = self._memory.use
        if use.taken - self._drained >= MAX_UNRELEASED_BYTES:  # a socket holds few messages
            self._take_releases()
        place = None if self.is_over else use.take(num_bytes)
        if place is None and not self.is_over:
            self._take_releases()
            place = None if self.is_over else use.take(num_bytes)
        if place is None:
            return None
        return place, self._memory.bytes[place.offset : place.offset + num_bytes]

    def shorten(self, place: Place, size: int, kept: int) -> Place:
        """Return the unused end of the room taken last, or all of it, to the ring. See `RingUse.shorten`."""
        self.num_bytes += kept
        return self._memory.use.shorten(place, size, kept)

    def wait(self, is_cancelled: Callable[[], bool]) -> None:
        """Wait until the peer releases something. If it does not for some seconds, give up.

        Call this outside of a transaction.
        """
        before, deadline = self._memory.use.released, time.monotonic() + _PATIENCE_SECONDS
        poll = select.poll()
        with suppress(ValueError):  # the connection was closed meanwhile
            poll.register(self._memory.connection, select.POLLIN)
        while not self.is_over:
            poll.poll(_TICK_SECONDS * 1000)
            self._take_releases()
            if self._memory.use.released != before:
                return
            if is_cancelled() or time.monotonic() >= deadline:
                self._given_up = True

    def _take_releases(self) -> None:
        self._drained = self._memory.use.taken
        try:
            self._memory.take_releases()
        except (OSError, SharedMemoryError) as error:
            self._drop(self._memory, error)


class Memories:
    """All memories, by their keys. Thread-safe."""

    def __init__(
        self, on_drop: Callable[[Memory, Exception], None], on_borrow: Callable[[Memory], None] = lambda _: None
    ) -> None:
        """Begin without any.

        Args:
            on_drop: Called, in any thread, when a memory is dropped, with the reason.
            on_borrow: Called, in any thread and with the memory's lock, when `is_borrowed` changes.
        """
        self._on_drop = on_drop
        self._on_borrow = on_borrow
        self._lock = threading.RLock()  # dropping a memory may free one, which calls `_freed`
        self._by_key: dict[bytes, Memory] = {}
        self._read_bytes = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, kind: int, key: bytes, connection: socket.socket, descriptor: int) -> Memory:
        """Check and map the memory of a peer. The caller closes the descriptor.

        Raises:
            SharedMemoryError: The memory is not as it must be, or there are too many.
        """
        size = _check(kind, descriptor)
        with self._lock:
            if key in self._by_key:
                raise SharedMemoryError("its key names another memory")
            if kind == READ and self._read_bytes + size > MAX_READ_BYTES_IN_ALL:
                raise SharedMemoryError(f"all memories for reading may have {MAX_READ_BYTES_IN_ALL} bytes together")
            writable = mmap.PROT_WRITE if kind == READ else 0
            try:
                mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | writable)
            except OSError as error:
                raise SharedMemoryError(f"its memory cannot be mapped: {error}") from None
            _keep_pages(kind, descriptor, size)
            if kind == READ:
                self._read_bytes += size
                # It counts until it is unmapped: a call may use it for longer than the connection lasts.
                weakref.finalize(mapped, self._freed, size)
            memory = self._by_key[key] = Memory(kind, key, connection, mapped)
        return memory

    def drop(self, memory: Memory, why: Exception) -> None:
        """Forget a memory and close its connection. It is unmapped once no call uses it."""
        with self._lock:
            if self._by_key.get(memory.key) is not memory:
                return
            del self._by_key[memory.key]
        with memory.lock:
            memory.is_gone = True
        self._on_drop(memory, why)

    def drop_all(self, why: Exception) -> None:
        """Drop all memories."""
        for memory in list(self._by_key.values()):
            self.drop(memory, why)

    @contextmanager
    def reading(self, key: bytes) -> Iterator[ReadUse | None]:
        """Use a memory for a read while the context lasts.

        Yields None if the key names none, another read uses it, or the peer has not released all of it.
        """
        memory = self._borrow(key) if key else None
        if memory is None:
            yield None
            return
        try:
            yield ReadUse(memory, self.drop)
        finally:
            self._give_back(memory)

    def written(self, key: bytes) -> npt.NDArray[np.uint8] | None:
        """Return a memory for writing, uint8 [size], read-only; None if the key names none."""
        with self._lock:
            memory = self._by_key.get(key)
            return memory.bytes if memory is not None and memory.kind == WRITE else None

    def _borrow(self, key: bytes) -> Memory | None:
        memory = self._by_key.get(key)
        if memory is None or memory.kind != READ:
            return None
        with memory.lock:
            if memory.is_borrowed or memory.is_gone:
                return None
            memory.is_borrowed = True
            self._on_borrow(memory)
        try:
            memory.take_releases()  # the last ones of the read before; the peer sent them before it made this call
        except (OSError, SharedMemoryError) as error:
            self.drop(memory, error)
        if memory.is_gone or not memory.use.is_unused:
            self._give_back(memory)
            return None
        return memory

    def _give_back(self, memory: Memory) -> None:
        with memory.lock:
            memory.is_borrowed = False
            if not memory.is_gone:
                self._on_borrow(memory)

    def _freed(self, size: int) -> None:
        with self._lock:
            self._read_bytes -= size


def _check(kind: int, descriptor: int) -> int:
    """Return the size of a peer's memory.

    Raises:
        SharedMemoryError: It could end the store with SIGBUS, or make it use memory of its own.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise SharedMemoryError("its descriptor is not that of a memfd") from None
    if seals & _REQUIRED_SEALS != _REQUIRED_SEALS:
        raise SharedMemoryError("its memory is not sealed against shrinking and growing")
    # Pages of hugetlbfs can be missing when they are used, which ends the process with SIGBUS.
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
        raise SharedMemoryError("its memory has huge pages of hugetlbfs")
    status = os.fstat(descriptor)
    smallest, largest = (MIN_READ_BYTES, MAX_READ_BYTES) if kind == READ else (1, MAX_WRITE_BYTES)
    if not stat.S_ISREG(status.st_mode) or not smallest <= status.st_size <= largest:
        raise SharedMemoryError(f"its memory has {status.st_size} bytes, not {smallest} to {largest}")
    return status.st_size


def _keep_pages(kind: int, descriptor: int, size: int) -> None:
    """Make sure that all pages of a peer's memory are allocated and stay so: the peer pays for them, not the store.

    Raises:
        SharedMemoryError: They are not, or may be freed.
    """
    if kind == READ:  # the store can still write: its own mapping is older than the seal
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEAL_FUTURE_WRITE)
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEAL_FUTURE_WRITE:
        raise SharedMemoryError("its memory cannot be sealed against freeing pages, or is not (F_SEAL_FUTURE_WRITE)")
    if os.fstat(descriptor).st_blocks * 512 < size:
        raise SharedMemoryError("not all pages of its memory are allocated")
