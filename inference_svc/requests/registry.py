"""Requests by id: registered and waiting, running, or used up."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inference_svc.resources.vector_cache import vector_name
from residuum.rpc.errors import Failure, Reason
from residuum.wire.ids import make_id
from residuum.wire.tokens import tenant_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from inference_svc.admission.specs import ResolvedSpec

_REMEMBERED_IDS = 100_000
"""Ids of ended requests that are remembered, so that none is used twice. The store remembers captures for longer."""


_Key = tuple[str, str]
"""A request's tenant, and its id as somebody sent it. Not a path: what was sent may hold a slash."""


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
    tenant: str = ""
    """Whose it is."""
    on_abort: Callable[[], None] | None = None
    """Called when somebody calls Abort: less than a task that waits for it in each request."""

    @property
    def path(self) -> str:
        """What it is called in the engine and on the way to the store: no other tenant's request is called so."""
        return tenant_path(self.tenant, self.request_id)

    def aborted_failure(self) -> Failure:
        """Return the failure that tells its caller that it was aborted."""
        return Failure(
            Reason.ERROR_REASON_ABORTED, f"The request {self.request_id!r} was aborted.", request_id=self.request_id
        )

    def ended_failure(self) -> Failure:
        """Return the failure of a call that needs it to be generating."""
        return Failure(
            Reason.ERROR_REASON_UNKNOWN_REQUEST,
            f"The request {self.request_id!r} has not begun to generate, or has just ended; wait for its started "
            "event.",
            request_id=self.request_id,
        )

    def abort(self) -> None:
        """Stop it; it ends ABORTED."""
        self.aborted.set()
        if self.on_abort is not None:
            self.on_abort()

    @property
    def vector_names(self) -> list[bytes]:
        """The vectors that it needs; see `vector_name`."""
        return [vector_name(self.tenant, digest) for digest in self.spec.digests]

    def cache_salt(self, prompt_tokens: int) -> str | None:
        """Return what keeps its KV cache apart from that of others; see `ResolvedSpec.cache_salt`.

        Tenants never share: by how soon the first token comes, one could else tell which prompts another has sent.
        """
        salt = self.spec.cache_salt(prompt_tokens)
        return f"{self.tenant}/{salt or ''}" if self.tenant else salt


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
        self._registered: OrderedDict[_Key, Registration] = OrderedDict()
        self._running: dict[_Key, Running] = {}
        self._ended: OrderedDict[_Key, None] = OrderedDict()
        self._leases: Counter[bytes] = Counter()  # of vectors, by name

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

    def register(self, spec: ResolvedSpec, tenant: str = "", made_id: str = "") -> str:
        """Keep a spec until it is used or lapses, and return its id. The same spec under the same id renews it.

        Args:
            spec: The spec.
            tenant: Whose it is.
            made_id: Its id if it comes without one, from `make_id`; empty: make one.

        Raises:
            Failure: The id is taken by another spec or was used, or too many registrations wait.
        """
        self._drop_lapsed()
        known = self._registered.get((tenant, spec.request_id))
        if known is None or known.spec != spec:
            self._check_unused((tenant, spec.request_id))
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
        self._forget_registration((tenant, request_id))
        self._remember((tenant, request_id), spec)
        return request_id

    def start_registered(self, request_id: str, tenant: str = "") -> Running:
        """Use up a registration.

        Raises:
            Failure: There is none of this id.
        """
        self._drop_lapsed()
        registration = self._forget_registration((tenant, request_id))
        if registration is None:
            raise _unknown(request_id, "It was never registered, was used already, or has lapsed; register it again.")
        return self._start(Running(request_id, registration.spec, was_registered=True, tenant=tenant))

    def start_inline(self, spec: ResolvedSpec, tenant: str = "") -> Running:
        """Start a request that was not registered.

        Raises:
            Failure: Its id is taken or was used.
        """
        self._drop_lapsed()
        if spec.request_id:
            self._check_unused((tenant, spec.request_id))
        return self._start(Running(spec.request_id or self.make_id(), spec, was_registered=False, tenant=tenant))

    def end(self, running: Running) -> None:
        """Forget a running request, and remember that its id was used."""
        self._stop(running)
        self._ended[_key(running)] = None
        while len(self._ended) > _REMEMBERED_IDS:
            self._ended.popitem(last=False)

    def release(self, running: Running) -> None:
        """Take back the start of a request that could not begin, so that the same call may be tried again.

        One that was aborted meanwhile, or has ended already, stays so.
        """
        if running.aborted.is_set():
            self.end(running)
        elif self._stop(running) and running.was_registered:
            self._remember(_key(running), running.spec)

    def abort(self, request_id: str, tenant: str = "") -> None:
        """Stop a running request, or drop a registration. What has ended stays ended.

        Raises:
            Failure: There is no such request.
        """
        self._drop_lapsed()
        key = (tenant, request_id)
        if key in self._running:
            self._running[key].abort()
        elif self._forget_registration(key) is None and key not in self._ended:
            raise _unknown(request_id, "Check the id, or whether it has lapsed.")

    def get_running(self, request_id: str, tenant: str = "") -> Running:
        """Return a request that is generating.

        Raises:
            Failure: It is not.
        """
        running = self._running.get((tenant, request_id))
        if running is None:
            raise _unknown(request_id, "Only a request that is generating can be changed.")
        return running

    def is_leased(self, name: bytes) -> bool:
        """Tell whether a waiting or a running request needs a vector; see `vector_name`."""
        self._drop_lapsed()
        return name in self._leases

    def _start(self, running: Running) -> Running:
        self._running[_key(running)] = running
        self._lease(running.tenant, running.spec)
        return running

    def _stop(self, running: Running) -> bool:
        if self._running.pop(_key(running), None) is None:
            return False
        self._end_lease(running.tenant, running.spec)
        return True

    def _remember(self, key: _Key, spec: ResolvedSpec) -> None:
        self._registered[key] = Registration(spec, self._clock() + self.time_to_live)
        self._bytes += spec.num_bytes
        self._lease(key[0], spec)

    def _forget_registration(self, key: _Key) -> Registration | None:
        registration = self._registered.pop(key, None)
        if registration is not None:
            self._bytes -= registration.spec.num_bytes
            self._end_lease(key[0], registration.spec)
        return registration

    def _lease(self, tenant: str, spec: ResolvedSpec) -> None:
        self._leases.update(vector_name(tenant, digest) for digest in spec.digests)

    def _end_lease(self, tenant: str, spec: ResolvedSpec) -> None:
        for name in (vector_name(tenant, digest) for digest in spec.digests):
            self._leases[name] -= 1
            if not self._leases[name]:
                del self._leases[name]

    def _check_unused(self, key: _Key) -> None:
        if key in self._registered:
            detail = "is registered with another spec"
        elif key in self._running:
            detail = "is running"
        elif key in self._ended:
            detail = "was used before"
        else:
            return
        raise Failure(
            Reason.ERROR_REASON_REQUEST_EXISTS,
            f"The request id {key[1]!r} {detail}; choose another, or leave it empty to have one made.",
            request_id=key[1],
        )

    def _drop_lapsed(self) -> None:
        now = self._clock()
        while self._registered:
            key, oldest = next(iter(self._registered.items()))
            if oldest.expires > now:
                return
            self._forget_registration(key)


def _key(running: Running) -> _Key:
    return running.tenant, running.request_id


def _unknown(request_id: str, advice: str) -> Failure:
    return Failure(
        Reason.ERROR_REASON_UNKNOWN_REQUEST, f"There is no request {request_id!r}. {advice}", request_id=request_id
    )
