"""Opens the capture of a request, and seals it when the request ends.

Both entry points, gRPC and `vllm serve`, capture through a `CaptureSession`. It guarantees that no capture is silently
partial:

* A capture is COMPLETE if and only if every sequence ended normally. Any other is sealed as ABORTED, or as INCOMPLETE
  with the reason.
* Every capture that may exist in the store is sealed, no matter how the request ends.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from inference_svc.admission.fields import invalid
from inference_svc.captures.store_link import NoAnswerError
from inference_svc.engine.finish_reasons import FAILED
from inference_svc.requests.token_texts import unknown_texts
from inference_svc.session.scores.kept import KeptScores, leave_out_scores
from inference_svc.session.sequences import GeneratedSequence
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, steering_pb2, store_pb2
from residuum.wire.limits import MAX_DESCRIPTION_BYTES, MAX_MESSAGE_SPANS, MAX_SEAL_BYTES
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from inference_svc.model_facts import ModelFacts
    from inference_svc.requests.registry import Running
    from inference_svc.requests.token_texts import TokenTexts

    CompleteSeal = Callable[[store_pb2.SealCaptureRequest], Awaitable[None]]

_log = get_logger(__name__)

_MAX_DESCRIPTION_BYTES = MAX_DESCRIPTION_BYTES - 256
"""The largest description here. The rest is for the service's instance, which is added when the capture is opened."""

_TEXTS_TOO_LONG = "The texts of all tokens are too long to be kept with the capture."
_TOO_MANY_MESSAGES = "The conversation has too many messages, or too long roles, to keep their positions."
_NO_ROOM_FOR_SCORES = "The seal of the capture has no room for its scores, because it has too many tokens."
_FAILED = "The texts could not be made; the log of the inference service says why."


class CaptureStore(Protocol):
    """Where captures are opened and sealed."""

    def takes_early_rows(self, capture_id: str, *, is_new_id: bool, if_exists: capture_pb2.IfExists.ValueType) -> bool:
        """Return whether rows of a capture may be sent before it is opened; see `Stores.takes_early_rows`."""

    def open(
        self,
        description: capture_pb2.CaptureDescription,
        *,
        is_new_id: bool,
        if_exists: capture_pb2.IfExists.ValueType,
        on_queued: Callable[[], object],
    ) -> Awaitable[capture_pb2.CaptureManifest | None]:
        """Create a capture; see `Stores.open`."""

    def seal(self, request: store_pb2.SealCaptureRequest, complete: CompleteSeal | None = None) -> None:
        """Seal a capture; see `Stores.seal`. Returns without waiting for the store."""


class SteeringHistory(Protocol):
    """Records how the steering of a request changed while it ran."""

    def changes(self) -> list[steering_pb2.SteeringChange]:
        """Return the changes in order."""


