"""The inference services of a job: which one takes the next prompt, and which ones are away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from residuum._async.client import AsyncClient
from residuum.exceptions import EngineDead, InvalidRequest, OutageWarning, ResiduumError, Unavailable
from residuum.extraction.running.service import LONGEST_PAUSE_SECONDS, Service, pause
from residuum.protocol.caller import warn_caller
from residuum.transport.connections import LONGEST_OUTAGE_SECONDS, is_away
from residuum.values.captures.capture import Capture
from residuum.values.model.info import ModelInfo

_TIMES_RUNNING = 2
"""Prompts that a job has at a service for each that the service runs at once. The engine needs prompts that wait:
otherwise those that end together leave it idle until the next ones come."""
_UNKNOWN_RUNNING = 64
"""What a service is taken to run at once if it does not say so."""

_Value = TypeVar("_Value")

FindAgain = Callable[[int, AsyncClient], Awaitable[AsyncClient]]
"""Returns the client of a service where it is now: the same client, or a new one. It raises Unavailable if the service
is nowhere at the moment. The number is that of the service in the job."""


class Services:
    """Gives each prompt to the service that is working on the fewest.

    One that does not answer is left out until it does. One that refuses a prompt, because it or the tenant has too
    many, gets fewer at once, and the prompt is sent again.
    """

    def __init__(
        self,
        clients: Sequence[AsyncClient],
        max_concurrency: int | None,
        timeout: float | None,
        find_again: FindAgain | None = None,
    ) -> None:
        """Use several services.

        Args:
            clients: A client for each.
            max_concurrency: The most prompts that are sent at once, to all of them; None for twice as many as they run
                at once.
            timeout: The seconds for which all may be away; None for 5 minutes.
            find_again: Finds a service that does not answer, if services may be restarted elsewhere.
        """
        self.all = [Service(client, number) for number, client in enumerate(clients)]
        self._find_again = find_again
        self._left: list[AsyncClient] = []
        self._max_concurrency = max_concurrency
        self._room: asyncio.Semaphore | None = None
        self._patience = LONGEST_OUTAGE_SECONDS if timeout is None else timeout
        self._is_back = asyncio.Event()
        self._probes: set[asyncio.Task[None]] = set()
        self._last: ResiduumError | None = None
        self._info: ModelInfo | None = None
        self._needs_one_encoding = False

    async def begin(self, capture: Capture | None = None) -> None:
        """Ask every service for its model. Those that do not answer are left out until they do.

        Args:
            capture: What the job captures. If it names no encoding, all services must have the same one by default.

        Raises:
            InvalidRequest: They serve different models, or have different default encodings.
            ResiduumError: None of them answers.
        """
        self._needs_one_encoding = capture is not None and capture.encoding is None
        answers = await asyncio.gather(*(self._ask(service) for service in self.all))
        for service, info in zip(self.all, answers, strict=True):
            if info is not None:
                self._check(service, info)
        if self._info is None and self._last is not None:
            raise self._last
        if self._max_concurrency is None:
            running = [0 if info is None else info.limits["max_running_requests"] for info in answers]
            most = max(running) or _UNKNOWN_RUNNING
            self._max_concurrency = _TIMES_RUNNING * sum(count or most for count in running)
        self._room = asyncio.Semaphore(self._max_concurrency)

    @property
    def max_concurrency(self) -> int:
        """The most prompts that are sent at once; known after `begin`."""
        return _known(self._max_concurrency)

    @property
    def info(self) -> ModelInfo:
        """The model that all serve; known after `begin`."""
        return _known(self._info)

    @property
    def can_recover(self) -> bool:
        """Whether a prompt whose service is lost can still be answered, by another service or a restarted one."""
        return len(self.all) > 1 or self._find_again is not None

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[Service]:
        """Wait for room, and yield the service for one prompt.

        Raises:
            ResiduumError: All services are away, or refuse every prompt, for too long.
        """
        async with self.turn(), self.service() as service:
            yield service

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until fewer than `max_concurrency` prompts are sent. A prompt keeps its turn if it is sent again."""
        async with _known(self._room):
            yield

    @contextlib.asynccontextmanager
    async def service(self) -> AsyncIterator[Service]:
        """Wait for a service that takes a prompt, and yield it. As `slot`, for a prompt that has its turn."""
        service = await self._least_busy()
        service.running += 1
        try:
            yield service
        finally:
            service.running -= 1
            self._is_back.set()

    def note_answer(self, service: Service) -> None:
        """Note that a service has answered a prompt."""
        if service.failures:
            warn_caller(f"{service.client.endpoint} answers again.", OutageWarning)
        service.note_answer(time.monotonic())

    def note_refused(self, service: Service, failure: ResiduumError) -> None:
        """Note that a service has refused a prompt because it, or the tenant, has too many. It gets fewer at once.

        Raises:
            ResiduumError: No service has anything to do for this job, and all have refused its prompts for too long.
        """
        now = time.monotonic()
        service.note_refused(now)
        if service.running > 1:
            return  # the prompt is sent again when another one has ended
        self._last = failure
        self._check_patience(now, service)
        if not service.has_warned:
            service.has_warned = True
            warn_caller(
                f"{service.client.endpoint} takes no prompts at the moment: {failure} The job sends it one from time "
                f"to time, for up to {self._patience:.0f} s.",
                OutageWarning,
            )

    def note_away(self, service: Service, failure: ResiduumError) -> None:
        """Note that a service did not answer a prompt.

        Raises:
            ResiduumError: No service has answered for too long.
        """
        now = time.monotonic()
        self._last = failure
        if service.away_since is None:
            service.away_since = now
        self._check_patience(now, service)
        if service.is_away:
            return
        service.is_away = True
        others = sum(not other.is_away for other in self.all)
        if service.failures == 0:
            continues = "The other service continues." if others == 1 else f"The {others} other services continue."
            what = continues if others else f"It waits up to {self._patience:.0f} s."
            warn_caller(
                f"The job leaves out {service.client.endpoint} until it answers again. {what} {failure}",
                OutageWarning,
            )
        probe = asyncio.ensure_future(self._probe(service))
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)

    async def close(self) -> None:
        """Stop trying to reach services, and close the clients."""
        probes = list(self._probes)
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        for client in (*self._left, *(service.client for service in self.all)):
            await client.close()

    async def _least_busy(self) -> Service:
        while True:
            now = time.monotonic()
            there = [service for service in self.all if service.takes_prompts(now)]
            if there:
                return min(there, key=lambda service: service.running)
            self._check_patience(now)
            self._is_back.clear()
            pauses = [service.resumes - now for service in self.all if service.resumes > now]
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_back.wait(), min([LONGEST_PAUSE_SECONDS, *pauses]))

    def _check_patience(self, now: float, failed: Service | None = None) -> None:
        """Raise the last failure if no service has answered for too long. `failed` has just failed to."""
        if any(service.running and not service.is_away for service in self.all if service is not failed):
            return  # these prompts may be answered
        since = [service.away_since for service in self.all]
        if self._last is not None and all(at is not None and now - at > self._patience for at in since):
            raise self._last

    async def _probe(self, service: Service) -> None:
        """Try to reach a service until it answers."""
        while True:
            await asyncio.sleep(pause(service.failures))
            service.failures += 1
            with contextlib.suppress(Unavailable, TimeoutError):
                await self.follow(service)
                info = await service.client.info(check_store=True)
                if info.store_reachable is False:
                    continue
                try:
                    self._check(service, info)
                except InvalidRequest as error:
                    warn_caller(f"The job leaves out {service.client.endpoint}: {error}", OutageWarning)
                    return
                service.is_away = False
                self._is_back.set()
                return

    async def follow(self, service: Service) -> None:
        """Use a service where it is now.

        Raises:
            Unavailable: It is nowhere at the moment.
        """
        if self._find_again is None:
            return
        client = await self._find_again(service.number, service.client)
        if client is not service.client:
            self._left.append(service.client)  # calls of it may still run
            service.client = client

    async def _ask(self, service: Service) -> ModelInfo | None:
        try:
            return await service.client.info()
        except ResiduumError as failure:
            if not goes_away(failure) or not self.can_recover:
                raise
            self.note_away(service, failure)
            return None

    def _check(self, service: Service, info: ModelInfo) -> None:
        first = self._info = self._info or info
        for name in ("model", "num_layers", "hidden_size", "dtype"):
            if getattr(info, name) != getattr(first, name):
                raise InvalidRequest(
                    f"The services serve different models: at {service.client.endpoint}, {name} is "
                    f"{getattr(info, name)!r}, and at another one {getattr(first, name)!r}. Use services of one model.",
                    reason="INVALID_FIELD",
                )
        if self._needs_one_encoding and info.default_encoding != first.default_encoding:
            raise InvalidRequest(
                f"The services encode rows differently: the default encoding at {service.client.endpoint} is "
                f"{info.default_encoding!r}, and at another one {first.default_encoding!r}. Choose an encoding with "
                "encoding=.",
                reason="INVALID_FIELD",
            )


def _known(value: _Value | None) -> _Value:
    """Return what `Services.begin` has found."""
    if value is None:
        raise RuntimeError("no service has answered yet")
    return value


def goes_away(failure: ResiduumError) -> bool:
    """Tell whether a failure means that another service, or the same one later, may answer the prompt."""
    return is_away(failure) or isinstance(failure, EngineDead)
