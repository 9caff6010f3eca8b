"""The signs of random projections: workers make them before a request that needs them goes to the engine.

Making signs takes much longer than a step, and callers choose the seeds, so no step may do it. A request waits here
until a thread of each worker has made its signs. The workers keep them until the request has ended, and then while
there is room. The memory of signs in use is limited; requests beyond the limit wait, first come, first served.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from inference_svc.taps.encodings.projections import KEPT_BYTES, Projection, is_computed
from residuum.rpc.errors import Failure, Reason
from residuum.wire.rows.encodings import RANDOM_PROJECTIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from residuum.v1 import capture_pb2

LEAST_BYTES = 1 << 20
"""The smallest size that the signs of one projection count as. It limits their number: each call to the workers lists
all kept projections, and the workers handle it between two steps."""

_POLL_SECONDS = 0.01
"""How often the service asks the workers whether signs are ready. They answer between two steps."""


def projection_of(spec: capture_pb2.CaptureSpec | None) -> Projection | None:
    """Return the random projection of a checked capture, or None if it uses none."""
    if spec is None or spec.encoding not in RANDOM_PROJECTIONS:
        return None
    options = spec.encoding_options
    return Projection(options.seed, options.dimensions, is_computed(spec.reduction))


class Projections:
    """Decides which signs the workers keep, and which requests wait for them. Used on one event loop, without locks."""

    def __init__(
        self,
        keep: Callable[[Sequence[Projection]], Awaitable[Sequence[bool | str]]],
        width: int,
        wait_seconds: float,
        max_bytes: int = KEPT_BYTES,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        """Start without any signs.

        Args:
            keep: Makes every worker compute the signs of these projections in the background and keep no others.
                Returns for each projection whether its signs are ready, or why they cannot be made.
            width: Elements of a row.
            wait_seconds: How long a request waits for its turn before it fails.
            max_bytes: Limit for all signs together. A single projection is admitted even if it is larger.
            least_bytes: See `LEAST_BYTES`.
        """
        self._keep = keep
        self._width = width
        self._wait_seconds = wait_seconds
        self._max_bytes = max_bytes
        self._least_bytes = least_bytes
        self._kept: OrderedDict[Projection, asyncio.Task[None]] = OrderedDict()  # least recently used first
        self._users: Counter[Projection] = Counter()
        self._causes: dict[Projection, str] = {}  # why signs cannot be made, for the tasks that wait for them
        self._turns: deque[tuple[Projection, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def held(self, projection: Projection) -> AsyncIterator[None]:
        """Keep the signs of a projection ready in every worker while the context lasts.

        Raises:
            Failure: No room came free in time, a worker cannot make the signs, or the engine is dead.
        """
        await self._enter(projection)
        try:
            await asyncio.shield(self._kept[projection])
            yield
        finally:
            self._leave(projection)

    async def _enter(self, projection: Projection) -> None:
        """Wait for room, behind requests that wait already. Signs that are kept need no room, so no wait either."""
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
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # admitted just before the cancel
                self._leave(projection)
            raise
        finally:
            timer.cancel()
            self._serve()  # requests behind one that gave up may be admitted now

    def _leave(self, projection: Projection) -> None:
        self._users[projection] -= 1
        if not self._users[projection]:
            del self._users[projection]
            task = self._kept[projection]
            if task.done() and (task.cancelled() or task.exception() is not None):
                del self._kept[projection]  # so that the next request tries again
        self._serve()

    def _serve(self) -> None:
        """Admit waiting requests in their order, as far as there is room."""
        while self._turns:
            projection, turn = self._turns[0]
            if not turn.done():
                if not self._admit(projection):
                    return
                turn.set_result(None)
            self._turns.popleft()

    def _admit(self, projection: Projection) -> bool:
        """Add a user of a projection if there is room, and return whether there is. Start to make missing signs."""
        if projection not in self._kept:
            if not self._make_room(self._size(projection)):
                return False
            task = self._kept[projection] = asyncio.create_task(self._made(projection))
            # Retrieves the exception even if no request awaits the task any more: asyncio would log it otherwise.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._kept.move_to_end(projection)
        self._users[projection] += 1
        return True

    def _make_room(self, size: int) -> bool:
        """Drop idle signs, least recently used first, until `size` more bytes fit. Return False if they cannot fit."""
        used = sum(self._size(item) for item in self._users)
        if used and used + size > self._max_bytes:
            return False
        total = sum(map(self._size, self._kept))
        for item in [item for item in self._kept if item not in self._users]:
            if total + size <= self._max_bytes:
                break
            self._kept.pop(item).cancel()
            self._causes.pop(item, None)
            total -= self._size(item)
        return True

    async def _made(self, projection: Projection) -> None:
        """Wait until every worker has the signs.

        Raises:
            Failure: A worker cannot make them.
        """
        self._causes.pop(projection, None)
        while projection not in self._causes:
            kept = list(self._kept)
            states = dict(zip(kept, await self._keep(kept), strict=True))
            # Workers say only once that they cannot make signs, perhaps to the task of another projection.
            for item, state in states.items():
                if isinstance(state, str) and item in self._kept:
                    self._causes[item] = state
            if states.get(projection) is True:
                return
            if projection not in self._causes:
                await asyncio.sleep(_POLL_SECONDS)
        raise _not_made(projection, self._causes.pop(projection))

    def _size(self, projection: Projection) -> int:
        return max(4 * self._width * projection.dimensions, self._least_bytes)

    def _full(self) -> Failure:
        return Failure(
            Reason.ERROR_REASON_LIMIT_REACHED,
            f"For {self._wait_seconds:g} s, running requests have used other random projections, whose signs take all "
            f"of the {self._max_bytes >> 20} MiB for signs. Use the same seed and dimensions, or try again later.",
            limit="projections",
        )


def _not_made(projection: Projection, cause: str) -> Failure:
    return Failure(
        Reason.ERROR_REASON_INTERNAL,
        f"The signs of the random projection (seed {projection.seed}, {projection.dimensions} dimensions) could not be "
        f"made ({cause}); the service's log says why. Use fewer dimensions, or the seed and dimensions of another "
        "running request. If device memory is short, ask the operator for a smaller KV cache.",
    )
