"""Checks the arguments and collects the results of many generations. Both clients use it."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Union

import numpy as np

from residuum.exceptions import (
    AlreadyExists,
    BadVector,
    BatchFailed,
    InvalidRequest,
    OutageWarning,
    ResiduumError,
    UnknownLayer,
    UnknownModel,
    UnknownOperation,
    UnknownSite,
    Unreachable,
)
from residuum.protocol.arguments import check_whole_number, short
from residuum.protocol.caller import callers_place
from residuum.protocol.deadlines import Deadline
from residuum.protocol.requests import IfExists, Prompt, check_if_exists, check_probes
from residuum.protocol.sampling import sampling_parameters
from residuum.transport.connections import ReadRetries, is_away
from residuum.values.captures.capture import Capture
from residuum.values.probes.probe import Probe
from residuum.values.probes.rules import Rule
from residuum.values.replies.generation import Reply
from residuum.values.steering.operation_list import operation_list
from residuum.values.steering.operations import Operation


def _check_prompts(prompts: Iterable[Prompt], sampling: Mapping[str, Any]) -> list[Prompt]:
    if "updatable" in sampling:
        raise TypeError(
            "generate_many() takes no updatable: its requests have no streams through which to change their steering. "
            "Use stream(updatable=True) for each prompt."
        )
    for name in ("request_id", "registration"):
        if name in sampling:
            raise TypeError(
                f"generate_many() takes no {name}, which belongs to one request. Give request_ids=[...], use the IDs "
                f"of the replies, or call generate({name}=...) for each prompt."
            )
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(f"generate_many() takes a list of prompts, not {short(prompts)}. For one prompt, use [prompt].")
    items = list(prompts)
    if items and all(isinstance(item, (int, np.integer, Mapping)) for item in items):
        raise TypeError(
            "generate_many() takes a list of prompts, but this is one prompt: a list of token IDs or one conversation. "
            "Use [prompt]."
        )
    for index, item in enumerate(items):  # now, because this error ends the batch, and its replies would be lost
        if isinstance(item, (bytes, Mapping)) or not isinstance(item, Iterable):
            raise TypeError(
                "generate_many() takes prompts that are texts, lists of token IDs or conversations, but prompt "
                f"{index} is {short(item)}."
            )
    return items


def check_concurrency(max_concurrency: int) -> int:
    """Return `max_concurrency` after checking it.

    Raises:
        InvalidRequest: It is below 1.
        TypeError: It is no whole number.
    """
    if check_whole_number("max_concurrency", max_concurrency) < 1:
        raise InvalidRequest(f"max_concurrency must be at least 1, not {max_concurrency}.", reason="INVALID_FIELD")
    return max_concurrency


Steering = Union[Operation, Iterable[Any], None]  # noqa: UP007 - evaluated at run time on Python 3.10
"""The operations for every prompt; or a list with one item for each prompt: its operations, or None."""


@dataclass(frozen=True)
class BatchPlan:
    """The arguments of each generation in a batch."""

    prompts: list[Prompt]
    """The prompts."""
    captures: list[Capture | None]
    """What to capture of each prompt."""
    steering: list[list[Operation]]
    """How to steer each prompt."""
    request_ids: list[str | None]
    """The ID of each request; None if the server makes it."""
    if_exists: list[IfExists]
    """What to do if the capture of a prompt exists."""
    is_uniform: bool
    """Whether all prompts share their capture and steering."""
    probes: tuple[Probe, ...] = ()
    """The probes of every prompt."""
    score_prompt: bool = False
    """Whether the positions of the prompts are scored."""
    rules: tuple[Rule, ...] = ()
    """The rules of every prompt."""
    without_operator_rules: bool = False
    """Whether the operator's rules are left out."""

    @classmethod
    def of(
        cls,
        prompts: Iterable[Prompt],
        capture: Capture | Iterable[Capture | None] | None,
        steer: Steering,
        sampling: Mapping[str, Any],
        *,
        request_ids: Iterable[str] | None = None,
        if_exists: IfExists = "fail",
        probes: Probe | Iterable[Probe] | None = None,
        score_prompt: bool = False,
        rules: Rule | Iterable[Rule] | None = None,
        without_operator_rules: bool = False,
    ) -> BatchPlan:
        """Return the arguments for each prompt after checking them.

        Raises:
            TypeError: `prompts` is a single prompt, or an argument has the wrong type or belongs to a single request.
            InvalidRequest: The items of an argument are not one for each prompt, two request IDs are the same, or an
                argument that all prompts share is invalid.
        """
        items = _check_prompts(prompts, sampling)
        captures, steering = _captures(capture, len(items)), _steering(steer, len(items))
        names = _request_ids(request_ids, len(items))
        asked, chosen = check_probes(probes, rules, score_prompt=score_prompt)
        is_uniform = all(item is captures[0] for item in captures) and all(item is steering[0] for item in steering)
        if items:
            sampling_parameters(sampling)
            check_if_exists(if_exists, has_both=names[0] is not None and any(captures))
            if is_uniform and captures[0] is not None:
                captures[0].to_proto()
        choices = _if_exists(if_exists, captures)
        return cls(
            items, captures, steering, names, choices, is_uniform, chosen, score_prompt, asked, without_operator_rules
        )

    @property
    def can_skip(self) -> bool:
        """Whether the same call with if_exists="skip" would generate only what is not complete."""
        return any(self.captures) and all(self.request_ids)

    def may_repeat(self, index: int) -> bool:
        """Return whether a prompt may be generated again after its reply broke off: its capture is then replaced."""
        return self.request_ids[index] is not None and self.if_exists[index] in {"skip", "replace"}


