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


_NAMED_DIGESTS = 64
"""Digests that an error names at most."""


def cache_capacity(max_vectors: int, max_mib: int, hidden_size: int) -> int:
    """Return how many vectors are kept, within a number and within an amount of memory in MiB; at least one."""
    return max(1, min(max_vectors, (max_mib << 20) // (4 * hidden_size)))


def vector_name(tenant: str, digest: bytes) -> bytes:
    """Return what a vector is called here: its digest, after the name of its tenant unless that is the default one.

    So nobody learns, by asking or by how long something takes, whether another tenant has a vector.
    """
    return b"%s/%s" % (tenant.encode(), digest) if tenant else digest


def digest_in(name: bytes) -> bytes:
    """Return the digest of a `vector_name`."""
    return name[-DIGEST_BYTES:]


class VectorCache:
    """Vectors on the host, under their names. Equal vectors from any number of a tenant's clients are one entry."""

    def __init__(
        self,
        capacity: int,
        hidden_size: int,
        is_leased: Callable[[bytes], bool],
        how_to_send: str = "send them with PutVectors and call again",
    ) -> None:
        """Make an empty cache.

        Args:
            capacity: Vectors that are kept.
            hidden_size: Elements of each.
            is_leased: Tells of a name whether its vector must not be dropped.
            how_to_send: What a client should do about missing vectors.
        """
        self._how_to_send = how_to_send
        self._capacity = capacity
        self._hidden_size = hidden_size
        self._is_leased = is_leased
        self._values: dict[bytes, bytes] = {}
        # The names, those that were not used for longest first: all of them, and by the tenant that they begin with.
        self._order: OrderedDict[bytes, None] = OrderedDict()
        self._orders: dict[bytes, OrderedDict[bytes, None]] = {}

    @property
    def num_vectors(self) -> int:
        """How many vectors are kept."""
        return len(self._values)

    def missing(self, names: Iterable[bytes]) -> list[bytes]:
        """Return those that are not here, each once, in their order. Those that are here count as used now."""
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            if name in self._values:
                self._touch(name)
        return [name for name in wanted if name not in self._values]

    def get(self, name: bytes) -> bytes:
        """Return a vector's values, float32 little-endian [hidden].

        Raises:
            KeyError: It is not here.
        """
        return self._values[name]

    def check_present(self, names: Iterable[bytes]) -> None:
        """Check that vectors are here; those that are count as used now.

        Raises:
            Failure: MISSING_VECTORS, with the digests of those that are not.
        """
        missing = self.missing(names)
        if missing:
            raise Failure(
                Reason.ERROR_REASON_MISSING_VECTORS,
                f"{len(missing)} of the request's vectors are not on the server; {self._how_to_send}.",
                digests=",".join(digest_in(name).hex() for name in missing[:_NAMED_DIGESTS]),
            )

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

    def put(self, vector: tensor_pb2.Vector, tenant: str = "", max_bytes: int | None = None) -> None:
        """Check a vector and keep it.

        Args:
            vector: The vector.
            tenant: Whose it is.
            max_bytes: What all vectors of the tenant may take; of more, the one that it did not use for longest goes.

        Raises:
            Failure: It is not what it says it is, does not fit the model, or there is no room.
        """
        self._check(vector)
        name = vector_name(tenant, vector.digest)
        self._values.setdefault(name, vector.values)
        self._touch(name)
        allowed = None if max_bytes is None else max_bytes // (4 * self._hidden_size)
        own = self._orders[_owner(name)]
        if allowed is not None and len(own) > allowed:
            self._evict(name, own, _quota(max_bytes or 0))
        if len(self._values) > self._capacity:
            self._evict(name, self._order, self._no_room())

    def check_direction(self, name: bytes) -> None:
        """Make sure that a vector that is here has a direction which float32 can tell.

        Raises:
            Failure: It is zero, or so short or so long that squares vanish or overflow.
        """
        norm = float(np.linalg.norm(np.frombuffer(self._values[name], dtype="<f4").astype(np.float64)))
        if not MIN_DIRECTION_NORM <= norm <= MAX_DIRECTION_NORM:
            digest = digest_in(name).hex()
            raise Failure(
                Reason.ERROR_REASON_BAD_VALUES,
                f"The vector {digest} has the norm {norm:g}, and so no direction to ablate, cap or replace; its "
                f"norm must be from {MIN_DIRECTION_NORM:g} to {MAX_DIRECTION_NORM:g}.",
                digest=digest,
            )

    def _touch(self, name: bytes) -> None:
        """Note that a vector is used now."""
        for order in (self._order, self._orders.setdefault(_owner(name), OrderedDict())):
            order[name] = None
            order.move_to_end(name)

    def _evict(self, new: bytes, order: OrderedDict[bytes, None], failure: Failure) -> None:
        """Drop the vector of an order that was not used for longest.

        Those that requests need are used now, so they go to its end: the next one who needs room does not come by them
        again.

        Raises:
            Failure: Requests need all of them; then it is the new one that goes.
        """
        for _ in range(len(order)):
            name = next(iter(order))
            if name != new and not self._is_leased(name):
                self._drop(name)
                return
            order.move_to_end(name)
        self._drop(new)
        raise failure

    def _drop(self, name: bytes) -> None:
        del self._values[name], self._order[name]
        own = self._orders[_owner(name)]
        del own[name]
        if not own:
            del self._orders[_owner(name)]

    def _no_room(self) -> Failure:
        return Failure(
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
    async def active(self, names: Sequence[bytes], held: int = 0) -> AsyncIterator[dict[bytes, int]]:
        """Hold vectors in the banks, and give their rows, for as long as the context lasts.

        Args:
            names: The vectors, each once; see `vector_name`.
            held: How many others the request holds already, for as long as these.

        Raises:
            Failure: A vector is not here any more, or there was no room for too long.
        """
        if not names:
            yield {}
            return
        rows = await self._acquire(names, held)
        try:
            yield rows
        finally:
            await asyncio.shield(self._release(names))

    async def _acquire(self, names: Sequence[bytes], held: int) -> dict[bytes, int]:
        if held + len(names) > self._total:
            raise self._full(f"The request uses {held + len(names)} vectors; at most {self._total} can be active.")
        async with self._changed, self._turn(names):
            # The lock is held while the banks are written, so nobody uses a row that is only half there.
            return await self._activate(names)

    @asynccontextmanager
    async def _turn(self, names: Sequence[bytes]) -> AsyncIterator[None]:
        """Wait until there is room, and nobody who came before waits for it.

        Raises:
            Failure: There was no room for too long.
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

    async def _activate(self, names: Sequence[bytes]) -> dict[bytes, int]:
        self._cache.check_present(name for name in names if name not in self._rows)
        for name in names:
            self._users[name] = self._users.get(name, 0) + 1
        fresh = {name: self._take_row() for name in names if name not in self._rows}
        try:
            if fresh:
                await self._load([(row, self._cache.get(name)) for name, row in fresh.items()])
        except BaseException:
            self._free.extend(fresh.values())
            self._drop_users(names)
            raise
        self._rows.update(fresh)
        for name in names:
            self._rows.move_to_end(name)
        return {name: self._rows[name] for name in names}

    async def _release(self, names: Sequence[bytes]) -> None:
        async with self._changed:
            self._drop_users(names)
            self._changed.notify_all()

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

    def _full(self, message: str) -> Failure:
        return Failure(Reason.ERROR_REASON_LIMIT_REACHED, message, limit="max_active_vectors")


class VectorHold:
    """The vectors that one request holds in the banks, until the context ends. More may be added meanwhile."""

    def __init__(self, activator: VectorActivator, tenant: str = "") -> None:
        """Hold nothing yet."""
        self._activator = activator
        self._tenant = tenant
        self._stack = AsyncExitStack()
        self.rows: dict[bytes, int] = {}
        """The bank's row of each vector, by digest."""

    async def add(self, digests: Iterable[bytes]) -> None:
        """Hold more vectors.

        Raises:
            Failure: A vector is not here any more, or there was no room for too long.
        """
        new = {vector_name(self._tenant, digest): digest for digest in digests if digest not in self.rows}
        rows = await self._stack.enter_async_context(self._activator.active(list(new), held=len(self.rows)))
        self.rows.update({new[name]: row for name, row in rows.items()})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._stack.aclose()


def _owner(name: bytes) -> bytes:
    return name[:-DIGEST_BYTES]


def _quota(max_bytes: int) -> Failure:
    return Failure(
        Reason.ERROR_REASON_QUOTA_EXCEEDED,
        f"The vectors of your tenant may take {max_bytes} bytes, and its requests need all that are there; try again "
        "when some have ended, or use fewer.",
        limit="max_vector_bytes",
        allowed=max_bytes,
    )
