"""The captures of this service's requests in one store: opened before the first token, sealed after the last."""

from __future__ import annotations

import asyncio
import math
import random
import time
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from residuum.rpc.channels import open_aio_channel
from residuum.rpc.credentials import Credentials, CredentialsError
from residuum.rpc.errors import Failure, Reason, failure_from_rpc_error
from residuum.v1 import store_pb2, store_pb2_grpc
from residuum.wire.placement import StoreAddress
from residuum.wire.tokens import tenant_path
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from residuum.v1 import capture_pb2

_T = TypeVar("_T")

_log = get_logger(__name__)

_OPEN_SECONDS = 5.0
_AVOIDED_SECONDS = 5.0
"""How long a store that did not answer gets no captures of which the service chooses the store."""
_SEAL_SECONDS = 10.0
_MAX_BACKOFF_SECONDS = 5.0
_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

_FINAL = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
"""Answers to a seal that the same seal would get again: the capture was deleted, has ended, or the seal is bad."""


_OUR_OWN_TOKEN = (Reason.ERROR_REASON_UNAUTHENTICATED, Reason.ERROR_REASON_PERMISSION_DENIED)
"""How the store refuses the token of this service."""


class NoAnswerError(Failure):
    """The store did not answer in time: whether it did what it was asked is not known."""


