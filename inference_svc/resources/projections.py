"""The signs of random projections that running requests need: made in the workers before a request goes to the engine.

To make them takes long beside a step, and callers choose the seeds. So it is not done in a step: a request waits, here,
until a thread of each worker has made what it needs; it is kept until the request has ended, and afterwards while there
is room. How much requests may need at once is bounded; beyond it they take their turns.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from inference_svc.taps.encodings.signs import KEPT_BYTES
from inference_svc.taps.plan import is_computed
from residuum.rpc.errors import Failure, Reason
from residuum.wire.encodings import RANDOM_PROJECTIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from residuum.v1 import capture_pb2

LEAST_BYTES = 1 << 20
"""What signs count as at least. Each time that some are made, the workers are told of all that are kept, between two
steps: so there must not be very many, however small."""

_POLL_SECONDS = 0.01
"""How often the workers are asked whether signs are there. They answer between two steps."""


class Projection(NamedTuple):
    """A random projection, as far as its signs depend on it."""

    seed: int
    dimensions: int
    computed: bool
    """Whether the rows that it projects are computed from others, in float32."""


def projection_of(spec: capture_pb2.CaptureSpec | None) -> Projection | None:
    """Return the random projection of a checked capture; None if it has none."""
    if spec is None or spec.encoding not in RANDOM_PROJECTIONS:
        return None
    options = spec.encoding_options
    return Projection(options.seed, options.dimensions, is_computed(spec.reduction))


class Projections:
    """Which signs the workers keep, and for whom. One event loop uses it, so it needs no lock."""

    def __init__(
        self,
        keep: Callable[[Sequence[Projection]], Awaitable[Sequence[bool | str]]],
        width: int,
        wait_seconds: float,
        max_bytes: int = KEPT_BYTES,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        """Keep nothing yet.

        Args:
            keep: Has every worker make the signs of these projections beside its steps, keep them and no others, and
                returns of each whether they are there, or why they cannot be made.
            width: Elements of a row.
            wait_seconds: How long a request waits for its turn before it fails.
            max_bytes: What all signs take at most; one matrix always is kept, whatever it takes.
            least_bytes: What those of one projection count as at least.
        """
        self._keep = keep
        self._width = width
        self._wait_seconds = wait_seconds
        self._max_bytes = max_bytes
        self._least_bytes = least_bytes
        self._kept: OrderedDict[Projection, asyncio.Task[None]] = OrderedDict()  # least recently used first
        self._users: Counter[Projection] = Counter()
        self._turns: deque[tuple[Projection, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def held(self, projection: Projection) -> AsyncIterator[None]:
        """Have the signs of a projection in every worker for as long as the context lasts.

        Raises:
            Failure: There was no room for too long, they cannot be made, or the engine is dead.
        """
        await self._enter(projection)
        try:
            await asyncio.shield(self._kept[projection])
            yield
        finally:
            self._leave(projection)

    async def _enter(self, projection: Projection) -> None:
        """Wait for room, behind those who wait already; who takes none goes ahead."""
        if (projection in self._kept or not self._turns) and self._admit(projection):
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._turns.append((projection, turn))

        def give_up() -> None:
            if not turn.done():
                turn.set_exception(self._full())

        timer = loop.call_later(self._wait_seconds, give_up)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # admitted in the same moment
                self._leave(projection)
            raise
        finally:
            timer.cancel()
            self._serve()  # whoever waits behind one that gave up

    def _leave(self, projection: Projection) -> None:
        self._users[projection] -= 1
        if not self._users[projection]:
            del self._users[projection]
            task = self._kept[projection]
            if task.done() and (task.cancelled() or task.exception() is not None):
                del self._kept[projection]  # for the next one to try again
        self._serve()

    def _serve(self) -> None:
        """Give those who wait their turns, in their order."""
        while self._turns:
            projection, turn = self._turns[0]
            if not turn.done():
                if not self._admit(projection):
                    return
                turn.set_result(None)
            self._turns.popleft()

    def _admit(self, projection: Projection) -> bool:
        """Count a user, if there is room; what is not there begins to be made."""
        if projection not in self._kept:
            if not self._make_room(self._size(projection)):
                return False
            task = self._kept[projection] = asyncio.create_task(self._made(projection))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # if nobody waits any more
        self._kept.move_to_end(projection)
        self._users[projection] += 1
        return True

    def _make_room(self, size: int) -> bool:
        """Let idle signs go, those that were not used for longest first, as far as it takes."""
        used = sum(self._size(item) for item in self._users)
        if used and used + size > self._max_bytes:
            return False
        total = sum(map(self._size, self._kept))
        for item in [item for item in self._kept if item not in self._users]:
            if total + size <= self._max_bytes:
                break
            self._kept.pop(item).cancel()
            total -= self._size(item)
        return True

    async def _made(self, projection: Projection) -> None:
        """Wait until every worker has the signs.

        Raises:
            Failure: One cannot make them.
        """
        while True:
            kept = list(self._kept)
            states = dict(zip(kept, await self._keep(kept), strict=True))
            state = states.get(projection, False)
            if isinstance(state, str):
                raise _not_made(projection, state)
            if state:
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _size(self, projection: Projection) -> int:
        return max(4 * self._width * projection.dimensions, self._least_bytes)

    def _full(self) -> Failure:
        return Failure(
            Reason.ERROR_REASON_LIMIT_REACHED,
            f"Running requests use other random projections, whose signs take the {self._max_bytes >> 20} MiB that "
            f"there are, for {self._wait_seconds:g} s already; use the same seed and dimensions, or try again later.",
            limit="projections",
        )


def _not_made(projection: Projection, cause: str) -> Failure:
    return Failure(
        Reason.ERROR_REASON_INTERNAL,
        f"The signs of the random projection (seed {projection.seed}, {projection.dimensions} dimensions) could not be "
        f"made ({cause}); the service's log says why. Ask for fewer dimensions, or for a seed and dimensions that "
        "others have. If memory is short, the operator leaves the device more of it: a smaller KV cache.",
    )
