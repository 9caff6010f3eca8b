"""The captures of this service in one store: opened before a request's first token, sealed after its last."""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from residuum.rpc.channels import open_aio_channel
from residuum.rpc.credentials import Credentials, CredentialsError
from residuum.rpc.errors import Failure, Reason, failure_from_rpc_error
from residuum.rpc.methods import OPEN_CAPTURE, QUEUED, SEAL_CAPTURE
from residuum.v1 import capture_pb2, store_pb2, store_pb2_grpc
from residuum.wire.placement import StoreAddress
from residuum.wire.tokens import tenant_path
from svc_common.backoff import Backoff
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from google.protobuf.duration_pb2 import Duration

_T = TypeVar("_T")

_log = get_logger(__name__)

_OPEN_SECONDS = 5.0
_AVOIDED_SECONDS = 5.0
"""How long the service avoids a store after a call without an answer, or after STORE_FULL: for this long, new IDs are
chosen so that other stores own them."""
_SEAL_SECONDS = 10.0
_RENEWAL = 0.2
"""The fraction of a lease's duration after which it is renewed, so that several renewals may fail before it ends."""
_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 5.0
_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

_FINAL = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
"""Failures of a seal that no retry can mend: the capture was deleted or has ended, or the seal is malformed."""

_OUR_OWN_TOKEN = (Reason.ERROR_REASON_UNAUTHENTICATED, Reason.ERROR_REASON_PERMISSION_DENIED)
"""The store's reasons for refusing this service's own token."""


class NoAnswerError(Failure):
    """The store did not answer in time. It may or may not have carried out the call."""


