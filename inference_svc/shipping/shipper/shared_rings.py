"""Gives the rings of workers to stores on the same machine, so that payloads need not travel in messages."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt

from inference_svc.shipping.ring import SharedRing
from residuum.rpc.shared_memory import GivenMemory, give_memory, is_possible, is_switched_off
from residuum.v1 import store_pb2
from residuum.wire.limits import TARGET_CHUNK_BYTES, TARGET_PLACED_CHUNK_BYTES
from residuum.wire.rows.shared_memory import MIN_PLACED_BYTES, WRITE, SharedMemoryError
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

_DESCRIBE_SECONDS = 2.0
"""How long a stream waits for the store's description. Without it, payloads travel in messages."""

_PAUSE_SECONDS = 30.0
"""After a store did not have a memory that it was given, payloads travel in messages for this long."""

_METHOD = "/residuum.v1.StoreService/DescribeStore"

_log = get_logger(__name__)


class _Ring(NamedTuple):
    start: int
    """Its address in this process."""
    end: int
    descriptor: int


class Place(NamedTuple):
    """Where a payload is, for a store that has the ring."""

    key: bytes
    """Names the ring."""
    offset: int
    """Bytes from the ring's start."""


class Rings:
    """The rings that a shipper has attached, by number. Thread-safe."""

    def __init__(self) -> None:
        """Begin without any."""
        self.target_bytes = TARGET_PLACED_CHUNK_BYTES
        """The size of the pieces in which the last payload travelled: the next one will probably travel so too."""
        self._lock = threading.Lock()
        self._rings: dict[int, _Ring] = {}
        self._unmapped: deque[int] = deque()
        self._next = 0

    def add(self, ring: SharedRing, descriptor: int) -> None:
        """Add a ring until it is unmapped. The caller keeps the descriptor.

        Raises:
            OSError: Its memory cannot be opened again.
        """
        read_only = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)  # stores must not write to it
        start = _address(ring.memory)
        with self._lock:
            self._forget_unmapped()
            number, self._next = self._next, self._next + 1
            self._rings[number] = _Ring(start, start + ring.ring_bytes, read_only)
        weakref.finalize(ring.memory, self._remove, number)

    def find(self, payload: npt.NDArray[np.uint8]) -> tuple[int, int] | None:
        """Return the number of the ring that a payload is in, and its offset there; None if it is in none."""
        start = _address(payload)
        with self._lock:
            self._forget_unmapped()
            for number, ring in self._rings.items():
                if ring.start <= start and start + len(payload) <= ring.end:
                    return number, start - ring.start
        return None

    def has(self, number: int) -> bool:
        """Return whether a ring is still mapped. Any payload of it, such as one that may be sent again, keeps it so."""
        with self._lock:
            self._forget_unmapped()
            return number in self._rings

    @contextmanager
    def descriptor(self, number: int) -> Iterator[int]:
        """Lend a descriptor of a ring.

        Raises:
            OSError: The ring was unmapped.
        """
        with self._lock:
            self._forget_unmapped()
            ring = self._rings.get(number)
            if ring is None:
                raise OSError("the worker has ended")
            lent = os.dup(ring.descriptor)
        try:
            yield lent
        finally:
            os.close(lent)

    def _remove(self, number: int) -> None:
        # Python may call this in a thread that has the lock, so it must not wait. The next use then removes the ring.
        self._unmapped.append(number)
        if self._lock.acquire(blocking=False):
            try:
                self._forget_unmapped()
            finally:
                self._lock.release()

    def _forget_unmapped(self) -> None:
        """Close the descriptors of unmapped rings. Call this with the lock."""
        while self._unmapped:
            os.close(self._rings.pop(self._unmapped.popleft()).descriptor)


