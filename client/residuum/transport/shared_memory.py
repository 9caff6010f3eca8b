"""The client's shared memory with stores on the same machine. Both clients use it; nothing here waits but `open`."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from dataclasses import dataclass, field

from residuum.rpc.shared_memory import SWITCH, GivenMemory, create_memory, give_memory, is_possible, is_switched_off
from residuum.v1 import store_pb2
from residuum.wire.rows.shared_memory import MAX_UNRELEASED_BYTES, READ, SharedMemoryError, encode_released

MEMORY_BYTES = 16 << 20
"""The size of a memory. It holds some chunks, and is small enough for the caches of most processors."""

_MEMORIES = 4
"""Memories for one store. More reads at the same time get their rows in messages."""

_RETRY_SECONDS = 30.0
"""After a store offered no shared memory, or did not accept it, the client asks again only after this time."""


class ReadMemory:
    """A memory into which one store puts the payloads of one read at a time."""

    def __init__(self, endpoint: str, given: GivenMemory, mapped: mmap.mmap) -> None:
        """Wrap a memory; `SharedMemories.open` makes one."""
        self.endpoint = endpoint
        self._given = given
        self._view = memoryview(mapped).toreadonly()
        self._taken = 0
        self._released = 0

    @property
    def key(self) -> bytes:
        """Names the memory in requests."""
        return self._given.key

    def take(self, offset: int, num_bytes: int, end: int) -> memoryview:
        """Return a payload; see `Payloads`."""
        if offset + num_bytes > len(self._view) or end < self._taken + num_bytes:
            raise SharedMemoryError(f"bytes {offset} to {offset + num_bytes} are no payload in its shared memory")
        self._taken = end
        return self._view[offset : offset + num_bytes]

    def release(self, *, now: bool = False) -> None:
        """Release all payloads that were taken, if they take enough memory or `now` is true."""
        if self._taken - self._released >= (1 if now else MAX_UNRELEASED_BYTES) and self._given.send(
            encode_released(self._taken)
        ):
            self._released = self._taken  # otherwise the next release includes these

    def is_held(self) -> bool:
        """Tell whether the store still has the memory, and all of it is released."""
        return self._released == self._taken and self._given.is_held()

    def close(self) -> None:
        """Take the memory back from the store."""
        self._given.close()


@dataclass
class _Store:
    """What is known of one store."""

    description: store_pb2.DescribeStoreResponse | None = None
    idle: list[ReadMemory] = field(default_factory=list)
    count: int = 0
    why_not: str = "it was not tried yet"
    retry_at: float = 0.0


class SharedMemories:
    """The memories of one client, by the endpoints of stores. Thread-safe."""

    def __init__(self, *, wanted: bool) -> None:
        """Begin without any; with `wanted` false, make none."""
        self._lock = threading.Lock()
        self._stores: dict[str, _Store] = {}
        self._closed = False
        self._why_never = ""
        if not wanted:
            self._why_never = "it is switched off in this client (shared_memory=False)"
        elif is_switched_off():
            self._why_never = f"it is switched off in this environment ({SWITCH})"
        elif not is_possible():
            self._why_never = "it needs Linux"

    def borrow(self, endpoint: str) -> ReadMemory | None:
        """Return an idle memory that the store has; None if there is none."""
        if self._why_never:
            return None
        with self._lock:
            store = self._stores.setdefault(endpoint, _Store())
            while store.idle:
                memory = store.idle.pop()
                if memory.is_held():
                    return memory
                memory.close()
                store.count -= 1
                store.description = None  # the store was restarted, perhaps
        return None

    def may_open(self, endpoint: str) -> bool:
        """Tell whether to make another memory for a store. If so, call `open` or `failed`."""
        if self._why_never or self._closed:
            return False
        store = self._stores[endpoint]
        return store.count < _MEMORIES and time.monotonic() >= store.retry_at

    def description(self, endpoint: str) -> store_pb2.DescribeStoreResponse | None:
        """Return the store's description; None if the store is to be asked for it."""
        return self._stores[endpoint].description

    def open(self, endpoint: str, description: store_pb2.DescribeStoreResponse) -> ReadMemory | None:
        """Give a new memory to a store; return None if that does not work. This waits for the store, in its thread."""
        store = self._stores[endpoint]
        path = description.shared_memory_socket
        if not path:
            self.failed(endpoint, "the store offers none (its setting --shared-memory)")
            return None
        with self._lock:
            if store.count >= _MEMORIES:  # others have opened the last ones meanwhile
                return None
            store.count += 1
        try:
            memory = _open(endpoint, path, description.instance)
        except (OSError, SharedMemoryError) as error:
            with self._lock:
                store.count -= 1
            self.failed(endpoint, _explain(path, error))
            return None
        store.description, store.why_not = description, ""
        return memory

    def failed(self, endpoint: str, why: str, *, is_passing: bool = False) -> None:
        """Note why there is no shared memory with a store. If that may pass soon, the next read tries again."""
        store = self._stores[endpoint]
        store.description = None
        store.why_not = why
        store.retry_at = 0.0 if is_passing else time.monotonic() + _RETRY_SECONDS

    def give_back(self, memory: ReadMemory, *, clean: bool) -> None:
        """Take a memory back from a read. If the read did not end well, the store may still write into the memory."""
        with self._lock:
            store = self._stores[memory.endpoint]
            if clean and not self._closed and memory.is_held():
                store.idle.append(memory)
                return
            store.count -= 1
        memory.close()

    def why_not(self, endpoint: str) -> str:
        """Return why there is no shared memory with a store; empty if there is some."""
        return self._why_never or self._stores.setdefault(endpoint, _Store()).why_not

    def retry(self, endpoint: str) -> None:
        """Forget that there was no shared memory with a store."""
        with self._lock:
            self._stores.setdefault(endpoint, _Store()).retry_at = 0.0

    def close(self) -> None:
        """Take all memories back."""
        with self._lock:
            self._closed = True
            idle = [memory for store in self._stores.values() for memory in store.idle]
            for store in self._stores.values():
                store.idle.clear()
        for memory in idle:
            memory.close()


def _open(endpoint: str, path: str, instance: bytes) -> ReadMemory:
    descriptor = create_memory(MEMORY_BYTES)
    try:
        with contextlib.ExitStack() as stack:
            given = give_memory(path, instance, READ, descriptor)
            stack.callback(given.close)
            mapped = mmap.mmap(descriptor, MEMORY_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
            stack.pop_all()
        return ReadMemory(endpoint, given, mapped)
    finally:
        os.close(descriptor)


def _explain(path: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"its socket {path} is not here: the store is on another machine, or in a container without that folder"
    if isinstance(error, PermissionError):
        return f"its socket {path} is for another user"
    return f"its socket {path} cannot be used: {error}"
