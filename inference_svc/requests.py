"""Requests by id: registered and waiting, running, or used up."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from residuum.rpc.errors import Failure, Reason
from residuum.wire.ids import make_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from inference_svc.specs import ResolvedSpec

_REMEMBERED_IDS = 100_000
"""Ids of ended requests that are remembered, so that none is used twice. The store remembers captures for longer."""


@dataclass
class Registration:
    """A request that waits for its Generate."""

    spec: ResolvedSpec
    expires: float
    """When it lapses, on the registry's clock, in seconds."""


@dataclass
class Running:
    """A request that is generating."""

    request_id: str
    spec: ResolvedSpec
    was_registered: bool
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when somebody called Abort."""


class RequestRegistry:
    """Every request that the service knows. One event loop uses it, so it needs no lock."""

    def __init__(
        self,
        time_to_live: float,
        max_registrations: int,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = 64 << 20,
        make_id: Callable[[], str] = make_id,
    ) -> None:
        """Make an empty registry.

        Args:
            time_to_live: Seconds until an unused registration lapses.
            max_registrations: Registrations that may wait at once.
            clock: Returns seconds that only grow.
            max_bytes: What the specs of all that wait may take, as messages.
            make_id: Makes ids for requests that come without one.
        """
        self.make_id = make_id
        self.time_to_live = time_to_live
        self._max_registrations = max_registrations
        self._clock = clock
        self._max_bytes = max_bytes
        self._bytes = 0
        # Ordered by expiry: every registration lives equally long, and renewing one moves it to the end.
        self._registered: OrderedDict[str, Registration] = OrderedDict()
        self._running: dict[str, Running] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._leases: Counter[bytes] = Counter()  # of vectors, by digest

    @property
    def running(self) -> tuple[Running, ...]:
        """The requests that are generating."""
        return tuple(self._running.values())

    @property
    def num_running(self) -> int:
        """How many requests are generating."""
        return len(self._running)

    @property
    def num_registered(self) -> int:
        """How many registrations wait, those included that have lapsed since the last call."""
        return len(self._registered)

    def register(self, spec: ResolvedSpec, made_id: str = "") -> str:
        """Keep a spec until it is used or lapses, and return its id. The same spec under the same id renews it.

        Args:
            spec: The spec.
            made_id: Its id if it comes without one, from `make_id`; empty: make one.

        Raises:
            Failure: The id is taken by another spec or was used, or too many registrations wait.
        """
        self._drop_lapsed()
        known = self._registered.get(spec.request_id)
        if known is None or known.spec != spec:
            self._check_unused(spec.request_id)
            if len(self._registered) >= self._max_registrations:
                raise Failure(
                    Reason.ERROR_REASON_LIMIT_REACHED,
                    f"{self._max_registrations} registrations wait for their Generate already; use or abort some.",
                    limit="max_registrations",
                )
            if self._bytes + spec.num_bytes > self._max_bytes:
                raise Failure(
                    Reason.ERROR_REASON_LIMIT_REACHED,
                    f"The registrations that wait take {self._bytes >> 10} KiB, and this one {spec.num_bytes >> 10}; "
                    f"at most {self._max_bytes >> 10} are kept. Use or abort some.",
                    limit="max_registration_mib",
                )
        request_id = spec.request_id or made_id or self.make_id()
        self._forget_registration(request_id)
        self._remember(request_id, spec)
        return request_id

    def start_registered(self, request_id: str) -> Running:
        """Use up a registration.

        Raises:
            Failure: There is none of this id.
        """
        self._drop_lapsed()
        registration = self._forget_registration(request_id)
        if registration is None:
            raise _unknown(request_id, "It was never registered, was used already, or has lapsed; register it again.")
        return self._start(Running(request_id, registration.spec, was_registered=True))

    def start_inline(self, spec: ResolvedSpec) -> Running:
        """Start a request that was not registered.

        Raises:
            Failure: Its id is taken or was used.
        """
        self._drop_lapsed()
        if spec.request_id:
            self._check_unused(spec.request_id)
        return self._start(Running(spec.request_id or self.make_id(), spec, was_registered=False))

    def end(self, running: Running) -> None:
        """Forget a running request, and remember that its id was used."""
        self._stop(running)
        self._ended[running.request_id] = None
        while len(self._ended) > _REMEMBERED_IDS:
            self._ended.popitem(last=False)

    def release(self, running: Running) -> None:
        """Take back the start of a request that could not begin, so that the same call may be tried again.

        One that was aborted meanwhile, or has ended already, stays so.
        """
        if running.aborted.is_set():
            self.end(running)
        elif self._stop(running) and running.was_registered:
            self._remember(running.request_id, running.spec)

    def abort(self, request_id: str) -> None:
        """Stop a running request, or drop a registration. What has ended stays ended.

        Raises:
            Failure: There is no such request.
        """
        self._drop_lapsed()
        if request_id in self._running:
            self._running[request_id].aborted.set()
        elif self._forget_registration(request_id) is None and request_id not in self._ended:
            raise _unknown(request_id, "Check the id, or whether it has lapsed.")

    def get_running(self, request_id: str) -> Running:
        """Return a request that is generating.

        Raises:
            Failure: It is not.
        """
        running = self._running.get(request_id)
        if running is None:
            raise _unknown(request_id, "Only a request that is generating can be changed.")
        return running

    def is_leased(self, digest: bytes) -> bool:
        """Tell whether a waiting or a running request needs a vector."""
        self._drop_lapsed()
        return digest in self._leases

    def _start(self, running: Running) -> Running:
        self._running[running.request_id] = running
        self._lease(running.spec)
        return running

    def _stop(self, running: Running) -> bool:
        if self._running.pop(running.request_id, None) is None:
            return False
        self._end_lease(running.spec)
        return True

    def _remember(self, request_id: str, spec: ResolvedSpec) -> None:
        self._registered[request_id] = Registration(spec, self._clock() + self.time_to_live)
        self._bytes += spec.num_bytes
        self._lease(spec)

    def _forget_registration(self, request_id: str) -> Registration | None:
        registration = self._registered.pop(request_id, None)
        if registration is not None:
            self._bytes -= registration.spec.num_bytes
            self._end_lease(registration.spec)
        return registration

    def _lease(self, spec: ResolvedSpec) -> None:
        self._leases.update(spec.digests)

    def _end_lease(self, spec: ResolvedSpec) -> None:
        for digest in spec.digests:
            self._leases[digest] -= 1
            if not self._leases[digest]:
                del self._leases[digest]

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._registered:
            detail = "is registered with another spec"
        elif request_id in self._running:
            detail = "is running"
        elif request_id in self._ended:
            detail = "was used before"
        else:
            return
        raise Failure(
            Reason.ERROR_REASON_REQUEST_EXISTS,
            f"The request id {request_id!r} {detail}; choose another, or leave it empty to have one made.",
            request_id=request_id,
        )

    def _drop_lapsed(self) -> None:
        now = self._clock()
        while self._registered:
            request_id, oldest = next(iter(self._registered.items()))
            if oldest.expires > now:
                return
            self._forget_registration(request_id)


def _unknown(request_id: str, advice: str) -> Failure:
    return Failure(
        Reason.ERROR_REASON_UNKNOWN_REQUEST, f"There is no request {request_id!r}. {advice}", request_id=request_id
    )