class SharedRings:
    """What one stream to a store needs to know: whether the store has the rings, and their keys."""

    def __init__(self, rings: Rings, description: store_pb2.DescribeStoreResponse | None, store: str) -> None:
        """Give no ring yet; `find` gives each one when its first payload is to be sent."""
        self._rings = rings
        self._description = description
        self._store = store
        self._given: dict[int, GivenMemory | None] = {}
        self._is_closed = False

    def target_bytes(self, payload: memoryview) -> int:
        """Return the size of the pieces in which a payload is to travel. This may wait as `find` does."""
        if self._description is not None and len(payload) < MIN_PLACED_BYTES:
            return TARGET_CHUNK_BYTES  # it always travels in a message, so it tells nothing about others
        if self._description is None or self.find(payload) is None:
            self._rings.target_bytes = TARGET_CHUNK_BYTES
        else:
            largest = max(TARGET_CHUNK_BYTES, self._description.max_placed_chunk_bytes)
            self._rings.target_bytes = min(largest, TARGET_PLACED_CHUNK_BYTES)
        return self._rings.target_bytes

    def find(self, payload: memoryview) -> Place | None:
        """Return where a payload is; None if it must travel in its message. This may wait for the store once a ring."""
        if self._description is None or len(payload) < MIN_PLACED_BYTES:
            return None
        found = self._rings.find(np.frombuffer(payload, dtype=np.uint8))
        if found is None:
            return None
        number, offset = found
        if number not in self._given:
            self._take_back_ended()
            self._given[number] = self._give(self._description, number)
            if self._is_closed:  # meanwhile
                self.close()
        given = self._given.get(number)
        return None if given is None else Place(given.key, offset)

    def close(self) -> None:
        """Take the rings back. Another thread may still call `find`."""
        self._is_closed = True
        for number in list(self._given):
            self._take_back(number)

    def _take_back_ended(self) -> None:
        """Take back the rings of workers that have ended. No payload is in them, so the store needs them no more."""
        for number in list(self._given):
            if not self._rings.has(number):
                self._take_back(number)

    def _take_back(self, number: int) -> None:
        given = self._given.pop(number, None)
        if given is not None:
            given.close()

    def _give(self, description: store_pb2.DescribeStoreResponse, number: int) -> GivenMemory | None:
        try:
            with self._rings.descriptor(number) as descriptor:
                given = give_memory(description.shared_memory_socket, description.instance, WRITE, descriptor)
        except (OSError, SharedMemoryError) as error:
            _log.info("no shared memory with the store; rows travel in messages", store=self._store, why=str(error))
            return None
        _log.info("rows pass through shared memory", store=self._store)
        return given


class StoreRings:
    """The rings and one store, for all its streams one after another."""

    def __init__(self, rings: Rings | None, store: str) -> None:
        """Prepare for a store, of this name; without rings, all payloads travel in messages."""
        self._rings = rings or Rings()
        self._is_wanted = rings is not None and is_possible() and not is_switched_off()
        self._store = store
        self._paused_until = 0.0

    def begin(self, channel: grpc.Channel) -> SharedRings:
        """Return what a new stream needs, after asking the store on its channel."""
        is_used = self._is_wanted and time.monotonic() >= self._paused_until
        return SharedRings(self._rings, _describe(channel) if is_used else None, self._store)

    def pause(self) -> None:
        """Let payloads travel in messages for a while: the store did not have a memory."""
        self._paused_until = time.monotonic() + _PAUSE_SECONDS


def _describe(channel: grpc.Channel) -> store_pb2.DescribeStoreResponse | None:
    """Return the store's description; None if it offers no shared memory or does not answer."""
    describe: grpc.UnaryUnaryMultiCallable[store_pb2.DescribeStoreRequest, store_pb2.DescribeStoreResponse]
    describe = channel.unary_unary(
        _METHOD,
        request_serializer=store_pb2.DescribeStoreRequest.SerializeToString,
        response_deserializer=store_pb2.DescribeStoreResponse.FromString,
    )
    try:
        answer = describe(store_pb2.DescribeStoreRequest(), timeout=_DESCRIBE_SECONDS)
    except grpc.RpcError:
        return None
    return answer if answer.shared_memory_socket else None


def _address(array: npt.NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])