class CaptureKeeper:
    """Opens and seals captures in one store. It handles no rows: shippers send them."""

    def __init__(self, store: StoreAddress, credentials: Credentials | None = None, *, is_alone: bool = True) -> None:
        """Prepare to call a store; the first call connects. `is_alone`: the service has no other store."""
        self._credentials = credentials
        self.store = store
        self._is_alone = is_alone
        self.answered: bool | None = None
        """Whether the store answered the last call; None before the first."""
        self._no_use_since = -math.inf
        self._channel = self._connect()
        self._seals: set[asyncio.Task[None]] = set()
        self._open: set[str] = set()
        self._lease_seconds = 0.0
        self._renewing: asyncio.Task[None] | None = None

    @property
    def is_avoided(self) -> bool:
        """Whether the store recently did not answer, or was full. If the service can choose, it uses another store."""
        return time.monotonic() - self._no_use_since < _AVOIDED_SECONDS

    @property
    def num_open(self) -> int:
        """Captures that were opened and not sealed yet."""
        return len(self._open)

    @property
    def num_seals(self) -> int:
        """Seals that the store has not acknowledged yet."""
        return len(self._seals)

    async def check_free(self, description: capture_pb2.CaptureDescription) -> None:
        """Check that the store has no capture with this ID. Creates nothing.

        Raises:
            Failure: It has one (CAPTURE_EXISTS), or the store does not answer.
        """
        request = store_pb2.OpenCaptureRequest(description=description, check_only=True)
        await self._ask(
            lambda channel: store_pb2_grpc.StoreServiceStub(channel).OpenCapture(request, timeout=_OPEN_SECONDS)
        )

    async def check_reachable(self) -> store_pb2.GetStatsResponse:
        """Check that the store answers, and return its statistics.

        Raises:
            Failure: It does not answer, or refuses.
        """
        request = store_pb2.GetStatsRequest()
        return await self._ask(
            lambda channel: store_pb2_grpc.StoreServiceStub(channel).GetStats(request, timeout=_OPEN_SECONDS)
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
            on_queued: Called when rows may be sent, before the capture is committed. It is not called if the call fails
                before that, or if the store is older.

        Returns:
            The manifest of the existing capture that is the result (IF_EXISTS_SKIP); None: a capture was created.

        Raises:
            Failure: The store does not answer, or refuses.
        """
        if if_exists > capture_pb2.IF_EXISTS_FAIL:
            await self._wait_for_seal(description)
        request = store_pb2.OpenCaptureRequest(description=description, if_exists=if_exists)
        path = tenant_path(description.tenant, description.capture_id, description.attempt)
        self._open.add(path)
        try:
            answer = await self._ask(partial(self._open_capture, request, on_queued))
        except Failure as failure:
            if not isinstance(failure, NoAnswerError):  # after NoAnswerError it may be open; the caller seals it
                self._open.discard(path)
            raise
        if answer.HasField("existing"):
            self._open.discard(path)
            return answer.existing
        self._hold_lease(description.service_instance, answer.lease)
        return None

    async def _open_capture(
        self, request: store_pb2.OpenCaptureRequest, on_queued: Callable[[], object], channel: grpc.aio.Channel
    ) -> store_pb2.OpenCaptureResponse:
        """Call OpenCapture. gRPC's class for calls with one answer has the initial metadata only with the answer."""
        call = channel.unary_stream(
            OPEN_CAPTURE, store_pb2.OpenCaptureRequest.SerializeToString, store_pb2.OpenCaptureResponse.FromString
        )(request, timeout=_OPEN_SECONDS)
        is_queued = QUEUED in dict(await call.initial_metadata())
        if is_queued:
            on_queued()
        try:
            (answer,) = [answer async for answer in call]
        except grpc.aio.AioRpcError as error:
            if not is_queued or error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            # Do not repeat the call: rows may reach the store before its second time.
            raise self._unreachable(error.details(), NoAnswerError) from error
        return answer

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
        task = asyncio.create_task(self._seal(request, complete), name=name)
        self._seals.add(task)
        task.add_done_callback(self._seals.discard)
        task.add_done_callback(lambda _: self._open.discard(path))

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
        await self._channel.close()

    async def _wait_for_seal(self, description: capture_pb2.CaptureDescription) -> None:
        """Wait for the seal of an earlier request with the same ID, up to the timeout of a call."""
        name = tenant_path(description.tenant, description.capture_id)
        earlier = {task for task in self._seals if task.get_name() == name}
        if earlier:
            await asyncio.wait(earlier, timeout=_OPEN_SECONDS)

    def _hold_lease(self, service: str, lease: Duration) -> None:
        """Renew the lease until no capture is open. A store that names no duration is older, and needs no lease."""
        self._lease_seconds = lease.ToNanoseconds() / 1e9
        if self._lease_seconds and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.create_task(self._renew_lease(service), name="lease")

    async def _renew_lease(self, service: str) -> None:
        request = store_pb2.RenewLeaseRequest(service_instance=service)
        has_failed = False
        while self._open:
            seconds = self._lease_seconds * _RENEWAL
            await asyncio.sleep(seconds)
            try:
                answer = await self._call(partial(_renew, request, seconds))
            except (grpc.aio.AioRpcError, CredentialsError) as error:
                if not has_failed:
                    _log.warning("lease not renewed yet; the service retries", store=str(self.store), cause=str(error))
                has_failed = True
            else:
                has_failed = False
                self._lease_seconds = answer.lease.ToNanoseconds() / 1e9 or self._lease_seconds

    def _connect(self) -> grpc.aio.Channel:
        # Without gRPC's own retries a dead store fails at once: callers may retry, and `_seal` retries itself.
        once = [("grpc.enable_retries", 0)]
        return open_aio_channel(self.store.endpoint, credentials=self._credentials, options=once)

    async def _ask(self, call: Callable[[grpc.aio.Channel], Awaitable[_T]]) -> _T:
        """Make an idempotent call.

        Raises:
            Failure: The store does not answer, or refuses.
        """
        try:
            answer = await self._call(call)
        except grpc.aio.AioRpcError as error:
            failure = self._failure(error)
            self._note(
                answered=failure.reason != Reason.ERROR_REASON_STORE_UNREACHABLE,
                is_full=failure.reason == Reason.ERROR_REASON_STORE_FULL,
            )
            raise failure from error
        except CredentialsError as error:
            self._note(answered=False)
            raise self._unreachable(str(error)) from error
        self._note(answered=True)
        return answer

    def _note(self, *, answered: bool, is_full: bool = False) -> None:
        self.answered = answered
        self._no_use_since = -math.inf if answered and not is_full else time.monotonic()

    async def _call(self, call: Callable[[grpc.aio.Channel], Awaitable[_T]]) -> _T:
        try:
            return await call(self._channel)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            # The channel may be in its reconnect delay. A fresh channel connects now, and finds a store that is back.
            async with self._connect() as fresh:
                return await call(fresh)

    async def _seal(
        self,
        request: store_pb2.SealCaptureRequest,
        complete: Callable[[store_pb2.SealCaptureRequest], Awaitable[None]] | None,
    ) -> None:
        if complete is not None:
            await complete(request)
        backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        cause: str | None = None
        while True:
            before = cause
            try:
                await self._call(partial(_seal, request))
            except grpc.aio.AioRpcError as error:
                cause = error.details() or error.code().name
                if _is_final(error):
                    self._log_seal("capture not sealed", request, cause)
                    return
                self._note(answered=error.code() not in _UNREACHABLE)
            except CredentialsError as error:  # retried, because the file may be in the middle of a replacement
                cause = str(error)
                self._note(answered=False)
            else:
                return
            if before is None:
                self._log_seal("capture not sealed yet; the service retries", request, cause)
            await asyncio.sleep(backoff.next_delay())

    def _log_seal(self, event: str, request: store_pb2.SealCaptureRequest, cause: str) -> None:
        _log.warning(event, store=str(self.store), request_id=request.capture_id, cause=cause)

    def _failure(self, error: grpc.aio.AioRpcError) -> Failure:
        failure = failure_from_rpc_error(error)
        if failure is not None and failure.reason in _OUR_OWN_TOKEN:
            # Replace this failure. Otherwise callers would look for the fault in their own token.
            return self._unreachable(f"it refuses this service's own token, see --store-token-file: {failure.message}")
        if failure is not None and failure.code not in _UNREACHABLE:
            return failure
        kind = NoAnswerError if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED else Failure
        return self._unreachable(error.details(), kind)

    def _unreachable(self, cause: str | None, kind: type[Failure] = Failure) -> Failure:
        place = f"at {self.store}" if self.store.name == self.store.endpoint else str(self.store)
        consequence = (
            "Until it does, nothing can be captured; requests without a capture are served. Try again later."
            if self._is_alone
            else "Until it does, captures whose ID belongs to it cannot be made. Try again later, or use another ID."
        )
        return kind(
            Reason.ERROR_REASON_STORE_UNREACHABLE,
            f"The store {place} does not answer ({cause}). {consequence}",
            endpoint=self.store.endpoint,
            store=self.store.name,
        )


async def _seal(request: store_pb2.SealCaptureRequest, channel: grpc.aio.Channel) -> store_pb2.SealCaptureResponse:
    # One method, because every request with a capture calls it, and a stub makes all methods of the store.
    call = channel.unary_unary(
        SEAL_CAPTURE, store_pb2.SealCaptureRequest.SerializeToString, store_pb2.SealCaptureResponse.FromString
    )
    return await call(request, timeout=_SEAL_SECONDS)


async def _renew(
    request: store_pb2.RenewLeaseRequest, timeout: float, channel: grpc.aio.Channel
) -> store_pb2.RenewLeaseResponse:
    return await store_pb2_grpc.StoreServiceStub(channel).RenewLease(request, timeout=timeout)


def _is_final(error: grpc.aio.AioRpcError) -> bool:
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        # A store without room answers with a reason. Without one, gRPC refused the message: the seal is too large.
        return failure_from_rpc_error(error) is None
    return error.code() in _FINAL
