"""Which steering vectors are active: running requests hold rows of the workers' vector banks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

from inference_svc.resources.vector_cache import OPERATOR, vector_name
from residuum.rpc.errors import Failure, Reason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence

    from typing_extensions import Self

    from inference_svc.resources.vector_cache import VectorCache

    LoadRows: TypeAlias = Callable[[Sequence[tuple[int, bytes]]], Awaitable[None]]


class VectorActivator:
    """Allots rows of the workers' vector banks to the vectors that running requests use.

    A row belongs to one vector while any request uses the vector. Afterwards the vector stays in the row for later
    requests, until another vector needs the row.

    Requests get rows in order of arrival, so a request that needs many rows does not starve.
    One exception: a request whose vectors are all in use needs no room, and goes ahead.
    """

    def __init__(self, cache: VectorCache, rows: Sequence[int], load: LoadRows, wait_seconds: float) -> None:
        """Make an activator for empty banks.

        Args:
            cache: The values of the vectors.
            rows: The rows of the banks that it allots. No other activator may allot them.
            load: Writes pairs of a row and a vector's values into every rank's bank.
            wait_seconds: How long a request waits for rows before it fails.
        """
        self._cache = cache
        self._load = load
        self._wait_seconds = wait_seconds
        self._free = list(reversed(rows))
        self._total = len(rows)
        self._rows: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._users: dict[bytes, int] = {}
        self._turns: deque[object] = deque()
        self._waiting = 0
        """How many requests wait for rows, or for the lock."""
        self._changed = asyncio.Condition()

    @property
    def num_rows(self) -> int:
        """How many vectors can be in use at once."""
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
    async def active(self, names: Sequence[bytes], held: int = 0) -> AsyncIterator[dict[bytes, int]]:
        """Hold vectors in the banks while the context lasts. The context's value is the row of each vector.

        Args:
            names: The vectors, each once; see `vector_name`.
            held: How many other vectors the request already holds for the same time.

        Raises:
            Failure: A vector is no longer in the cache, or no room came free in time.
        """
        rows = self.take_loaded(names)
        if rows is None:
            rows = await self._acquire(names, held)
        try:
            yield rows
        finally:
            await self.release(names)

    def take_loaded(self, names: Sequence[bytes]) -> dict[bytes, int] | None:
        """Hold vectors without waiting, if all are in the banks, and either all are in use or no request waits.

        Returns:
            The row of each vector; `release` them later. None: nothing is held, use `active`.
        """
        if any(name not in self._rows for name in names):
            return None
        if self._waiting and any(name not in self._users for name in names):
            return None
        self._add_users(names)
        return self._used(names)

    async def release(self, names: Sequence[bytes]) -> None:
        """Stop holding vectors. If requests wait for rows, wait until they know."""
        self._drop_users(names)
        if names and self._turns:  # a request that waits for the lock looks for room itself
            await asyncio.shield(self._notify())

    async def _acquire(self, names: Sequence[bytes], held: int) -> dict[bytes, int]:
        if held + len(names) > self._total:
            raise self._full(
                f"The request uses {held + len(names)} vectors, but at most {self._total} can be active. Use fewer "
                "vectors, or ask the operator to raise --max-active-vectors.",
                needed=held + len(names),
                allowed=self._total,
            )
        self._waiting += 1
        try:
            # With the lock, one request loads at a time. `_users` has its vectors before they are loaded, and others
            # that wait for the lock must not count on them yet.
            async with self._changed, self._turn(names):
                return await self._activate(names)
        finally:
            self._waiting -= 1

    @asynccontextmanager
    async def _turn(self, names: Sequence[bytes]) -> AsyncIterator[None]:
        """Wait until there is room and no earlier request waits for it.

        Raises:
            Failure: No room came free in time.
        """
        turn = object()
        self._turns.append(turn)
        try:
            await self._wait_for_room(turn, names)
            yield
        finally:
            self._turns.remove(turn)
            self._changed.notify_all()

    async def _wait_for_room(self, turn: object, names: Sequence[bytes]) -> None:
        is_late = asyncio.Event()

        def may_go() -> bool:
            if all(name in self._users for name in names):
                return True
            return self._turns[0] is turn and self._room(names) >= self._new(names)

        async def expire() -> None:
            is_late.set()
            async with self._changed:
                self._changed.notify_all()

        # Not asyncio.wait_for: up to Python 3.11 it waits in a separate task. Cancelled twice, it does not wait for
        # that task to end, and this task would release the lock while the other one holds it.
        timer = asyncio.get_running_loop().call_later(self._wait_seconds, lambda: asyncio.ensure_future(expire()))
        try:
            await self._changed.wait_for(lambda: may_go() or is_late.is_set())
        finally:
            timer.cancel()
        if not may_go():
            raise self._full(
                f"For {self._wait_seconds:g} s, running requests have used too many of the {self._total} active "
                "vectors. Try again later, or ask the operator to raise --max-active-vectors."
            )

    async def _activate(self, names: Sequence[bytes]) -> dict[bytes, int]:
        self._cache.check_present(name for name in names if name not in self._rows)
        self._add_users(names)
        fresh = {name: self._take_row() for name in names if name not in self._rows}
        try:
            if fresh:
                await self._load([(row, self._cache.get(name)) for name, row in fresh.items()])
        except BaseException:
            self._free.extend(fresh.values())
            self._drop_users(names)
            raise
        self._rows.update(fresh)  # only now, because `take_loaded` does not wait for the lock
        return self._used(names)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _used(self, names: Sequence[bytes]) -> dict[bytes, int]:
        """Note that vectors are used now, and return their rows."""
        for name in names:
            self._rows.move_to_end(name)
        return {name: self._rows[name] for name in names}

    def _add_users(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._users[name] = self._users.get(name, 0) + 1

    def _drop_users(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]

    def _new(self, names: Sequence[bytes]) -> int:
        return sum(name not in self._rows for name in names)

    def _room(self, names: Sequence[bytes]) -> int:
        kept = self._users.keys() | set(names)
        return len(self._free) + sum(name not in kept for name in self._rows)

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        idle = next(name for name in self._rows if name not in self._users)
        return self._rows.pop(idle)

    def _full(self, message: str, **sizes: int) -> Failure:
        return Failure(Reason.ERROR_REASON_LIMIT_REACHED, message, limit="max_active_vectors", **sizes)


class VectorHold:
    """The vectors that one request holds in the banks until the context ends. More can be added while it lasts."""

    def __init__(self, activator: VectorActivator, tenant: str = "", operator_digests: Collection[bytes] = ()) -> None:
        """Hold no vectors yet. Those of `operator_digests` are the operator's, and all others the tenant's."""
        self._activator = activator
        self._operator_digests = operator_digests
        self._tenant = tenant
        self._stack = AsyncExitStack()
        self.rows: dict[bytes, int] = {}
        """The bank's row of each vector, by digest."""

    async def add(self, digests: Iterable[bytes]) -> None:
        """Hold more vectors.

        Raises:
            Failure: A vector is no longer in the cache, or no room came free in time.
        """
        new = self._new(digests)
        if not new:
            return
        rows = await self._stack.enter_async_context(self._activator.active(list(new), held=len(self.rows)))
        self.rows.update({new[name]: row for name, row in rows.items()})

    def add_loaded(self, digests: Iterable[bytes]) -> bool:
        """Hold more vectors without waiting, if that is possible; see `VectorActivator.take_loaded`."""
        new = self._new(digests)
        if not new:
            return True
        rows = self._activator.take_loaded(list(new))
        if rows is None:
            return False
        self._stack.push_async_callback(self._activator.release, list(new))
        self.rows.update({new[name]: row for name, row in rows.items()})
        return True

    def _new(self, digests: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return the digests that are not held yet, by the vectors' names."""
        return {self._name(digest): digest for digest in digests if digest not in self.rows}

    def _name(self, digest: bytes) -> bytes:
        return vector_name(OPERATOR if digest in self._operator_digests else self._tenant, digest)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._stack.aclose()
