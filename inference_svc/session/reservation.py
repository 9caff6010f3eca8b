"""Reserves what a request needs before it runs: rows of the vector bank, and the signs of random projections."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from inference_svc.resources.projections import projection_of
from inference_svc.resources.vector_activator import VectorHold
from inference_svc.session.interruption import unless_interrupted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from inference_svc.requests.registry import Running
    from inference_svc.resources.projections import Projections
    from inference_svc.resources.vector_activator import VectorActivator
    from inference_svc.taps.encodings.projections import Projection


class Reservations:
    """Reserves the workers' resources for requests, in order of arrival."""

    def __init__(self, activator: VectorActivator, projections: Projections) -> None:
        """Reserve rows of the bank through `activator`, and signs through `projections`."""
        self._activator = activator
        self._projections = projections

    def reserve(self, running: Running) -> AbstractAsyncContextManager[VectorHold]:
        """Wait until the workers have all that a request needs, and hold it for as long as the context lasts.

        Returns:
            A context of the vectors that the request holds. A steering change may add more.

        Raises:
            Failure: The request was aborted meanwhile, no room became free in time, or a vector is no longer on the
                server. Raised when the context is entered.
        """
        vectors = VectorHold(self._activator, running.tenant, running.spec.shared.operator_digests)
        digests, projection = running.spec.shared.digests, projection_of(running.spec.capture)
        return self._reserved(running, vectors, digests, projection) if digests or projection else vectors

    @asynccontextmanager
    async def _reserved(
        self, running: Running, vectors: VectorHold, digests: Sequence[bytes], projection: Projection | None
    ) -> AsyncIterator[VectorHold]:
        async with vectors, AsyncExitStack() as signs:
            # `unless_interrupted` starts tasks, which run only in later turns of the event loop. In a burst of
            # requests, turns are long.
            if digests and not vectors.add_loaded(digests):
                await unless_interrupted(running.aborted, running.aborted_failure, vectors.add(digests))
            if projection is not None:
                held = signs.enter_async_context(self._projections.held(projection))
                await unless_interrupted(running.aborted, running.aborted_failure, held)
            yield vectors