class CaptureKeeper:
    """Speaks to one store for the inference service. Rows do not pass here: shippers send them."""

    def __init__(self, store: StoreAddress, credentials: Credentials | None = None, *, is_alone: bool = True) -> None:
        """Connect lazily to a store; `is_alone` says that there is no other."""
        self._credentials = credentials
        self.store = store
        self._is_alone = is_alone
        self.answered: bool | None = None
        """Whether the store answered when it was last asked; None: it was not asked yet."""
        self._silent_since = -math.inf
        self._channel = self._connect()
        self._seals: set[asyncio.Task[None]] = set()
        self._open: set[str] = set()

    @property
    def is_avoided(self) -> bool:
        """Whether to keep new captures from the store where there is a choice: it has just failed to answer."""
        return time.monotonic() - self._silent_since < _AVOIDED_SECONDS

    @property
    def num_open(self) -> int:
        """Captures that were opened, and whose end the store has not heard."""
        return len(self._open)

    @property
    def num_seals(self) -> int:
        """Ends that the store is being told."""
        return len(self._seals)

    async def check_free(self, description: capture_pb2.CaptureDescription) -> None:
        """Make sure that the store has no capture of this id; nothing is created.

        Raises:
            Failure: It has one (CAPTURE_EXISTS), or does not answer.
        """
        request = store_pb2.OpenCaptureRequest(description=description, check_only=True)
        await self._ask(
            lambda channel: store_pb2_grpc.StoreServiceStub(channel).OpenCapture(request, timeout=_OPEN_SECONDS)
        )

    async def check_reachable(self) -> store_pb2.GetStatsResponse:
        """Make sure that the store answers; return what it says.

        Raises:
            Failure: It does not.
        """
        request = store_pb2.GetStatsRequest()
        return await self._ask(
            lambda channel: store_pb2_grpc.StoreServiceStub(channel).GetStats(request, timeout=_OPEN_SECONDS)
        )

    async def open(self, description: capture_pb2.CaptureDescription) -> None:
        """Create a capture.

        Raises:
            Failure: The store does not answer, or refuses.
        """
        request = store_pb2.OpenCaptureRequest(description=description)
        path = tenant_path(description.tenant, description.capture_id)
        self._open.add(path)
        try:
            await self._ask(
                lambda channel: store_pb2_grpc.StoreServiceStub(channel).OpenCapture(request, timeout=_OPEN_SECONDS)
            )
        except Failure as failure:
            if not isinstance(failure, NoAnswerError):  # after which it may be open, and the caller seals it
                self._open.discard(path)
            raise

    def seal(self, request: store_pb2.SealCaptureRequest) -> None:
        """Say how a request ended. Returns at once; it is tried until the store has heard it."""
        path = tenant_path(request.tenant, request.capture_id)
        task = asyncio.create_task(self._seal(request), name=path)
        self._seals.add(task)
        task.add_done_callback(self._seals.discard)
        task.add_done_callback(lambda _: self._open.discard(path))

    async def close(self, grace_seconds: float) -> None:
        """Wait for seals that are under way, and disconnect."""
        if self._seals:
            _, late = await asyncio.wait(self._seals, timeout=grace_seconds)
            for task in late:
                task.cancel()
            if late:
                names = sorted(task.get_name() for task in late)
                _log.error(
                    "captures were not sealed: the store did not answer in time", store=str(self.store), captures=names
                )
        await self._channel.close()

    def _connect(self) -> grpc.aio.Channel:
        # A store that does not answer is told at once: whoever asked may try again, and seals are tried again below.
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
            self._note(answered=failure.reason != Reason.ERROR_REASON_STORE_UNREACHABLE)
            raise failure from error
        except CredentialsError as error:
            self._note(answered=False)
            raise self._unreachable(str(error)) from error
        self._note(answered=True)
        return answer

    def _note(self, *, answered: bool) -> None:
        self.answered = answered
        self._silent_since = -math.inf if answered else time.monotonic()

    async def _call(self, call: Callable[[grpc.aio.Channel], Awaitable[_T]]) -> _T:
        try:
            return await call(self._channel)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            # The channel may be waiting to connect again. A new one does so now, and finds a store that is back.
            async with self._connect() as fresh:
                return await call(fresh)

    async def _seal(self, request: store_pb2.SealCaptureRequest) -> None:
        backoff = 0.1
        cause: str | None = None
        while True:
            before = cause
            try:
                await self._call(
                    lambda channel: store_pb2_grpc.StoreServiceStub(channel).SealCapture(request, timeout=_SEAL_SECONDS)
                )
            except grpc.aio.AioRpcError as error:
                cause = error.details() or error.code().name
                if _is_final(error):
                    self._log_seal("capture not sealed", request, cause)
                    return
                self._note(answered=error.code() not in _UNREACHABLE)
            except CredentialsError as error:  # the file is being replaced, perhaps
                cause = str(error)
                self._note(answered=False)
            else:
                return
            if before is None:
                self._log_seal("capture not sealed yet; it is tried again", request, cause)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - spreads retries, no secret
            backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)

    def _log_seal(self, event: str, request: store_pb2.SealCaptureRequest, cause: str) -> None:
        _log.warning(event, store=str(self.store), request_id=request.capture_id, cause=cause)

    def _failure(self, error: grpc.aio.AioRpcError) -> Failure:
        failure = failure_from_rpc_error(error)
        if failure is not None and failure.reason in _OUR_OWN_TOKEN:
            # Not the caller's: it would look for the fault in its own token.
            return self._unreachable(f"it refuses this service's own token, see --store-token-file: {failure.message}")
        if failure is not None and failure.code not in _UNREACHABLE:
            return failure
        kind = NoAnswerError if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED else Failure
        return self._unreachable(error.details(), kind)

    def _unreachable(self, cause: str | None, kind: type[Failure] = Failure) -> Failure:
        place = f"at {self.store}" if self.store.name == self.store.endpoint else str(self.store)
        consequence = (
            "Nothing can be captured until it does; requests without a capture are served."
            if self._is_alone
            else "Until it does, no capture can be made whose id belongs there; those of other ids are."
        )
        return kind(
            Reason.ERROR_REASON_STORE_UNREACHABLE,
            f"The store {place} does not answer ({cause}). {consequence}",
            endpoint=self.store.endpoint,
            store=self.store.name,
        )


def _is_final(error: grpc.aio.AioRpcError) -> bool:
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return failure_from_rpc_error(error) is None  # not the store's want of room, but gRPC's: the seal is too large
    return error.code() in _FINAL
