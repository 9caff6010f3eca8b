"""The registry of requests by ID: those that are registered, those that run, and those that have ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inference_svc.resources.vector_cache import vector_name
from residuum.rpc.errors import Failure, Reason
from residuum.wire.ids import make_attempt, make_id
from residuum.wire.limits import MAX_ID_LENGTH
from residuum.wire.tokens import tenant_path
from svc_common.security.tokens_file import Limits, no_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inference_svc.admission.specs import ResolvedSpec

_REMEMBERED_IDS = 100_000
"""How many IDs of ended requests are remembered, so that aborting one of them succeeds. They may be used again: only
the store knows whether a capture has the ID."""


_Key = tuple[str, str]
"""A request's tenant, and its ID as the caller sent it. Not a path: an ID that was not checked may contain a slash."""


@dataclass
class Registration:
    """A registered request whose Generate call has not come yet."""

    spec: ResolvedSpec
    expires: float
    """When the registration expires, in seconds on the registry's clock."""


@dataclass
class Running:
    """A request that is generating."""

    request_id: str
    spec: ResolvedSpec
    was_registered: bool
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client calls Abort."""
    tenant: str = ""
    """The tenant that owns the request."""
    attempt: int = 0
    """Tells apart the requests that use the same ID one after the other."""
    on_abort: Callable[[], None] | None = None
    """Called when a client calls Abort. A callback costs less than a task in each request that waits for the event."""

    @property
    def path(self) -> str:
        """The name of the request in the engine and on the way to the store. No other request ever has it."""
        return tenant_path(self.tenant, self.request_id, self.attempt)

    def aborted_failure(self) -> Failure:
        """Return the failure that the caller of Generate gets after an abort."""
        return Failure(
            Reason.ERROR_REASON_ABORTED, f"The request {self.request_id!r} was aborted.", request_id=self.request_id
        )

    def ended_failure(self) -> Failure:
        """Return the failure of a call for which this request must be generating, and is not."""
        return Failure(
            Reason.ERROR_REASON_UNKNOWN_REQUEST,
            f"The request {self.request_id!r} is not generating: it has not started, or has just ended. Call again "
            "after its started event and before its end.",
            request_id=self.request_id,
        )

    def abort(self) -> None:
        """Stop the request. Its capture ends ABORTED."""
        self.aborted.set()
        if self.on_abort is not None:
            self.on_abort()

    def cache_salt(self, prompt_tokens: int) -> str | None:
        """Return the salt for vLLM's prefix cache; see `SharedSpec.cache_salt`.

        The salt contains the tenant, so tenants never share cached prefixes. Otherwise one tenant could learn from the
        time to the first token which prompts another has sent.
        """
        salt = self.spec.shared.cache_salt(prompt_tokens)
        return f"{self.tenant}/{salt or ''}" if self.tenant else salt


class RequestRegistry:
    """Every request that the service knows. Only one event loop uses it, so it needs no lock."""

    def __init__(
        self,
        time_to_live: float,
        max_registrations: int,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = 64 << 20,
        make_id: Callable[[], str] = make_id,
        limits_of: Callable[[str], Limits] = no_limits,
    ) -> None:
        """Make an empty registry.

        Args:
            time_to_live: Seconds until an unused registration expires.
            max_registrations: The most registrations that may wait for their Generate at the same time.
            clock: Returns monotonic seconds.
            max_bytes: The most bytes that the specs of all waiting registrations may take, serialized.
            make_id: Makes IDs for requests that come without one.
            limits_of: Returns a tenant's limits.
        """
        self._limits_of = limits_of
        self.make_id = make_id
        self.time_to_live = time_to_live
        self._max_registrations = max_registrations
        self._clock = clock
        self._max_bytes = max_bytes
        self._counts: Counter[str] = Counter()  # of waiting registrations, by tenant
        self._bytes: Counter[str] = Counter()  # of their specs
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
        """The number of requests that are generating."""
        return len(self._running)

    @property
    def num_registered(self) -> int:
        """The number of waiting registrations, including those that have expired since the last call."""
        return len(self._registered)

    def register(self, spec: ResolvedSpec, tenant: str = "", made_id: str = "") -> str:
        """Keep a spec until it is used or expires, and return its request ID.

        The same spec under the same ID renews the registration.

        Args:
            spec: The spec.
            tenant: The tenant that owns it.
            made_id: The ID, from `make_id`, for a spec without one. If it is empty, the registry makes one.

        Raises:
            Failure: The ID is registered with another spec or running, or too many registrations wait.
        """
        self._drop_lapsed()
        known = self._registered.get((tenant, spec.request_id))
        if known is None or known.spec != spec:
            self._check_unused((tenant, spec.request_id))
            if spec.num_bytes > self._max_bytes:
                raise Failure(
                    Reason.ERROR_REASON_LIMIT_REACHED,
                    f"The registration takes {spec.num_bytes} bytes, but the server keeps at most {self._max_bytes} of "
                    "all registrations. Shorten it, use Generate with the spec in it, or ask the operator to raise "
                    "--max-registration-mib.",
                    limit="max_registration_mib",
                    needed=spec.num_bytes,
                    allowed=self._max_bytes,
                )
            self._check_room(spec, tenant)
        request_id = spec.request_id or made_id or self.make_id()
        self._forget_registration((tenant, request_id))
        self._remember((tenant, request_id), spec)
        return request_id

    def _check_room(self, spec: ResolvedSpec, tenant: str) -> None:
        """Check that a registration fits beside the others, and the tenant's beside its own into its share."""
        limits = self._limits_of(tenant)
        for whose, most, count, room, num_bytes in (
            ("", self._max_registrations, len(self._registered), self._max_bytes, self._bytes.total()),
            (
                " of your tenant",
                limits.share_of(self._max_registrations),
                self._counts[tenant],
                limits.share_of(self._max_bytes),
                self._bytes[tenant],
            ),
        ):
            if count >= most:
                raise Failure(
                    Reason.ERROR_REASON_LIMIT_REACHED,
                    f"{most} registrations{whose} already wait for their Generate, the limit. Use or abort some.",
                    limit="max_registrations",
                )
            if num_bytes + spec.num_bytes > room and num_bytes:
                raise Failure(
                    Reason.ERROR_REASON_LIMIT_REACHED,
                    f"The waiting registrations{whose} take {num_bytes >> 10} KiB, and this one takes "
                    f"{spec.num_bytes >> 10} KiB; the limit is {room >> 10} KiB. Use or abort some.",
                    limit="max_registration_mib",
                )

    def start_registered(self, request_id: str, tenant: str = "") -> Running:
        """Start a registered request, which uses up its registration.

        Raises:
            Failure: No request is registered under this ID.
        """
        self._drop_lapsed()
        registration = self._forget_registration((tenant, request_id))
        if registration is None:
            raise _unknown(request_id, "It was never registered, was already used, or has expired. Register it again.")
        return self._start(request_id, registration.spec, tenant, was_registered=True)

    def start_inline(self, spec: ResolvedSpec, tenant: str = "") -> Running:
        """Start a request that was not registered.

        Raises:
            Failure: Its ID is in use.
        """
        self._drop_lapsed()
        if spec.request_id:
            self._check_unused((tenant, spec.request_id))
        return self._start(spec.request_id or self.make_id(), spec, tenant, was_registered=False)

    def finish(self, running: Running, *, has_begun: bool) -> None:
        """Remove a running request: `end` it if it has begun, else `release` it."""
        (self.end if has_begun else self.release)(running)

    def end(self, running: Running) -> None:
        """Remove a running request, and remember that it has ended."""
        self._stop(running)
        self._ended[_key(running)] = None
        self._ended.move_to_end(_key(running))
        while len(self._ended) > _REMEMBERED_IDS:
            self._ended.popitem(last=False)

    def release(self, running: Running) -> None:
        """Undo the start of a request that could not begin, so that the client can retry the same call.

        A request that was aborted meanwhile, or has already ended, stays ended.
        """
        if running.aborted.is_set():
            self.end(running)
        elif self._stop(running) and running.was_registered:
            self._remember(_key(running), running.spec)

    def abort(self, request_id: str, tenant: str = "") -> None:
        """Stop a running request, or drop a registration. A request that has ended stays unchanged.

        Raises:
            Failure: There is no such request.
        """
        self._drop_lapsed()
        key = (tenant, request_id)
        if key in self._running:
            self._running[key].abort()
        elif self._forget_registration(key) is None and key not in self._ended:
            raise _unknown(request_id, "Check the ID, and whether the registration has expired.")

    def get_running(self, request_id: str, tenant: str = "") -> Running:
        """Return a request that is generating.

        Raises:
            Failure: No request with this ID is generating.
        """
        running = self._running.get((tenant, request_id))
        if running is None:
            raise _unknown(request_id, "Only a request that is generating can be changed.")
        return running

    def is_leased(self, name: bytes) -> bool:
        """Return whether a registered or running request needs a vector or an encoder; see `vector_name`."""
        self._drop_lapsed()
        return name in self._leases

    def _start(self, request_id: str, spec: ResolvedSpec, tenant: str, *, was_registered: bool) -> Running:
        running = Running(request_id, spec, was_registered, tenant=tenant, attempt=make_attempt())
        self._running[_key(running)] = running
        self._lease(running.tenant, running.spec)
        return running

    @contextmanager
    def holding(self, name: bytes) -> Iterator[None]:
        """Keep a vector or an encoder, by `vector_name`, from being dropped."""
        self._leases[name] += 1
        try:
            yield
        finally:
            self._end(name)

    def _stop(self, running: Running) -> bool:
        if self._running.pop(_key(running), None) is None:
            return False
        self._end_lease(running.tenant, running.spec)
        return True

    def _remember(self, key: _Key, spec: ResolvedSpec) -> None:
        self._registered[key] = Registration(spec, self._clock() + self.time_to_live)
        self._counts[key[0]] += 1
        self._bytes[key[0]] += spec.num_bytes
        self._lease(key[0], spec)

    def _forget_registration(self, key: _Key) -> Registration | None:
        registration = self._registered.pop(key, None)
        if registration is not None:
            self._counts -= Counter([key[0]])
            self._bytes -= Counter({key[0]: registration.spec.num_bytes})
            self._end_lease(key[0], registration.spec)
        return registration

    def _lease(self, tenant: str, spec: ResolvedSpec) -> None:
        for name in _leased_names(tenant, spec):
            self._leases[name] += 1

    def _end_lease(self, tenant: str, spec: ResolvedSpec) -> None:
        for name in _leased_names(tenant, spec):
            self._end(name)

    def _end(self, name: bytes) -> None:
        self._leases[name] -= 1
        if not self._leases[name]:
            del self._leases[name]

    def _check_unused(self, key: _Key) -> None:
        if key in self._registered:
            detail = "is registered with another spec"
        elif key in self._running:
            detail = "is running"
        else:
            return
        raise Failure(
            Reason.ERROR_REASON_REQUEST_EXISTS,
            f"The request ID {key[1]!r} {detail}. Choose another, or leave it empty and the server makes one.",
            request_id=key[1],
        )

    def _drop_lapsed(self) -> None:
        now = self._clock()
        while self._registered:
            key, oldest = next(iter(self._registered.items()))
            if oldest.expires > now:
                return
            self._forget_registration(key)


def _leased_names(tenant: str, spec: ResolvedSpec) -> list[bytes]:
    """Return the names of the vectors and of the encoder that a request needs; see `vector_name`."""
    encoder = [vector_name(tenant, spec.shared.sae_digest)] if spec.shared.sae_digest else []
    return [*spec.shared.vector_names(tenant), *encoder]


def _key(running: Running) -> _Key:
    return running.tenant, running.request_id


def _unknown(request_id: str, advice: str) -> Failure:
    shown = request_id[:MAX_ID_LENGTH]  # the caller chose the text, so bound the answer's size
    return Failure(Reason.ERROR_REASON_UNKNOWN_REQUEST, f"There is no request {shown!r}. {advice}", request_id=shown)
