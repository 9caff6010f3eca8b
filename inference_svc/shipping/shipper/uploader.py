"""The uploader: it keeps a stream of AppendChunks to one store until every parcel is acknowledged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import grpc

from inference_svc.shipping.shipper.outbox import Outbox, Settled
from inference_svc.shipping.shipper.parcels import Parcel
from inference_svc.shipping.shipper.shared_rings import Rings, SharedRings, StoreRings
from residuum.rpc.channels import open_channel
from residuum.rpc.credentials import Credentials, CredentialsError
from residuum.rpc.errors import Reason, failure_from_rpc_error
from residuum.v1 import errors_pb2, store_pb2
from residuum.wire.placement import StoreAddress
from svc_common.backoff import Backoff
from svc_common.logs import get_logger

_METHOD = "/residuum.v1.StoreService/AppendChunks"
_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 5.0
_LOGGED_CAPTURES = 10_000

# Rows of a capture that was deleted or has ended: async scheduling, for example, computes one step beyond the last
# token. No reader misses these rows, and the store could not record their loss either.
_UNWANTED = (Reason.ERROR_REASON_UNKNOWN_CAPTURE, Reason.ERROR_REASON_CAPTURE_ENDED)

_log = get_logger(__name__)


class Uploader:
    """Sends the parcels of an outbox to one store, on a thread of its own.

    Each stream has its own channel. So a broken connection ends with its stream, and only the backoff here delays the
    next attempt.
    """

    def __init__(
        self,
        endpoint: str,
        outbox: Outbox,
        credentials: Credentials | None = None,
        *,
        name: str = "",
        rings: Rings | None = None,
    ) -> None:
        """Prepare to send the parcels of `outbox` to the store `name` at `endpoint` (host:port); `start` starts it.

        If the store is on this machine, payloads may stay in `rings`.
        """
        self._endpoint = endpoint
        self._store = str(StoreAddress(name or endpoint, endpoint))
        self._credentials = credentials
        self._rings = StoreRings(rings, self._store)
        self._outbox = outbox
        self._backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        self._abandoned = threading.Event()
        self._call: grpc.Call | None = None
        self._unacked = 0  # parcels of the last stream that the store did not acknowledge
        self._reported: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="residuum-uploader", daemon=True)
        self.num_settled = 0
        """Parcels that the store has acknowledged or rejected."""
        self.num_rejected = 0
        """Parcels that the store has rejected."""
        self.acked_bytes = 0
        """Payload bytes that the store has acknowledged."""
        self.num_streams = 0
        """Streams that were opened."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the thread runs. It ends when the outbox is closing and all is settled, or by a defect."""
        return self._thread.is_alive()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the thread has ended, and return whether it has."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def restart_stream(self, why: str) -> None:
        """Give up the current stream, from any thread. The next one sends its unacknowledged parcels again."""
        call = self._call
        if call is not None:
            _log.warning("store stream given up", store=self._store, why=why)
            call.cancel()

    def abandon(self) -> None:
        """Stop at once, even if parcels are left. Call `Outbox.abandon` first."""
        self._abandoned.set()
        call = self._call
        if call is not None:
            call.cancel()

    def _run(self) -> None:
        while self._outbox.wait_for_parcels():
            try:
                self._run_stream()
            except grpc.RpcError as error:
                self._wait_after(error.code().name, error.details())
            except CredentialsError as error:  # retried, because the file may be in the middle of a replacement
                self._wait_after("CREDENTIALS", str(error))
            else:
                if self._unacked:
                    self._wait_after("OK", "the store ended the stream")

    def _run_stream(self) -> None:
        """Run one stream to its end."""
        with (
            open_channel(self._endpoint, credentials=self._credentials) as channel,
            closing(self._rings.begin(channel)) as shared,
        ):
            stream = self._outbox.start_stream()
            self.num_streams += 1
            # No serializer: the messages are serialised already.
            append: grpc.StreamStreamMultiCallable[bytes, store_pb2.AppendChunksResponse] = channel.stream_stream(
                _METHOD, response_deserializer=store_pb2.AppendChunksResponse.FromString
            )
            call = append(self._messages(stream, shared))
            self._call = call
            if self._abandoned.is_set():
                call.cancel()
            try:
                for response in call:
                    self._settle(self._outbox.acknowledge(response))
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    self._refuse_suspect(error)
                failure = failure_from_rpc_error(error)
                if failure is not None and failure.reason == Reason.ERROR_REASON_UNKNOWN_MEMORY:
                    self._rings.pause()
                raise
            finally:
                self._call = None
                # This also lets gRPC's thread return from `_messages`.
                self._unacked = self._outbox.end_stream()

    def _messages(self, stream: int, shared: SharedRings) -> Iterator[bytes]:
        """Return a stream's messages. They are taken on gRPC's thread, which waits here while no parcel can be sent."""
        return iter(lambda: self._next_message(stream, shared), None)

    def _next_message(self, stream: int, shared: SharedRings) -> bytes | None:
        # Not a generator: while it waited, its variables would keep a parcel, and so the ring of an ended worker.
        following = self._outbox.wait_for_next(stream)
        if following is None:
            return None
        target_bytes = following.target_bytes(shared)
        if following.num_bytes > target_bytes:
            self._outbox.split(following, target_bytes)
        taken = self._outbox.take(stream)
        if taken is None:
            return None
        number, parcel = taken
        return parcel.encode(number, shared)

    def _settle(self, all_settled: list[Settled]) -> None:
        for settled in all_settled:
            self.num_settled += 1
            if settled.error is None:
                self.acked_bytes += settled.parcel.num_bytes
                settled.parcel.settle()
            else:
                self._settle_rejected(settled.parcel, settled.error)
        if all_settled:
            self._backoff.reset()

    def _settle_rejected(self, parcel: Parcel, error: errors_pb2.ItemError) -> None:
        self.num_rejected += 1
        if error.reason in _UNWANTED:
            parcel.settle()
        elif error.reason == Reason.ERROR_REASON_CHECKSUM_MISMATCH and not parcel.resent:
            parcel.resent = True  # it may have been damaged on its way, and the ring still has the rows
            self._outbox.put([parcel])
        else:
            self._report(parcel.capture_id, error)
            self._give_up(parcel, f"the store rejected rows: {error.message}")

    def _refuse_suspect(self, error: grpc.RpcError) -> None:
        """Replace a message that the store cannot parse with a loss report. Otherwise every retry would fail on it."""
        parcel = self._outbox.suspect()
        if parcel is not None:
            self.num_rejected += 1
            _log.error(
                "store cannot read a message", store=self._store, request_id=parcel.capture_id, error=error.details()
            )
            self._give_up(parcel, f"the store cannot read the chunk: {error.details()}")

    def _give_up(self, parcel: Parcel, detail: str) -> None:
        loss = parcel.as_loss(detail)
        if loss is None:
            parcel.settle()
        else:
            self._outbox.put([loss])

    def _report(self, capture_id: str, error: errors_pb2.ItemError) -> None:
        """Log a rejection, only once for each capture."""
        if capture_id in self._reported:
            return
        if len(self._reported) >= _LOGGED_CAPTURES:
            self._reported.clear()
        self._reported.add(capture_id)
        reason = errors_pb2.ErrorReason.Name(error.reason)
        _log.warning(
            "store rejected rows", store=self._store, request_id=capture_id, reason=reason, error=error.message
        )

    def _wait_after(self, code: str, error: str | None) -> None:
        delay = self._backoff.next_delay()
        if self._backoff.worth_logging() and not self._abandoned.is_set():
            _log.warning(
                "store stream ended; what is not acknowledged will be sent again",
                store=self._store,
                code=code,
                error=error,
                failures=self._backoff.failures,
                delay_seconds=round(delay, 2),
            )
        self._abandoned.wait(delay)
