"""One prompt of a job: it is sent until a service has answered it, or it has failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from residuum.exceptions import (
    AlreadyExists,
    CallerStalled,
    CaptureEnded,
    DamagedCapture,
    DeadlineExceeded,
    InvalidRequest,
    LimitReached,
    PromptTooLong,
    QuotaExceeded,
    RequestAborted,
    ResiduumError,
    ServerFault,
    StoreFull,
)
from residuum.extraction.inputs.prompts import Item
from residuum.extraction.running.service import Service
from residuum.extraction.running.services import Services, goes_away
from residuum.extraction.spec import JobSpec
from residuum.protocol.requests import Prompt
from residuum.transport.batches import is_common
from residuum.values.replies.generation import Reply

MAX_ATTEMPTS = 20
"""How often a prompt is sent before the job gives up."""

_MAY_PASS = (DeadlineExceeded, RequestAborted, CallerStalled, CaptureEnded, DamagedCapture, ServerFault)
"""Failures that may not come again if the prompt is sent again. A service that stops aborts what it runs."""
_OF_THE_PROMPT = (InvalidRequest, TypeError, *_MAY_PASS)
"""Failures that concern one prompt. Others would fail all prompts."""
_FAILED_ATTEMPTS = 3
"""How often a prompt may fail with them before it counts as failed. No later run of the job sends it again."""

_PASSING_LIMITS = frozenset({"max_requests", "max_open_captures", "max_bytes"})
"""Quotas of a tenant that have room again when a request has ended, or captures were deleted."""


@dataclass(frozen=True)
class Answered:
    """A prompt that a service has answered. Its rows are in a store, or on the way there."""

    item: Item
    service: Service
    reply: Reply
    attempt: int


@dataclass(frozen=True)
class Failed:
    """A prompt that failed."""

    item: Item
    error: Exception

    @property
    def reason(self) -> str:
        """The contract's reason, or the exception's name."""
        return (self.error.reason if isinstance(self.error, ResiduumError) else "") or type(self.error).__name__


class PromptSender:
    """Sends prompts."""

    def __init__(self, spec: JobSpec, services: Services, job_id: str, timeout: float | None) -> None:
        self._spec = spec
        self.services = services
        """The services of the job."""
        self._job_id = job_id
        self._timeout = timeout

    def note_lost(self, service: Service, failure: ResiduumError) -> None:
        """Note that the stores of a service do not answer, so that its prompts are sent again.

        Raises:
            ResiduumError: No other service can answer them.
        """
        if not self.services.can_recover:
            raise failure
        self.services.note_away(service, failure)

    async def send(self, item: Item, attempt: int = 0) -> Answered | Failed:
        """Send a prompt, to another service or again if one does not answer.

        An attempt that broke off may still count as running, so the next one has another ID. In a later run of the job,
        the first attempt has the same ID as now, so a complete capture is used again.

        Args:
            item: The prompt.
            attempt: The number of attempts before.

        Raises:
            ResiduumError: All prompts would fail like this, or no service answers for too long.
        """
        if item.prompt is None:
            return Failed(item, item.error or InvalidRequest(f"{item.where} has no prompt."))
        failed_attempts = 0
        async with self.services.turn():
            while True:
                name = self._name(item, attempt)
                try:
                    return await self._send_once(item, item.prompt, name, attempt)
                except _Again as again:
                    attempt += again.is_attempt
                    if attempt >= MAX_ATTEMPTS:
                        raise again.failure from None
                except _OF_THE_PROMPT as failure:
                    if isinstance(failure, ResiduumError) and is_common(failure):
                        raise
                    failed_attempts += 1
                    if failed_attempts == _FAILED_ATTEMPTS or not isinstance(failure, _MAY_PASS):
                        return Failed(item, _without_name(failure, name))
                    attempt += 1

    async def _send_once(self, item: Item, prompt: Prompt, name: str, attempt: int) -> Answered | Failed:
        spec = self._spec
        async with self.services.service() as service:
            try:
                reply = await service.client.generate(
                    prompt, capture=spec.capture, steer=spec.steer, request_id=name, model=spec.model,
                    if_exists="skip", timeout=self._timeout, **self._sampling(prompt),
                )  # fmt: skip
            except AlreadyExists as failure:
                raise _Again(failure) from None
            except (StoreFull, LimitReached, QuotaExceeded) as failure:
                if _is_of_length(failure):
                    return Failed(item, _without_name(failure, name))
                if not _is_taken_later(failure):
                    raise
                self.services.note_refused(service, with_advice(failure))
                raise _Again(failure, is_attempt=False) from None
            except ResiduumError as failure:
                if not goes_away(failure):
                    raise
                self.services.note_away(service, failure)
                raise _Again(failure) from None
            self.services.note_answer(service)
        return self._checked(Answered(item, service, reply, attempt))

    def _sampling(self, prompt: Prompt) -> dict[str, Any]:
        """Return the sampling parameters of a prompt."""
        limit, sampling = self._spec.context_length, {"max_tokens": 0, **self._spec.sampling}
        if limit is not None and not _is_chat(prompt):
            # One token more than the limit shows that the prompt is too long. The others need not be computed.
            sampling["truncate_prompt"] = limit + (self._spec.on_long != "truncate")
        return sampling

    def _checked(self, answered: Answered) -> Answered | Failed:
        limit, count = self._spec.context_length, len(answered.reply.prompt_token_ids)
        if limit is None or count <= limit:
            return answered
        what = "conversation" if _is_chat(answered.item.prompt or "") else "prompt"
        message = f"The {what} has more than {limit} tokens, which context_length allows."
        if self._spec.on_long == "skip":
            message += " The job leaves it out."
        else:
            cannot = " A conversation cannot be truncated." if what == "conversation" else ""
            message += f"{cannot} Shorten it, or begin a new job with on_long=."
        return Failed(answered.item, PromptTooLong(message, reason="PROMPT_TOO_LONG", metadata={"limit": str(limit)}))

    def _name(self, item: Item, attempt: int) -> str:
        return f"{self._job_id}-{item.index:09}" + (f".{attempt}" if attempt else "")


def _is_taken_later(failure: ResiduumError) -> bool:
    """Tell whether a service takes the prompt when others have ended, or captures were deleted."""
    if isinstance(failure, LimitReached):
        return failure.may_pass
    return isinstance(failure, StoreFull) or failure.metadata.get("limit") in _PASSING_LIMITS


def _is_of_length(failure: ResiduumError) -> bool:
    """Tell whether a service refuses a prompt only because it is long, so that it may take shorter ones."""
    needed, allowed, by_prompt = (
        int(failure.metadata.get(name, "0")) for name in ("needed", "allowed", "needed_by_prompt")
    )
    return bool(by_prompt) and needed - by_prompt <= allowed


def with_advice(failure: ResiduumError) -> ResiduumError:
    """Return the failure, with what a job can do if a store has no room, or none for the tenant."""
    if not isinstance(failure, StoreFull) and failure.metadata.get("limit") != "max_bytes":
        return failure
    advice = (
        "The stores hold the captures of a job until their rows are on the disk. Give the store more room, or run the "
        "same job again with a smaller max_concurrency."
    )
    failure.args = (f"{failure} {advice}",)
    return failure


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and any(isinstance(part, Mapping) for part in prompt)


class _Again(Exception):  # noqa: N818 - it is no error
    """The prompt is to be sent again."""

    def __init__(self, failure: ResiduumError, *, is_attempt: bool = True) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.is_attempt = is_attempt
        """Whether this counts as an attempt. A prompt that was refused has done nothing."""


def _without_name(failure: Any, name: str) -> Any:
    """Return a failure whose message does not depend on the job's ID, so that each run records the same one."""
    failure.args = tuple(part.replace(name, "the request") if isinstance(part, str) else part for part in failure.args)
    return failure
