"""Seals captures in one store, many with one call, in the background."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from inference_svc.captures.batches import Batches, together
from inference_svc.captures.store_link import CallError
from residuum.rpc.errors import Failure
from residuum.rpc.methods import SEAL_CAPTURE, SEAL_CAPTURES
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.limits import MAX_SEAL_BYTES
from svc_common.backoff import Backoff
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from inference_svc.captures.store_link import StoreLink

_log = get_logger(__name__)

_Response = TypeVar("_Response", bound=Message)

_SEAL_SECONDS = 10.0
_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 5.0

_DETAIL_LENGTH = 1000

_TRIES_TO_COME = 6
"""How often a seal that the store does not know is repeated if its open had no answer: for at least 3 s."""

_FINAL = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
"""Failures of a seal that no retry can mend: the capture was deleted or has ended, or the seal is malformed."""


@dataclass(eq=False)
class _Sealing:
    """One attempt to seal a capture."""

    data: bytes
    """The SealCaptureRequest, serialised."""
    answer: asyncio.Future[Failure | Exception | None]
    """None: the capture is sealed. Otherwise the Failure of the capture, or the error of the call."""

    def end(self, error: Exception | None) -> None:
        """Set the answer, unless the service has stopped to wait for it."""
        if not self.answer.done():
            self.answer.set_result(error)


class Sealings:
    """Seals captures. A failure of one does not affect the others."""

    def __init__(self, link: StoreLink) -> None:
        """Seal captures through this connection."""
        self._link = link
        self._batches = Batches(self._send)

    async def seal(self, request: store_pb2.SealCaptureRequest, *, may_come: bool = False) -> None:
        """Seal a capture, and retry until the store answers.

        Args:
            request: The seal.
            may_come: The open had no answer, so a capture that the store does not know may still come: a store that
                stood still for a while carries out the calls of that time in any order.
        """
        backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        has_failed = False
        tries_left = _TRIES_TO_COME if may_come else 0
        size, is_short = request.ByteSize(), False
        if size > MAX_SEAL_BYTES:  # also too large for a message, perhaps: that looks like a store that is busy
            request, is_short = self._shortened(request, f"it takes {size} bytes, and may take {MAX_SEAL_BYTES}"), True
        while (error := await self._try(request)) is not None:
            cause = _cause(error)
            is_coming = _code(error) == grpc.StatusCode.NOT_FOUND and tries_left > 0
            tries_left -= is_coming
            if _code(error) == grpc.StatusCode.INVALID_ARGUMENT and not is_short:
                request, is_short = self._shortened(request, cause), True
                continue
            if _is_final(error) and not is_coming:
                self._log_seal("capture not sealed", request, cause)
                return
            if not isinstance(error, Failure):  # those of captures have been noted
                self._link.noted_failure(error)
            if not has_failed:
                self._log_seal("capture not sealed yet; the service retries", request, cause)
            has_failed = True
            await asyncio.sleep(backoff.next_delay())

    def _shortened(self, request: store_pb2.SealCaptureRequest, cause: str) -> store_pb2.SealCaptureRequest:
        """Return a seal with which a capture ends INCOMPLETE, because the store takes no seal with all that it had."""
        self._log_seal("the seal cannot be stored; the capture ends INCOMPLETE", request, cause)
        return store_pb2.SealCaptureRequest(
            capture_id=request.capture_id,
            tenant=request.tenant,
            attempt=request.attempt,
            sequences=[
                capture_pb2.SequenceOutcome(
                    generated_token_ids=sequence.generated_token_ids, finish_reason=sequence.finish_reason
                )
                for sequence in request.sequences
            ],
            outcome=capture_pb2.CAPTURE_STATE_INCOMPLETE,
            incomplete_reason=capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED,
            incomplete_detail=f"The seal of the capture could not be stored: {cause}"[:_DETAIL_LENGTH],
        )

    async def _try(self, request: store_pb2.SealCaptureRequest) -> Exception | None:
        sealing = _Sealing(request.SerializeToString(), asyncio.get_running_loop().create_future())
        self._batches.add(sealing)
        return await sealing.answer

    async def _send(self, sealings: list[_Sealing], release: Callable[[], None]) -> None:
        """Send seals, and set their answers."""
        try:
            await self._send_together(sealings, release)
        except Exception as error:  # noqa: BLE001 - of any class: the seals are retried
            for sealing in sealings:
                sealing.end(error)

    async def _send_together(self, sealings: Sequence[_Sealing], release: Callable[[], None]) -> None:
        if not self._link.is_older:
            request = together(store_pb2.SealCapturesRequest.SEALS_FIELD_NUMBER, sealings)
            try:
                response = await self._link.call(partial(_call, SEAL_CAPTURES, request, store_pb2.SealCapturesResponse))
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNIMPLEMENTED:
                    raise
                self._link.note_older()
            else:
                self._take(sealings, response.results)
                return
        release()
        await asyncio.gather(*map(self._send_alone, sealings))

    def _take(self, sealings: Sequence[_Sealing], results: Iterable[store_pb2.SealCapturesResult]) -> None:
        failures = []
        for sealing, result in zip(sealings, results, strict=True):
            failure = self._link.item_failure(result.error) if result.HasField("error") else None
            if failure is not None and not _is_final(failure):
                failures.append(failure)
            sealing.end(failure)
        if failures:
            self._link.note_items(failures)

    async def _send_alone(self, sealing: _Sealing) -> None:
        """Seal a capture in a store that is older than SealCaptures."""
        try:
            await self._link.call(partial(_call, SEAL_CAPTURE, sealing.data, store_pb2.SealCaptureResponse))
        except CallError as error:
            sealing.end(error)
        else:
            sealing.end(None)

    def _log_seal(self, event: str, request: store_pb2.SealCaptureRequest, cause: str) -> None:
        _log.warning(event, store=str(self._link.store), request_id=request.capture_id, cause=cause)


async def _call(method: str, request: bytes, response: type[_Response], channel: grpc.aio.Channel) -> _Response:
    # One method, because every request with a capture calls it, and a stub makes all methods of the store.
    call = channel.unary_unary(method, bytes, response.FromString)
    answer: _Response = await call(request, timeout=_SEAL_SECONDS)
    return answer


def _cause(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error)


def _is_final(error: Exception) -> bool:
    return _code(error) in _FINAL


def _code(error: Exception) -> grpc.StatusCode | None:
    if isinstance(error, Failure):
        return error.code
    return error.code() if isinstance(error, grpc.aio.AioRpcError) else None
