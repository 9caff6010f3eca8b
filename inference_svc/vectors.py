"""Steering vectors by content: kept on the host under their digests, and active in the workers' banks by row."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import tensor_pb2
from residuum.wire.digests import digest_of_bytes
from residuum.wire.dtypes import dtype_name
from residuum.wire.limits import DIGEST_BYTES, MAX_DIRECTION_NORM, MIN_DIRECTION_NORM

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from typing_extensions import Self

    LoadRows: TypeAlias = Callable[[Sequence[tuple[int, bytes]]], Awaitable[None]]


def cache_capacity(max_vectors: int, max_mib: int, hidden_size: int) -> int:
    """Return how many vectors are kept, within a number and within an amount of memory in MiB; at least one."""
    return max(1, min(max_vectors, (max_mib << 20) // (4 * hidden_size)))


class VectorCache:
    """Vectors on the host, under their digests. Equal vectors from any number of clients are one entry."""

    def __init__(self, capacity: int, hidden_size: int, is_leased: Callable[[bytes], bool]) -> None:
        """Make an empty cache.

        Args:
            capacity: Vectors that are kept.
            hidden_size: Elements of each.
            is_leased: Tells of a digest whether its vector must not be dropped.
        """
        self._capacity = capacity
        self._hidden_size = hidden_size
        self._is_leased = is_leased
        self._values: OrderedDict[bytes, bytes] = OrderedDict()

    @property
    def num_vectors(self) -> int:
        """How many vectors are kept."""
        return len(self._values)

    def missing(self, digests: Iterable[bytes]) -> list[bytes]:
        """Return those that are not here, each once, in their order. Those that are here count as used now."""
        wanted = list(dict.fromkeys(digests))
        for digest in wanted:
            if digest in self._values:
                self._values.move_to_end(digest)
        return [digest for digest in wanted if digest not in self._values]

    def get(self, digest: bytes) -> bytes:
        """Return a vector's values, float32 little-endian [hidden].

        Raises:
            KeyError: It is not here.
        """
        return self._values[digest]

    def check_number(self, count: int) -> None:
        """Make sure that so many vectors can be here at once: else sending them again and again would never do.

        Raises:
            Failure: They cannot.
        """
        if count > self._capacity:
            raise Failure(
                Reason.ERROR_REASON_LIMIT_REACHED,
                f"The request uses {count} vectors; at most {self._capacity} are kept.",
                limit="max_vectors",
            )

    def put(self, vector: tensor_pb2.Vector) -> None:
        """Check a vector and keep it.

        Raises:
            Failure: It is not what it says it is, does not fit the model, or there is no room.
        """
        self._check(vector)
        self._values[vector.digest] = vector.values
        self._values.move_to_end(vector.digest)
        if len(self._values) > self._capacity:
            self._evict(keep=vector.digest)

    def check_direction(self, digest: bytes) -> None:
        """Make sure that a vector that is here has a direction which float32 can tell.

        Raises:
            Failure: It is zero, or so short or so long that squares vanish or overflow.
        """
        norm = float(np.linalg.norm(np.frombuffer(self._values[digest], dtype="<f4").astype(np.float64)))
        if not MIN_DIRECTION_NORM <= norm <= MAX_DIRECTION_NORM:
            raise Failure(
                Reason.ERROR_REASON_BAD_VALUES,
                f"The vector {digest.hex()} has the norm {norm:g}, and so no direction to ablate, cap or replace; its "
                f"norm must be from {MIN_DIRECTION_NORM:g} to {MAX_DIRECTION_NORM:g}.",
                digest=digest.hex(),
            )

    def _evict(self, keep: bytes) -> None:
        for digest in self._values:
            if digest != keep and not self._is_leased(digest):
                del self._values[digest]
                return
        del self._values[keep]
        raise Failure(
            Reason.ERROR_REASON_LIMIT_REACHED,
            f"{self._capacity} vectors are kept, and requests need all of them; try again later.",
            limit="max_vectors",
        )

    def _check(self, vector: tensor_pb2.Vector) -> None:
        if len(vector.digest) != DIGEST_BYTES:
            raise Failure(
                Reason.ERROR_REASON_DIGEST_MISMATCH,
                f"A digest has {DIGEST_BYTES} bytes, not {len(vector.digest)}; see tensor.proto for the rule.",
                digest=vector.digest[:DIGEST_BYTES].hex(),
            )
        name = vector.digest.hex()
        if vector.dtype != tensor_pb2.DATA_TYPE_FLOAT32:
            raise Failure(
                Reason.ERROR_REASON_WRONG_DTYPE,
                f"Send vectors as float32, not {dtype_name(vector.dtype)}.",
                dtype=dtype_name(vector.dtype),
            )
        length, rest = divmod(len(vector.values), 4)
        if length != self._hidden_size or rest:
            raise Failure(
                Reason.ERROR_REASON_WRONG_LENGTH,
                f"The vector has {len(vector.values) / 4:g} elements; the model's hidden size is {self._hidden_size}.",
                length=length,
                hidden_size=self._hidden_size,
            )
        if digest_of_bytes(vector.dtype, vector.values) != vector.digest:
            raise Failure(
                Reason.ERROR_REASON_DIGEST_MISMATCH,
                f"The values do not have the digest {name}; see tensor.proto for the rule.",
                digest=name,
            )
        if not np.isfinite(np.frombuffer(vector.values, dtype="<f4")).all():
            raise Failure(Reason.ERROR_REASON_BAD_VALUES, f"The vector {name} holds NaN or infinity.", digest=name)


class VectorActivator:
    """Allots rows of the workers' banks to the vectors that running requests use.

    A row belongs to one vector as long as any request uses it. Afterwards the vector stays there, and is there for the
    next request, until the row is needed for another. Requests take their turns: the first that came is served first,
    so one that needs many rows is not passed by for ever. Only who takes no room goes ahead: one whose vectors are all
    in use.
    """

    def __init__(self, cache: VectorCache, rows: int, load: LoadRows, wait_seconds: float) -> None:
        """Make an activator for empty banks.

        Args:
            cache: Where the values are.
            rows: Rows of each bank.
            load: Writes vectors into rows of every rank's bank.
            wait_seconds: How long a request waits for rows before it fails.
        """
        self._cache = cache
        self._load = load
        self._wait_seconds = wait_seconds
        self._free = list(range(rows - 1, -1, -1))
        self._total = rows
        self._rows: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._users: dict[bytes, int] = {}
        self._turns: deque[object] = deque()
        self._changed = asyncio.Condition()

    @property
    def num_rows(self) -> int:
        """How many vectors may be in use at once."""
        return self._total

    @property
    def num_active(self) -> int:
        """How many vectors are in use."""
        return len(self._users)

    @property
    def num_waiting(self) -> int:
        """How many requests wait for their turn."""
        return len(self._turns)

    @asynccontextmanager
    async def active(self, digests: Sequence[bytes], held: int = 0) -> AsyncIterator[dict[bytes, int]]:
        """Hold vectors in the banks, and give their rows, for as long as the context lasts.

        Args:
            digests: The vectors, each once.
            held: How many others the request holds already, for as long as these.

        Raises:
            Failure: A vector is not here any more, or there was no room for too long.
        """
        if not digests:
            yield {}
            return
        rows = await self._acquire(digests, held)
        try:
            yield rows
        finally:
            await asyncio.shield(self._release(digests))

    async def _acquire(self, digests: Sequence[bytes], held: int) -> dict[bytes, int]:
        if held + len(digests) > self._total:
            raise self._full(f"The request uses {held + len(digests)} vectors; at most {self._total} can be active.")
        async with self._changed, self._turn(digests):
            # The lock is held while the banks are written, so nobody uses a row that is only half there.
            return await self._activate(digests)

    @asynccontextmanager
    async def _turn(self, digests: Sequence[bytes]) -> AsyncIterator[None]:
        """Wait until there is room, and nobody who came before waits for it.

        Raises:
            Failure: There was no room for too long.
        """
        turn = object()
        self._turns.append(turn)
        try:
            await self._wait_for_room(turn, digests)
            yield
        finally:
            self._turns.remove(turn)
            self._changed.notify_all()

    async def _wait_for_room(self, turn: object, digests: Sequence[bytes]) -> None:
        is_late = asyncio.Event()

        def may_go() -> bool:
            if all(digest in self._users for digest in digests):
                return True
            return self._turns[0] is turn and self._room(digests) >= self._new(digests)

        async def tell() -> None:
            is_late.set()
            async with self._changed:
                self._changed.notify_all()

        # Not asyncio.wait_for: up to Python 3.11 it waits in a task of its own. Cancelled twice, it does not wait for
        # that task's end, and the lock would be given back by who does not have it.
        timer = asyncio.get_running_loop().call_later(self._wait_seconds, lambda: asyncio.ensure_future(tell()))
        try:
            await self._changed.wait_for(lambda: may_go() or is_late.is_set())
        finally:
            timer.cancel()
        if not may_go():
            raise self._full(f"No room among {self._total} active vectors for {self._wait_seconds:g} s.")

    async def _activate(self, digests: Sequence[bytes]) -> dict[bytes, int]:
        missing = self._cache.missing(digest for digest in digests if digest not in self._rows)
        if missing:
            raise missing_vectors(missing)
        for digest in digests:
            self._users[digest] = self._users.get(digest, 0) + 1
        fresh = {digest: self._take_row() for digest in digests if digest not in self._rows}
        try:
            if fresh:
                await self._load([(row, self._cache.get(digest)) for digest, row in fresh.items()])
        except BaseException:
            self._free.extend(fresh.values())
            self._drop_users(digests)
            raise
        self._rows.update(fresh)
        for digest in digests:
            self._rows.move_to_end(digest)
        return {digest: self._rows[digest] for digest in digests}

    async def _release(self, digests: Sequence[bytes]) -> None:
        async with self._changed:
            self._drop_users(digests)
            self._changed.notify_all()

    def _drop_users(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]

    def _new(self, digests: Sequence[bytes]) -> int:
        return sum(digest not in self._rows for digest in digests)

    def _room(self, digests: Sequence[bytes]) -> int:
        kept = self._users.keys() | set(digests)
        return len(self._free) + sum(digest not in kept for digest in self._rows)

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        idle = next(digest for digest in self._rows if digest not in self._users)
        return self._rows.pop(idle)

    def _full(self, message: str) -> Failure:
        return Failure(Reason.ERROR_REASON_LIMIT_REACHED, message, limit="max_active_vectors")


class VectorHold:
    """The vectors that one request holds in the banks, until the context ends. More may be added meanwhile."""

    def __init__(self, activator: VectorActivator) -> None:
        """Hold nothing yet."""
        self._activator = activator
        self._stack = AsyncExitStack()
        self.rows: dict[bytes, int] = {}
        """The bank's row of each vector, by digest."""

    async def add(self, digests: Iterable[bytes]) -> None:
        """Hold more vectors.

        Raises:
            Failure: A vector is not here any more, or there was no room for too long.
        """
        new = [digest for digest in digests if digest not in self.rows]
        self.rows.update(await self._stack.enter_async_context(self._activator.active(new, held=len(self.rows))))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._stack.aclose()


def missing_vectors(digests: Sequence[bytes]) -> Failure:
    """Return the failure that asks a client to send vectors."""
    named = ",".join(digest.hex() for digest in digests[:64])
    return Failure(
        Reason.ERROR_REASON_MISSING_VECTORS,
        f"{len(digests)} of the request's vectors are not on the server; send them with PutVectors and call again.",
        digests=named,
    )