class CaptureSession:
    """An asynchronous context that opens the capture of a request and seals it at the end.

    The context begins as soon as rows of the capture may be sent, so that the model computes the prompt while the
    store commits the capture. Call `opened` before the caller gets anything. If rows may be sent before the store knows
    the capture, only this call opens it. So in a burst of requests, the engine gets all of them first.

    For a request that captures nothing, it only records the sequences.

    Attributes:
        sequences: What has been generated of each sequence.
        prompt_text: The text of the prompt, if the capture keeps it. Set it before the context is entered.
        existing: The manifest of the capture that was there already and is the request's result; None: the request
            generates.
        has_begun: Whether the request counts as used: its capture exists, or may exist.
        history: The changes of the steering, recorded in the seal.
        scores: The scores, recorded in the seal; None if the request captures nothing or has no probes.
    """

    def __init__(
        self,
        facts: ModelFacts,
        running: Running,
        token_ids: Sequence[int],
        num_sequences: int,
        store: Callable[[], CaptureStore],
        cause_of: Callable[[Exception], Exception] = lambda error: error,
        sampling_digest: Callable[[], bytes] = bytes,
        max_generated_tokens: int = 0,
        new_texts: Callable[[], TokenTexts | None] = lambda: None,
        describe_prompt: CompleteSeal | None = None,
        wait_to_seal: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Prepare the session of a request.

        Args:
            facts: The facts of the model.
            running: The request.
            token_ids: The tokens of its prompt.
            num_sequences: How many sequences it generates.
            store: Returns the store for the capture, or raises `Failure` if there is none. Called only for a request
                that captures.
            cause_of: Translates an exception that ended the request into the failure that the seal records.
            sampling_digest: Returns a hash of its sampling parameters. Called when the capture is opened.
            max_generated_tokens: The most tokens that each sequence may generate; 0 if that is not known.
            new_texts: Returns a new collection of the texts of tokens that follow the prompt; None without a tokenizer.
            describe_prompt: Adds the texts of the prompt's tokens and the positions of its messages to a seal. Called
                after the request has ended, so that no token waits for it.
            wait_to_seal: Returns when the capture may be sealed; None: it is sealed at once. Called after the request
                has ended, on the event loop of the store's client.
        """
        self._facts = facts
        self._running = running
        self._token_ids = token_ids
        self._store = store
        self._cause_of = cause_of
        self._sampling_digest = sampling_digest
        self._max_generated_tokens = max_generated_tokens
        self.existing: capture_pb2.CaptureManifest | None = None
        self._describe_prompt = describe_prompt
        self._wait_to_seal = wait_to_seal
        self.sequences = [GeneratedSequence(texts=new_texts()) for _ in range(num_sequences)]
        self.prompt_text = ""
        self.has_begun = False
        self.history: SteeringHistory | None = None
        self._opening: asyncio.Future[capture_pb2.CaptureManifest | None] | None = None
        self._has_asked = False
        probes = running.spec.own_probes
        self.scores = KeptScores(len(probes.probes), num_sequences) if running.spec.capture and probes else None

    @property
    def is_complete(self) -> bool:
        """Whether every sequence has ended normally."""
        return all(sequence.is_complete for sequence in self.sequences)

    async def __aenter__(self) -> Self:
        """Begin to open the capture, unless its rows may be sent before it is opened.

        Raises:
            Failure: There is no store, the text of the prompt is too long, or the store refuses or does not answer.
        """
        spec = self._running.spec
        if self.prompt_text:
            self._check_prompt_text()
        if spec.capture is not None and not self._store().takes_early_rows(
            self._running.request_id, is_new_id=not spec.request_id, if_exists=spec.if_exists
        ):
            try:
                await self._begin()
            except (asyncio.CancelledError, NoAnswerError):
                # The store may have opened the capture, and nothing else would seal it.
                self.has_begun = True
                self._seal(None)
                raise
        self.has_begun = True
        return self

    async def opened(self) -> None:
        """Open the capture, if that has not begun, and wait until the store has opened it.

        Raises:
            Failure: The store refuses or does not answer.
        """
        if self._running.spec.capture is None:
            return
        opening = self._opening or self._open()
        try:
            self.existing = await asyncio.shield(opening)  # a caller that leaves does not break off the call
        except Failure as failure:
            self.has_begun = isinstance(failure, NoAnswerError)  # without an answer, the capture may exist
            # The call keeps the failure, whose traceback keeps the frames of the call and of this: break the cycles.
            self._opening = None
            del opening
            raise failure.with_traceback(None) from None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Seal the capture. Its outcome depends on the sequences, and on the exception that ended the request."""
        del kind, traceback
        if self._running.spec.capture is not None and self.existing is None and self.has_begun:
            if not self._has_asked:
                self._open()  # rows may have been sent; the seal follows the open
            self._seal(error)

    async def _begin(self) -> None:
        """Ask the store to open the capture, and wait until rows may be sent."""
        queued = asyncio.Event()
        opening = self._open(queued.set)
        opening.add_done_callback(lambda _: queued.set())
        try:
            await queued.wait()
        except asyncio.CancelledError:
            opening.cancel()
            raise
        is_over = opening.done()
        del opening  # see `opened`
        if is_over or self._running.spec.if_exists == capture_pb2.IF_EXISTS_SKIP:
            await self.opened()

    def _open(
        self, on_queued: Callable[[], object] = lambda: None
    ) -> asyncio.Future[capture_pb2.CaptureManifest | None]:
        """Start to open the capture."""
        spec = self._running.spec
        self._has_asked = True
        opening = self._store().open(
            self._description(), is_new_id=not spec.request_id, if_exists=spec.if_exists, on_queued=on_queued
        )
        self._opening = asyncio.ensure_future(opening)
        self._opening.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it
        return self._opening

    def _seal(self, error: BaseException | None) -> None:
        self._store().seal(self._seal_request(error), self._complete)

    async def _complete(self, seal: store_pb2.SealCaptureRequest) -> None:
        """Add what a seal can do without: descriptions of the tokens. The capture is sealed whatever happens here."""
        if self._wait_to_seal is not None:
            await self._wait_to_seal()
        try:
            if self._describe_prompt is not None:
                await self._describe_prompt(seal)
        except Exception:  # noqa: BLE001 - of the tokenizer or the template, so of any class
            _log.exception("the prompt's tokens are not described", request_id=seal.capture_id)
            seal.prompt_token_texts.CopyFrom(unknown_texts(_FAILED))
            seal.message_spans.CopyFrom(capture_pb2.MessageSpans(unknown_detail=_FAILED))
        if seal.ByteSize() > MAX_SEAL_BYTES and self.scores is not None:
            leave_out_scores(seal, _NO_ROOM_FOR_SCORES)
        if seal.ByteSize() > MAX_SEAL_BYTES:
            for texts in (seal.prompt_token_texts, *(sequence.token_texts for sequence in seal.sequences)):
                texts.CopyFrom(unknown_texts(_TEXTS_TOO_LONG))
        if seal.ByteSize() > MAX_SEAL_BYTES or len(seal.message_spans.spans) > MAX_MESSAGE_SPANS:
            seal.message_spans.CopyFrom(capture_pb2.MessageSpans(unknown_detail=_TOO_MANY_MESSAGES))

    def _site_widths(self) -> Sequence[int]:
        """Return the widths of the rows; empty if all are as wide as the stream."""
        capture = self._running.spec.capture
        widths = [self._facts.width(site) for site in capture.sites] if capture is not None else []
        return widths if set(widths) != {self._facts.hidden_size} else ()

    def _description(self) -> capture_pb2.CaptureDescription:
        """Return the description of the request that the store keeps from the start of the capture."""
        facts, running = self._facts, self._running
        description = capture_pb2.CaptureDescription(
            capture_id=running.request_id,
            tenant=running.tenant,
            model=facts.name,
            adapter=running.spec.adapter,
            hidden_size=facts.hidden_size,
            num_layers=facts.num_layers,
            dtype=facts.dtype,
            spec=running.spec.capture,
            site_widths=self._site_widths(),
            steering=running.spec.steering,
            probes=running.spec.own_probes,
            prompt_token_ids=self._token_ids,
            prompt_text=self.prompt_text,
            num_sequences=len(self.sequences),
            layout=capture_pb2.ParallelLayout(
                tensor_parallel_size=facts.tensor_parallel_size, pipeline_parallel_size=facts.pipeline_parallel_size
            ),
            vllm_version=facts.vllm_version,
            attempt=running.attempt,
            sampling_digest=self._sampling_digest(),
            max_generated_tokens=self._max_generated_tokens,
        )
        description.request_time.GetCurrentTime()
        return description

    def _check_prompt_text(self) -> None:
        """Check that the store will accept the description. Its own refusal would name no field that callers know.

        Raises:
            Failure: The text of the prompt is too long.
        """
        size = self._description().ByteSize()
        if size > _MAX_DESCRIPTION_BYTES:
            raise invalid(
                "capture.keep_prompt",
                f"capture.keep_prompt: the text and the tokens of the prompt are too long to be kept together: the "
                f"description of the capture takes {size} bytes, and may take {_MAX_DESCRIPTION_BYTES}. Unset it; the "
                "capture has the token IDs.",
            )

    def _seal_request(self, error: BaseException | None) -> store_pb2.SealCaptureRequest:
        """Return the seal. Its outcome is COMPLETE, INCOMPLETE after a failure, or ABORTED."""
        seal = store_pb2.SealCaptureRequest(
            capture_id=self._running.request_id,
            tenant=self._running.tenant,
            attempt=self._running.attempt,
            sequences=[sequence.outcome() for sequence in self.sequences],
            outcome=capture_pb2.CAPTURE_STATE_ABORTED,
            steering_changes=self.history.changes() if self.history else (),
            rule_events=[event for sequence in self.sequences for event in sequence.rule_events],
        )
        if self.scores is not None:
            self.scores.put_into(seal)
        failure = self._failure(error)
        if self.is_complete:  # a failure after the last token does not affect the capture
            seal.outcome = capture_pb2.CAPTURE_STATE_COMPLETE
        elif failure is not None:
            seal.outcome = capture_pb2.CAPTURE_STATE_INCOMPLETE
            seal.incomplete_reason = _incomplete_reason(failure)
            # Clients see the text of a `Failure` only. Any other exception may contain private data; the log has it.
            seal.incomplete_detail = (
                failure.message if isinstance(failure, Failure) else "The engine failed; see its log."
            )
        return seal

    def _failure(self, error: BaseException | None) -> Exception | None:
        """Return the failure that ended the request; None if a client aborted it or disconnected."""
        if isinstance(error, Failure) and error.reason == Reason.ERROR_REASON_ABORTED:
            return None
        if isinstance(error, Exception):
            return self._cause_of(error)
        if any(sequence.finish_reason == FAILED for sequence in self.sequences):
            return Failure(
                Reason.ERROR_REASON_INTERNAL, "The engine stopped the request with an error; its log may say why."
            )
        return None  # CancelledError and GeneratorExit are no subclasses of `Exception`


def _incomplete_reason(failure: Exception) -> capture_pb2.IncompleteReason.ValueType:
    died = isinstance(failure, Failure) and failure.reason == Reason.ERROR_REASON_ENGINE_DEAD
    return capture_pb2.INCOMPLETE_REASON_ENGINE_DIED if died else capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED
