"""Reserves what a request needs before it runs: rows of the vector bank, and the signs of random projections."""

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
    """Reserves the workers' resources for requests, in order of arrival."""

    def __init__(self, activator: VectorActivator, projections: Projections) -> None:
        """Reserve rows of the bank through `activator`, and signs through `projections`."""
        self._activator = activator
        self._projections = projections

    @asynccontextmanager
    async def reserve(self, running: Running) -> AsyncIterator[VectorHold]:
        """Wait until the workers have all that a request needs, and hold it for as long as the context lasts.

        Yields:
            The vectors that the request holds. A steering change may add more.

        Raises:
            Failure: The request was aborted meanwhile, no room became free in time, or a vector is no longer on the
                server.
        """
        async with VectorHold(self._activator, running.tenant) as vectors, AsyncExitStack() as signs:
            if running.spec.digests:
                await unless_interrupted(running.aborted, running.aborted_failure, vectors.add(running.spec.digests))
            projection = projection_of(running.spec.capture)
            if projection is not None:
                held = signs.enter_async_context(self._projections.held(projection))
                await unless_interrupted(running.aborted, running.aborted_failure, held)
            yield vectors
