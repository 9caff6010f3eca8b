"""The captures of this service in one store: opened before a request's first token, sealed after its last."""

from __future__ import annotations

import asyncio
import contextvars
from functools import partial
from typing import TYPE_CHECKING

from inference_svc.captures.opening import OPEN_SECONDS, Opening, Openings
from inference_svc.captures.sealing import Sealings
from inference_svc.captures.store_link import CallError, NoAnswerError, StoreLink
from residuum.rpc.errors import Failure
from residuum.v1 import capture_pb2, store_pb2, store_pb2_grpc
from residuum.wire.tokens import tenant_path
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import grpc.aio
    from google.protobuf.duration_pb2 import Duration

    from residuum.rpc.credentials import Credentials
    from residuum.wire.placement import StoreAddress

_log = get_logger(__name__)

_RENEWAL = 0.2
"""The fraction of a lease's duration after which it is renewed, so that several renewals may fail before it ends."""


class CaptureKeeper:
    """Opens and seals captures in one store. It handles no rows: shippers send them."""

    def __init__(self, store: StoreAddress, credentials: Credentials | None = None, *, is_alone: bool = True) -> None:
        """Prepare to call a store; the first call connects. `is_alone`: the service has no other store."""
        self.store = store
        self._link = StoreLink(store, credentials, is_alone=is_alone)
        self._openings = Openings(self._link)
        self._sealings = Sealings(self._link)
        self._opening: dict[str, Opening] = {}
        self._unanswered: set[str] = set()
        """Captures that the store may still open although nobody waits for it any more. Each is sealed."""
        self._seals: set[asyncio.Task[None]] = set()
        self._open: set[str] = set()
        self._lease_seconds = 0.0
        self._renewing: asyncio.Task[None] | None = None

    @property
    def answered(self) -> bool | None:
        """Whether the store answered the last call; None before the first."""
        return self._link.answered

    @property
    def is_avoided(self) -> bool:
        """Whether the store recently did not answer, or was full. If the service can choose, it uses another store."""
        return self._link.is_avoided

    @property
    def num_open(self) -> int:
        """Captures that were opened and not sealed yet."""
        return len(self._open)

    @property
    def num_seals(self) -> int:
        """Seals that the store has not acknowledged yet."""
        return len(self._seals)

    def takes_early_rows(self, if_exists: capture_pb2.IfExists.ValueType) -> bool:
        """Return whether rows of a capture may be sent before it is opened, as far as the store is known."""
        return self._link.takes_early_rows and if_exists <= capture_pb2.IF_EXISTS_FAIL

    async def check_free(self, description: capture_pb2.CaptureDescription) -> None:
        """Check that the store has no capture with this ID. Creates nothing.

        Raises:
            Failure: It has one (CAPTURE_EXISTS), or the store does not answer.
        """
        request = store_pb2.OpenCaptureRequest(description=description, check_only=True)
        await self._link.ask(
            lambda channel: store_pb2_grpc.StoreServiceStub(channel).OpenCapture(request, timeout=OPEN_SECONDS)
        )

    async def check_reachable(self) -> store_pb2.GetStatsResponse:
        """Check that the store answers, and return its statistics.

        Raises:
            Failure: It does not answer, or refuses.
        """
        request = store_pb2.GetStatsRequest()
        return await self._link.ask(
            lambda channel: store_pb2_grpc.StoreServiceStub(channel).GetStats(request, timeout=OPEN_SECONDS)
        )

    async def open(
        self,
        description: capture_pb2.CaptureDescription,
        if_exists: capture_pb2.IfExists.ValueType = capture_pb2.IF_EXISTS_FAIL,
        on_queued: Callable[[], object] = lambda: None,
    ) -> capture_pb2.CaptureManifest | None:
        """Create a capture, and keep the service's lease for as long as it has open captures.

        Args:
            description: The capture's ID, tenant and contents.
            if_exists: What to do if the store holds a capture with this ID.
            on_queued: Called when rows may be sent, before the capture is committed. It may be called twice, or not at
                all, for example if the call fails or the store is older. See also `takes_early_rows`.

        Returns:
            The manifest of the existing capture that is the result (IF_EXISTS_SKIP); None: a capture was created.

        Raises:
            Failure: The store does not answer, or refuses.
        """
        if if_exists > capture_pb2.IF_EXISTS_FAIL:
            await self._wait_for_seal(description)
        opening = Opening.of(description, if_exists, on_queued)
        path = tenant_path(description.tenant, description.capture_id, description.attempt)
        self._open.add(path)
        self._opening[path] = opening
        opening.answer.add_done_callback(partial(self._end_opening, path))
        try:
            answer = await self._openings.open(opening)
        except Failure as failure:
            if not isinstance(failure, NoAnswerError):  # after NoAnswerError it may be open; the caller seals it
                self._open.discard(path)
            raise
        if answer.HasField("existing"):
            self._open.discard(path)
            return answer.existing
        self._hold_lease(description.service_instance, answer.lease)
        return None

    def seal(
        self,
        request: store_pb2.SealCaptureRequest,
        complete: Callable[[store_pb2.SealCaptureRequest], Awaitable[None]] | None = None,
    ) -> None:
        """Seal a capture in the background. Returns at once; a task retries until the store answers.

        Args:
            request: The seal.
            complete: Adds to the seal what takes time, before it is sent. It must not raise.
        """
        path = tenant_path(request.tenant, request.capture_id, request.attempt)
        name = tenant_path(request.tenant, request.capture_id)
        task = asyncio.create_task(self._seal(request, complete, path, self._opening.get(path)), name=name)
        self._seals.add(task)
        task.add_done_callback(self._seals.discard)
        task.add_done_callback(lambda _: self._open.discard(path))
        task.add_done_callback(lambda _: self._unanswered.discard(path))

    async def close(self, grace_seconds: float) -> None:
        """Wait up to the grace for seals in progress, then disconnect."""
        if self._seals:
            _, late = await asyncio.wait(self._seals, timeout=grace_seconds)
            for task in late:
                task.cancel()
            if late:
                names = sorted(task.get_name() for task in late)
                _log.error(
                    "captures were not sealed: the store did not answer in time", store=str(self.store), captures=names
                )
        if self._renewing is not None:
            self._renewing.cancel()
        await self._link.close()

    async def _wait_for_seal(self, description: capture_pb2.CaptureDescription) -> None:
        """Wait for the seal of an earlier request with the same ID, up to the timeout of a call."""
        name = tenant_path(description.tenant, description.capture_id)
        earlier = {task for task in self._seals if task.get_name() == name}
        if earlier:
            await asyncio.wait(earlier, timeout=OPEN_SECONDS)

    def _end_opening(self, path: str, answer: asyncio.Future[store_pb2.OpenCaptureResponse]) -> None:
        self._opening.pop(path, None)
        if not answer.cancelled() and isinstance(answer.exception(), NoAnswerError):
            self._unanswered.add(path)

    def _hold_lease(self, service: str, lease: Duration) -> None:
        """Renew the lease until no capture is open. A store that names no duration is older, and needs no lease."""
        self._lease_seconds = lease.ToNanoseconds() / 1e9
        if self._lease_seconds and (self._renewing is None or self._renewing.done()):
            # With a context of its own: it outlives this request, so its logs and calls must not belong to it.
            renewing = self._renew_lease(service)
            self._renewing = contextvars.Context().run(asyncio.create_task, renewing, name="lease")

    async def _renew_lease(self, service: str) -> None:
        request = store_pb2.RenewLeaseRequest(service_instance=service)
        has_failed = False
        while self._open:
            seconds = self._lease_seconds * _RENEWAL
            await asyncio.sleep(seconds)
            try:
                answer = await self._link.call(partial(_renew, request, seconds))
            except CallError as error:
                if not has_failed:
                    _log.warning("lease not renewed yet; the service retries", store=str(self.store), cause=str(error))
                has_failed = True
            else:
                has_failed = False
                self._lease_seconds = answer.lease.ToNanoseconds() / 1e9 or self._lease_seconds

    async def _seal(
        self,
        request: store_pb2.SealCaptureRequest,
        complete: Callable[[store_pb2.SealCaptureRequest], Awaitable[None]] | None,
        path: str,
        opening: Opening | None,
    ) -> None:
        opening = opening or self._opening.get(path)  # its task began after `seal` was called, but before this one
        if complete is not None:
            await complete(request)
        if opening is not None:  # the caller left early; a seal that overtakes the open would end nothing
            await asyncio.wait([opening.answer])
            if opening.answer.cancelled() or opening.made_nothing:  # it was never sent, or refused
                return
        await self._sealings.seal(request, may_come=path in self._unanswered)


async def _renew(
    request: store_pb2.RenewLeaseRequest, timeout: float, channel: grpc.aio.Channel
) -> store_pb2.RenewLeaseResponse:
    return await store_pb2_grpc.StoreServiceStub(channel).RenewLease(request, timeout=timeout)