def _captures(capture: Capture | Iterable[Capture | None] | None, count: int) -> list[Capture | None]:
    if capture is None or isinstance(capture, Capture):
        return [capture] * count
    if not isinstance(capture, Iterable):
        raise TypeError(f"capture= takes a residuum.Capture, or a list with one for each prompt, not {short(capture)}.")
    captures = list(capture)
    for item in captures:
        if item is not None and not isinstance(item, Capture):
            raise TypeError(f"capture= takes a residuum.Capture or None for each prompt, not {short(item)}.")
    _check_count("capture", len(captures), count)
    return captures


def _steering(steer: Any, count: int) -> list[list[Operation]]:
    if isinstance(steer, Iterable) and not isinstance(steer, (str, Mapping)):
        items = list(steer)
        if any(item is None or (isinstance(item, Iterable) and not isinstance(item, (str, Mapping))) for item in items):
            _check_count("steer", len(items), count)
            return [operation_list(item) for item in items]
        steer = items
    return [operation_list(steer)] * count


def _request_ids(request_ids: Iterable[str] | None, count: int) -> list[str | None]:
    if request_ids is None:
        return [None] * count
    if isinstance(request_ids, (str, bytes)) or not isinstance(request_ids, Iterable):
        raise TypeError(f"request_ids must be a list with an ID for each prompt, not {short(request_ids)}.")
    names = list(request_ids)
    for name in names:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"request_ids must be a list with an ID for each prompt, but has {short(name)}.")
    if len(names) != count:
        raise InvalidRequest(
            f"There are {count} prompts but {len(names)} request_ids. Give one for each prompt.",
            reason="INVALID_FIELD",
        )
    twice = next((name for name, times in Counter(names).items() if times > 1), None)
    if twice is not None:
        raise InvalidRequest(
            f"request_ids has {twice!r} more than once. Give each prompt an ID of its own.", reason="INVALID_FIELD"
        )
    return [*names]


def _if_exists(choice: IfExists, captures: list[Capture | None]) -> list[IfExists]:
    """Return `if_exists` for each prompt. In a batch with captures, prompts without a capture get "fail"."""
    if not any(captures):
        return [choice] * len(captures)
    return ["fail" if capture is None else choice for capture in captures]


def _check_count(name: str, given: int, count: int) -> None:
    if given != count:
        raise InvalidRequest(
            f"{name}= has {given} items, but there are {count} prompts. Give one item for each prompt, or a single one "
            "for all.",
            reason="INVALID_FIELD",
            metadata={"field": name},
        )


