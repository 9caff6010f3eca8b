"""The connection to one store: makes calls, repeats them if the store is back, and explains why one failed."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from residuum.rpc.channels import open_aio_channel
from residuum.rpc.credentials import CredentialsError
from residuum.rpc.errors import Failure, Reason, failure_from_rpc_error
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from residuum.rpc.credentials import Credentials
    from residuum.v1 import errors_pb2
    from residuum.wire.placement import StoreAddress

_log = get_logger(__name__)

_T = TypeVar("_T")

_AVOIDED_SECONDS = 5.0
"""How long the service avoids a store after a call without an answer, or after STORE_FULL: for this long, new IDs are
chosen so that other stores own them."""

_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

_OUR_OWN_TOKEN = (Reason.ERROR_REASON_UNAUTHENTICATED, Reason.ERROR_REASON_PERMISSION_DENIED)
"""The store's reasons for refusing this service's own token."""

CallError = (grpc.aio.AioRpcError, CredentialsError)
"""What a call to a store raises."""


class NoAnswerError(Failure):
    """The store did not answer in time. It may or may not have carried out the call."""


class StoreLink:
    """Calls one store, and knows whether it answers."""

    def __init__(self, store: StoreAddress, credentials: Credentials | None = None, *, is_alone: bool = True) -> None:
        """Prepare to call a store; the first call connects. `is_alone`: the service has no other store."""
        self.store = store
        self.answered: bool | None = None
        """Whether the store answered the last call; None before the first."""
        self.is_older = False
        """Whether the store is older than the calls that open or seal many captures."""
        self.takes_early_rows = False
        """Whether rows may be sent before the store has answered the open of their capture."""
        self._credentials = credentials
        self._is_alone = is_alone
        self._no_use_since = -math.inf
        self._channel = self._connect()

    @property
    def is_avoided(self) -> bool:
        """Whether the store recently did not answer, or was full. If the service can choose, it uses another store."""
        return time.monotonic() - self._no_use_since < _AVOIDED_SECONDS

    async def call(self, call: Callable[[grpc.aio.Channel], Awaitable[_T]]) -> _T:
        """Make an idempotent call.

        Raises:
            AioRpcError: The store does not answer, or refuses.
            CredentialsError: The file of the token cannot be read.
        """
        try:
            return await call(self._channel)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            self.takes_early_rows = False  # an older store may come in its place
            # The channel may be in its reconnect delay. A fresh channel connects now, and finds a store that is back.
            async with self._connect() as fresh:
                return await call(fresh)

    async def ask(self, call: Callable[[grpc.aio.Channel], Awaitable[_T]]) -> _T:
        """Make an idempotent call, and note how the store answers.

        Raises:
            Failure: The store does not answer, or refuses.
        """
        try:
            answer = await self.call(call)
        except CallError as error:
            raise self.noted_failure(error) from error
        self.note(answered=True)
        return answer

    def noted_failure(self, error: Exception) -> Failure:
        """Return the Failure that an error of a call stands for, and note it."""
        failure = self._failure(error) if isinstance(error, grpc.aio.AioRpcError) else self.unreachable(str(error))
        self.note_items([failure])
        return failure

    def item_failure(self, error: errors_pb2.ItemError) -> Failure:
        """Return the Failure of one item of a call. NoAnswerError: the store could not carry the item out now."""
        failure = Failure.of_item(error)
        if failure is None:  # a newer store's reason
            return self.unreachable(error.message)
        if failure.code in _UNREACHABLE:
            return self.unreachable(error.message, NoAnswerError)
        return self._not_our_token(failure)

    def note_items(self, failures: Iterable[Failure]) -> None:
        """Note how the store answered a call, by the failures of its items. One is enough to avoid the store."""
        reasons = {failure.reason for failure in failures}
        self.note(
            answered=Reason.ERROR_REASON_STORE_UNREACHABLE not in reasons,
            is_full=Reason.ERROR_REASON_STORE_FULL in reasons,
        )

    def note(self, *, answered: bool, is_full: bool = False) -> None:
        """Note whether the store answered."""
        self.answered = answered
        self.takes_early_rows &= answered and not is_full
        self._no_use_since = -math.inf if answered and not is_full else time.monotonic()

    def note_older(self) -> None:
        """Note that the store lacks the calls that open or seal many captures."""
        self.takes_early_rows = False
        if not self.is_older:
            self.is_older = True
            _log.info("the store is older: it opens and seals captures one by one", store=str(self.store))

    def unreachable(self, cause: str | None, kind: type[Failure] = Failure) -> Failure:
        """Return the Failure for a store that does not answer."""
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

    async def close(self) -> None:
        """Disconnect."""
        await self._channel.close()

    def _connect(self) -> grpc.aio.Channel:
        # Without gRPC's own retries a dead store fails at once: callers may retry, and seals are retried anyway.
        once = [("grpc.enable_retries", 0)]
        return open_aio_channel(self.store.endpoint, credentials=self._credentials, options=once)

    def _failure(self, error: grpc.aio.AioRpcError) -> Failure:
        failure = failure_from_rpc_error(error)
        if failure is not None and failure.code not in _UNREACHABLE:
            return self._not_our_token(failure)
        kind = NoAnswerError if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED else Failure
        return self.unreachable(error.details(), kind)

    def _not_our_token(self, failure: Failure) -> Failure:
        """Replace a refusal of the service's own token: callers would look for the fault in their own."""
        if failure.reason not in _OUR_OWN_TOKEN:
            return failure
        return self.unreachable(f"it refuses this service's own token, see --store-token-file: {failure.message}")
