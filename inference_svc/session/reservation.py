"""What a request needs before it runs: rows of the vector bank, and the signs of random projections."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from inference_svc.resources.projections import projection_of
from inference_svc.resources.vector_activator import VectorHold
from inference_svc.session.interruption import unless_interrupted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from inference_svc.requests.registry import Running
    from inference_svc.resources.projections import Projections
    from inference_svc.resources.vector_activator import VectorActivator


class Reservations:
    """Reserves the workers' resources for requests, in the order in which they come."""

    def __init__(self, activator: VectorActivator, projections: Projections) -> None:
        """Reserve from these resources."""
        self._activator = activator
        self._projections = projections

    @asynccontextmanager
    async def reserve(self, running: Running) -> AsyncIterator[VectorHold]:
        """Wait until all that a request needs is in the workers, and hold it for as long as the context lasts.

        Yields:
            The vectors that the request holds. A change of its steering may add more.

        Raises:
            Failure: The request was aborted meanwhile, there was no room for too long, or a vector is gone.
        """
        async with VectorHold(self._activator, running.tenant) as vectors, AsyncExitStack() as signs:
            if running.spec.digests:
                await unless_interrupted(running.aborted, running.aborted_failure, vectors.add(running.spec.digests))
            projection = projection_of(running.spec.capture)
            if projection is not None:
                held = signs.enter_async_context(self._projections.held(projection))
                await unless_interrupted(running.aborted, running.aborted_failure, held)
            yield vectors
