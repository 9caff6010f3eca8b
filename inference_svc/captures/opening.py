"""Opens captures in one store, many with one call."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from inference_svc.captures.batches import Batches, together
from inference_svc.captures.store_link import CallError, NoAnswerError
from residuum.rpc.errors import Failure
from residuum.rpc.methods import OPEN_CAPTURE, OPEN_CAPTURES, QUEUED
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.rows.frames import length_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Self

    from inference_svc.captures.store_link import StoreLink

OPEN_SECONDS = 5.0
"""The timeout of an open, and of other short calls."""


def _new_answer() -> asyncio.Future[store_pb2.OpenCaptureResponse]:
    answer: asyncio.Future[store_pb2.OpenCaptureResponse] = asyncio.get_running_loop().create_future()
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it
    return answer


@dataclass(eq=False)
class Opening:
    """One capture that is being opened."""

    data: bytes
    """The OpenCaptureRequest, serialised."""
    if_exists: capture_pb2.IfExists.ValueType
    on_queued: Callable[[], object]
    answer: asyncio.Future[store_pb2.OpenCaptureResponse] = field(default_factory=_new_answer)
    """The answer or the Failure. Cancelled: the request was never sent."""
    is_queued: bool = False
    """Whether the store has said that rows may be sent."""
    may_exist: bool = False
    """Whether a call broke that may have created the capture."""
    is_abandoned: bool = False
    """Whether nobody waits for the answer any more."""

    @classmethod
    def of(
        cls,
        description: capture_pb2.CaptureDescription,
        if_exists: capture_pb2.IfExists.ValueType,
        on_queued: Callable[[], object],
    ) -> Self:
        """Return the opening of a capture."""
        content = description.SerializeToString()  # a request with the description in it would copy it first
        head = length_prefix(store_pb2.OpenCaptureRequest.DESCRIPTION_FIELD_NUMBER, len(content))
        rest = store_pb2.OpenCaptureRequest(if_exists=if_exists).SerializeToString()
        return cls(b"".join((head, content, rest)), if_exists, on_queued)

    @property
    def may_wait(self) -> bool:
        """Whether the store may wait for rows of an existing capture, and answer with its manifest."""
        return self.if_exists == capture_pb2.IF_EXISTS_SKIP

    @property
    def made_nothing(self) -> bool:
        """Whether the store has answered that it made no capture: there is nothing to seal."""
        if not self.answer.done() or self.answer.cancelled():
            return False
        error = self.answer.exception()
        if error is None:
            return self.answer.result().HasField("existing")
        return isinstance(error, Failure) and not isinstance(error, NoAnswerError)

    def note_queued(self) -> None:
        """Note that rows may be sent."""
        self.is_queued = True
        if not self.is_abandoned:
            self.on_queued()


class Openings:
    """Opens captures. Failures and cancellations of one do not affect the others."""

    def __init__(self, link: StoreLink) -> None:
        """Open captures through this connection."""
        self._link = link
        self._batches = Batches(self._send)

    async def open(self, opening: Opening) -> store_pb2.OpenCaptureResponse:
        """Open a capture and wait for the answer.

        Raises:
            Failure: The store does not answer, or refuses.
        """
        self._batches.add(opening, alone=opening.may_wait)
        try:
            # Shielded: the call may carry other captures, too.
            return await asyncio.wait_for(asyncio.shield(opening.answer), OPEN_SECONDS)
        except asyncio.TimeoutError:  # it waits for a call that the store does not answer
            self._link.note(answered=False)
            raise self._link.unreachable("Deadline Exceeded", NoAnswerError) from None
        finally:
            opening.is_abandoned = True

    async def _send(self, openings: list[Opening], release: Callable[[], None]) -> None:
        """Send openings, and set their answers."""
        try:
            await self._send_together(_wanted(openings), release)
        except Exception as error:  # noqa: BLE001 - whatever failed, callers must not wait for nothing
            for opening in _unanswered(openings):
                opening.answer.set_exception(error)
        finally:  # also if the store ended the call too early, or the task was cancelled: seals wait for the answers
            if missing := _unanswered(openings):
                self._link.note(answered=False)
                for opening in missing:
                    opening.answer.set_exception(self._link.unreachable("it sent no result", NoAnswerError))

    async def _send_together(self, openings: Sequence[Opening], release: Callable[[], None]) -> None:
        if openings and not self._link.is_older and not openings[0].may_wait:
            try:
                return await self._link.call(partial(self._call_many, openings, release))
            except CallError as error:
                if not isinstance(error, grpc.aio.AioRpcError) or error.code() != grpc.StatusCode.UNIMPLEMENTED:
                    return self._fail(openings, error)
                self._link.note_older()
        release()
        await asyncio.gather(*map(self._send_alone, openings))
        return None

    async def _call_many(
        self, openings: Sequence[Opening], release: Callable[[], None], channel: grpc.aio.Channel
    ) -> None:
        sent = _unanswered(openings)
        request = together(store_pb2.OpenCapturesRequest.OPENS_FIELD_NUMBER, sent)
        call = channel.unary_stream(OPEN_CAPTURES, bytes, store_pb2.OpenCapturesResponse.FromString)(
            request, timeout=OPEN_SECONDS
        )
        failures: list[Failure] = []
        has_begun = False
        try:
            async for response in call:
                if not has_begun:
                    self._link.takes_early_rows = response.takes_early_rows
                has_begun = True
                release()
                for index in response.queued:
                    sent[index].note_queued()
                if response.results:
                    self._take(sent, response.results, failures)
        except grpc.aio.AioRpcError as error:
            self._end_queued(sent, error)
            unanswered = _unanswered(sent)
            for opening in unanswered:
                # The store may have committed some captures of the call, also those that were not queued, before it
                # told so: they may take several transactions. If nothing answers the second call, they are sealed.
                opening.may_exist |= has_begun and error.code() == grpc.StatusCode.UNAVAILABLE
            if unanswered:
                raise

    def _take(
        self, sent: Sequence[Opening], results: Iterable[store_pb2.OpenCapturesResult], failures: list[Failure]
    ) -> None:
        """Set answers, and note how the store answered. `failures`: those of the call so far; new ones are added."""
        for result in results:
            if result.HasField("error"):
                failures.append(self._link.item_failure(result.error))
                sent[result.index].answer.set_exception(failures[-1])
            else:
                sent[result.index].answer.set_result(result.opened)
        self._link.note_items(failures)

    def _end_queued(self, openings: Sequence[Opening], error: grpc.aio.AioRpcError) -> None:
        """End openings of a call that broke if the store said that they were queued: they are not sent again.

        The others are, also if rows of them may be on their way: a store that takes early rows keeps them until then.
        """
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            for opening in _unanswered(openings):
                if opening.is_queued:
                    self._link.note(answered=False)
                    opening.answer.set_exception(self._link.unreachable(error.details(), NoAnswerError))

    def _fail(self, openings: Sequence[Opening], error: Exception) -> None:
        for opening in _unanswered(openings):
            failure = self._link.noted_failure(error)
            if opening.may_exist:
                failure = NoAnswerError(failure.reason, failure.message, **failure.metadata)
            opening.answer.set_exception(failure)

    async def _send_alone(self, opening: Opening) -> None:
        """Open a capture that may be skipped, or one in a store that is older than OpenCaptures."""
        try:
            answer = await self._link.call(partial(self._call_one, opening))
        except CallError as error:
            self._fail([opening], error)
        else:
            if answer is not None:
                self._link.note(answered=True)
                opening.answer.set_result(answer)

    async def _call_one(self, opening: Opening, channel: grpc.aio.Channel) -> store_pb2.OpenCaptureResponse | None:
        """Call OpenCapture. gRPC's class for calls with one answer has the initial metadata only with the answer."""
        call = channel.unary_stream(OPEN_CAPTURE, bytes, store_pb2.OpenCaptureResponse.FromString)(
            opening.data, timeout=OPEN_SECONDS
        )
        if QUEUED in dict(await call.initial_metadata()):
            opening.note_queued()
        try:
            (answer,) = [answer async for answer in call]
        except grpc.aio.AioRpcError as error:
            self._end_queued([opening], error)
            if not opening.answer.done():
                raise
            return None
        return answer


def _wanted(openings: Sequence[Opening]) -> list[Opening]:
    """Return the openings that somebody waits for. The others are never sent."""
    for opening in openings:
        if opening.is_abandoned:
            opening.answer.cancel()
    return _unanswered(openings)


def _unanswered(openings: Sequence[Opening]) -> list[Opening]:
    return [opening for opening in openings if not opening.answer.done()]
