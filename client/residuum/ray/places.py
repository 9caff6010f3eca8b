"""Where the inference services of a job are: on given endpoints, or in actors, which may move."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError

from residuum._async.client import AsyncClient
from residuum.exceptions import InvalidRequest, Unavailable, Unreachable
from residuum.extraction.running.services import Services
from residuum.ray.services import RayServices
from residuum.transport.connections import LONGEST_OUTAGE_SECONDS

_CALL_SECONDS = 30.0
_PAUSE_SECONDS = 1.0
_ASK_SECONDS = 10.0
"""How long an actor may take to tell the address of its service."""


@dataclass(frozen=True)
class Places:
    """The services of a job, as they are sent to all actors that use them."""

    endpoints: tuple[str, ...]
    """Where they were at first."""
    settings: Mapping[str, Any] = field(repr=False)  # it has the token
    """The further arguments of their clients."""
    actors: Sequence[Any] = field(default=(), repr=False)
    """The actors that run them, in the order of the endpoints; none if others run them."""

    async def services(self, max_concurrency: int | None, timeout: float | None) -> Services:
        """Return the services where they are now."""
        clients = [self._client(endpoint) for endpoint in self.endpoints]
        if not self.actors:
            return Services(clients, max_concurrency, timeout)
        services = Services(clients, max_concurrency, timeout, self._find_again)
        until = time.monotonic() + (LONGEST_OUTAGE_SECONDS if timeout is None else timeout)
        while time.monotonic() < until:
            found = await asyncio.gather(*map(services.follow, services.all), return_exceptions=True)
            if not all(isinstance(outcome, Unavailable) for outcome in found):
                break
            await asyncio.sleep(_PAUSE_SECONDS)  # all of them are starting again
        return services

    def _client(self, endpoint: str) -> AsyncClient:
        return AsyncClient(endpoint, **self.settings)

    async def _find_again(self, number: int, client: AsyncClient) -> AsyncClient:
        try:
            address = await asyncio.wait_for(self.actors[number].address.remote(), _ASK_SECONDS)
        except (RayActorError, asyncio.TimeoutError) as error:
            message = f"The actor of the service that was at {client.endpoint} does not answer: {error}"
            raise Unreachable(message, endpoint=client.endpoint) from None
        if not address:
            message = f"The service that was at {client.endpoint} is starting again."
            raise Unreachable(message, endpoint=client.endpoint)
        return client if address == client.endpoint else self._client(address)


def places_of(
    endpoints: str | Iterable[str] | RayServices, settings: Mapping[str, Any], timeout: float | None
) -> Places:
    """Return where the services of a job are.

    Raises:
        InvalidRequest: There is none, or the services of actors are to have other credentials or stores.
    """
    further = {"timeout": timeout or _CALL_SECONDS}
    if isinstance(endpoints, RayServices):
        given = [name for name in ("store", "token", "tls", "insecure") if settings[name] is not None]
        if given:
            raise InvalidRequest(
                f"{given[0]}= cannot be given for services of `serve`, which has chosen it. Leave it out here.",
                reason="INVALID_FIELD",
            )
        own = {**endpoints.settings, "tenant": settings["tenant"], **further}
        return Places(endpoints.first_endpoints, own, endpoints.actors)
    names = [endpoints] if isinstance(endpoints, str) else list(dict.fromkeys(endpoints))
    if not names:
        raise InvalidRequest("endpoints= has no service. Give at least one host:port.", reason="INVALID_FIELD")
    return Places(tuple(names), {**settings, **further})