class Outage:
    """The time in which a service does not answer the prompts of a batch. Thread-safe.

    A prompt that the service did not accept is tried again. A prompt whose reply broke off is tried again only if its
    plan allows it, because it would otherwise be generated twice. During an outage, one prompt at a time is tried.
    """

    def __init__(self, plan: BatchPlan, patience: Callable[[ResiduumError], float], timeout: float | None) -> None:
        """Start with services that answer. Call this in the thread and task of the caller, whose line a warning names.

        Args:
            plan: The batch.
            patience: Returns for how many seconds a service may be away after a failure.
            timeout: The seconds to use instead; None if there are none.
        """
        self._plan = plan
        self._patience = patience
        self._timeout = timeout
        self._place = callers_place()  # the threads and tasks that warn do not know it
        self._retries = ReadRetries(Deadline(None))
        self._lock = threading.Lock()
        self._broken: set[int] = set()
        self._seconds = 0.0
        self._verdict: ResiduumError | None = None
        self.is_on = False
        """Whether a service does not answer at the moment."""

    def seconds(self) -> float:
        """Return the seconds to wait before the next attempt.

        Raises:
            ResiduumError: The service was away for too long.
        """
        with self._lock:
            if self._verdict is not None:
                raise self._verdict
            return self._seconds if self.is_on else 0.0

    def end(self) -> None:
        """Note that the service has answered an attempt."""
        with self._lock:
            self.is_on = False
            self._retries.progress()

    def note(self, index: int, failure: ResiduumError, *, was_accepted: bool = False, is_attempt: bool = False) -> None:
        """Note the failure of a prompt, and return if the prompt is to be tried again.

        Args:
            index: The prompt.
            failure: Its failure.
            was_accepted: Whether the service had accepted the request.
            is_attempt: Whether the prompt was tried during the outage.

        Raises:
            ResiduumError: The prompt has failed.
        """
        if is_attempt and not self._is_of_outage(index, failure):
            self.end()
        if not self._is_of_outage(index, failure) or (was_accepted and not self._plan.may_repeat(index)):
            raise failure
        with self._lock:
            # If the connection broke, the request may run, and its capture may exist, although no answer came.
            if self._plan.may_repeat(index) and (was_accepted or isinstance(failure, Unreachable)):
                self._broken.add(index)
            if self.is_on and not is_attempt:
                return
            patience = self._patience(failure) if self._timeout is None else self._timeout
            seconds = self._retries.seconds_after(failure, patience, retry_all=True)
            if seconds is None:
                self._verdict = self._retries.verdict(failure) or failure
                raise self._verdict
            is_new, self.is_on, self._seconds = not self.is_on, True, seconds
        if is_new:
            warnings.warn_explicit(
                f"The batch waits up to {patience:.0f} s until it can continue, and starts no prompts until then: "
                f"{failure}",
                OutageWarning,
                *self._place[:3],  # without what was shown before: each outage is another one
            )

    def _is_of_outage(self, index: int, failure: ResiduumError) -> bool:
        # The store may still count the request that broke off as running, until the lease of its service runs out.
        return is_away(failure) or (index in self._broken and isinstance(failure, AlreadyExists))


_COMMON: tuple[type[ResiduumError], ...] = (BadVector, UnknownLayer, UnknownModel, UnknownOperation, UnknownSite)
_COMMON_FIELDS = ("capture", "if_exists", "probes", "sampling", "steering")


def is_common(failure: ResiduumError | None) -> bool:
    """Tell whether a failure is about the arguments that all prompts may share."""
    field = failure.metadata.get("field", "") if isinstance(failure, InvalidRequest) else ""
    return isinstance(failure, _COMMON) or field.split(".")[0] in _COMMON_FIELDS


class BatchResults:
    """The outcome of each prompt of a batch, as far as it is known."""

    def __init__(self, plan: BatchPlan) -> None:
        """Create the results of a batch in which no prompt has ended."""
        self._plan = plan
        self.replies: list[Reply | None] = [None] * len(plan.prompts)
        """The replies; None for a prompt that failed or has not ended."""
        self.errors: dict[int, ResiduumError] = {}
        """The failures, by the index of the prompt."""
        self._common: ResiduumError | None = None

    def add(self, index: int, outcome: Reply | ResiduumError) -> None:
        """Record the outcome of a prompt."""
        if isinstance(outcome, ResiduumError) and index == 0 and self._plan.is_uniform and is_common(outcome):
            self._common = outcome
        if isinstance(outcome, ResiduumError):
            self.errors[index] = outcome
        else:
            self.replies[index] = outcome

    def check_common(self) -> None:
        """Check that the arguments that all prompts share are valid, as far as the first prompt shows.

        Raises:
            ResiduumError: The failure of the first prompt, which all others would have too.
        """
        if self._common is not None:
            raise self._common

    @property
    def can_skip(self) -> bool:
        """Whether the same call with if_exists="skip" finishes the rest."""
        return self._plan.can_skip

    def check(self) -> None:
        """Check that no prompt failed.

        Raises:
            BatchFailed: Some prompts failed.
        """
        if self.errors:
            raise BatchFailed(self.replies, self.errors, can_skip=self.can_skip)

    def all_replies(self) -> list[Reply]:
        """Return the replies of a batch in which all prompts have ended.

        Raises:
            BatchFailed: Some prompts failed.
        """
        self.check()
        return [reply for reply in self.replies if reply is not None]
