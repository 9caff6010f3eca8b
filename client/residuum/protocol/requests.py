"""Builds and checks the contract's messages from a user's arguments. No I/O: both clients use it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Union

import numpy as np

from residuum.exceptions import EmptyPrompt, InvalidRequest, PromptTooLong, UnknownCapture
from residuum.protocol.arguments import check_flag, check_text, short
from residuum.protocol.sampling import sampling_parameters
from residuum.v1 import capture_pb2, inference_pb2, steering_pb2
from residuum.values.captures.capture import Capture
from residuum.values.captures.spans import CHAT_ROLES
from residuum.values.probes.probe import Probe, probe_list
from residuum.values.probes.rules import Rule, rule_list
from residuum.values.replies.generation import Registration, Reply
from residuum.values.steering.operation_list import operation_list, steering_spec
from residuum.values.steering.operations import Operation
from residuum.values.steering.stored_row import StoredRow
from residuum.values.tensors.sae import SAE
from residuum.values.tensors.vector import Vector
from residuum.wire.ids import is_valid_id
from residuum.wire.limits import MAX_ID_LENGTH, MAX_MESSAGE_BYTES

_SHOWN = 32
"""The characters of a long ID that an error shows."""

Prompt = Union[str, Sequence[int], Sequence[Mapping[str, str]]]  # noqa: UP007 - evaluated at run time on Python 3.10
"""A text, token IDs, or a conversation as a list of {"role": ..., "content": ...}. If the last message of a
conversation is the assistant's, the reply continues it. Otherwise the reply answers it."""


IfExists = Literal["fail", "replace", "skip"]
"""What to do if a capture with the request's ID exists; see `Client.generate`."""

IF_EXISTS: dict[str, capture_pb2.IfExists.ValueType] = {
    "fail": capture_pb2.IF_EXISTS_FAIL,
    "replace": capture_pb2.IF_EXISTS_REPLACE,
    "skip": capture_pb2.IF_EXISTS_SKIP,
}
"""The contract's values of `IfExists`."""


@dataclass(frozen=True)
class SpecPlan:
    """A spec and the vectors that it names."""

    spec: inference_pb2.RequestSpec
    """The message."""
    vectors: tuple[Vector, ...]
    """The vectors, without repeats."""
    operations: tuple[Operation, ...] = ()
    """The steering."""
    probes: tuple[Probe, ...] = ()
    """The probes."""
    sae: SAE | None = None
    """The sparse autoencoder whose features are captured."""

    def filled(self, found: Mapping[StoredRow, Vector]) -> SpecPlan:
        """Return the plan with vectors in place of stored rows."""
        spec = inference_pb2.RequestSpec()
        spec.CopyFrom(self.spec)
        vectors = distinct((*self.vectors, *_fill(spec.steering, self.operations, found)))
        return replace(self, spec=spec, vectors=vectors)


@dataclass(frozen=True)
class GenerationPlan:
    """The request for a generation, and the vectors that it needs."""

    request: inference_pb2.GenerateRequest
    """The message."""
    vectors: tuple[Vector, ...]
    """The vectors, without repeats."""
    operations: tuple[Operation, ...] = ()
    """The steering; empty if the request is registered."""
    probes: tuple[Probe, ...] = ()
    """The probes, in the order of their scores. Empty if another client made the registration."""
    sae: SAE | None = None
    """The sparse autoencoder whose features are captured."""

    def filled(self, found: Mapping[StoredRow, Vector]) -> GenerationPlan:
        """Return the plan with vectors in place of stored rows."""
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        vectors = _fill(request.spec.steering, self.operations, found)
        return replace(self, request=request, vectors=distinct((*self.vectors, *vectors)))


@contextmanager
def whole_characters() -> Iterator[None]:
    """Refuse a text with half of a character, which protobuf cannot encode. JSON may name one."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{short(error.object)} has half of a character (a lone surrogate), which no text of a request can have. "
            "Correct the text, or encode it with errors='replace' and decode it again.",
            reason="INVALID_FIELD",
        ) from None


@whole_characters()
def plan_spec(
    capture: Capture | None,
    steer: Operation | Iterable[Operation] | None,
    request_id: str | None,
    model: str | None,
    *,
    updatable: bool = False,
    if_exists: str = "fail",
    probes: Probe | Iterable[Probe] | None = None,
    score_prompt: bool = False,
    rules: Rule | Iterable[Rule] | None = None,
    without_operator_rules: bool = False,
) -> SpecPlan:
    """Return the plan of a spec.

    Raises:
        InvalidRequest: The spec is invalid; the message says what to change.
        TypeError: `capture` is not a Capture, `steer` contains something other than operations, `probes` something
            other than probes, or `rules` something other than rules, or another argument has the wrong type.
    """
    if capture is not None and not isinstance(capture, Capture):
        raise TypeError(f"capture= takes a residuum.Capture, not {short(capture)}.")
    operations = operation_list(steer)
    spec = inference_pb2.RequestSpec(
        request_id="" if request_id is None else check_id(request_id),
        model="" if model is None else check_text("model", model),
    )
    spec.if_exists = check_if_exists(if_exists, has_both=bool(request_id) and capture is not None)
    if capture is not None:
        spec.capture.CopyFrom(capture.to_proto())
    updatable = check_flag("updatable", updatable)
    if operations or updatable:
        spec.steering.CopyFrom(steering_spec(_without_rows(operations), updatable=updatable))
    asked, chosen = check_probes(probes, rules, score_prompt=score_prompt)
    if chosen:
        spec.probes.score_prompt = bool(score_prompt)
        spec.probes.probes.extend(probe.to_proto() for probe in chosen)
        spec.probes.rules.extend(rule.to_proto() for rule in asked)
    if check_flag("without_operator_rules", without_operator_rules):
        spec.probes.without_operator_rules = True
    projection = capture.projection_vectors if capture is not None else ()
    probed = (vector for probe in chosen for vector in probe.vectors)
    ruled = vectors_of([operation for rule in asked for operation in rule.operations])
    vectors = distinct((*vectors_of(operations), *projection, *probed, *ruled))
    return SpecPlan(spec, vectors, tuple(operations), chosen, capture.sae if capture is not None else None)


def check_probes(
    probes: Probe | Iterable[Probe] | None, rules: Rule | Iterable[Rule] | None, *, score_prompt: bool
) -> tuple[tuple[Rule, ...], tuple[Probe, ...]]:
    """Return the rules of a request, and its probes with those of the rules.

    Raises:
        InvalidRequest: Two probes or two rules have the same name, a rule has no probe or can never fire, or
            `score_prompt` is set without probes.
        TypeError: An argument contains something else, or `score_prompt` is not a bool.
    """
    asked, chosen = rule_list(rules, probe_list(probes))
    if check_flag("score_prompt", score_prompt) and not chosen:
        raise InvalidRequest(
            "score_prompt=True needs probes=, which compute the scores. Give both.",
            reason="INVALID_FIELD",
            metadata={"field": "probes"},
        )
    return asked, chosen


def check_if_exists(choice: str, *, has_both: bool) -> capture_pb2.IfExists.ValueType:
    """Return the contract's value of `if_exists`: unspecified for "fail".

    Raises:
        InvalidRequest: The choice does not exist, or the request has no ID or no capture.
    """
    if choice == "fail":
        return capture_pb2.IF_EXISTS_UNSPECIFIED
    field = {"field": "if_exists"}
    if not isinstance(choice, str) or choice not in IF_EXISTS:
        raise InvalidRequest(
            f"if_exists={short(choice)} does not exist. Choose among {', '.join(IF_EXISTS)}.",
            reason="INVALID_FIELD",
            metadata=field,
        )
    if not has_both:
        raise InvalidRequest(
            f"if_exists={choice!r} applies to an existing capture with the request's ID, so it needs request_id= and "
            "capture=. Give both.",
            reason="INVALID_FIELD",
            metadata=field,
        )
    return IF_EXISTS[choice]


_PLACEHOLDER = Vector([1.0])
"""Stands for a stored row until the client has read it."""


def stored_rows(operations: Iterable[Operation]) -> tuple[StoredRow, ...]:
    """Return the stored rows that operations name, without repeats."""
    return tuple(dict.fromkeys(row for operation in operations for row in operation.rows))


def _without_rows(operations: Sequence[Operation]) -> list[Operation]:
    found = dict.fromkeys(stored_rows(operations), _PLACEHOLDER)
    return [operation.with_rows(found) for operation in operations]


def _fill(
    steering: steering_pb2.SteeringSpec, operations: Sequence[Operation], found: Mapping[StoredRow, Vector]
) -> tuple[Vector, ...]:
    """Put the operations with vectors in place of stored rows into a message, and return their vectors."""
    filled = [operation.with_rows(found) for operation in operations]
    steering.CopyFrom(steering_spec(filled, updatable=steering.updatable))
    return vectors_of(filled)


def vectors_of(operations: Sequence[Operation]) -> tuple[Vector, ...]:
    """Return the vectors that operations name, without repeats."""
    gates = [operation.gate for operation in operations if operation.gate is not None]
    return distinct(vector for item in (*operations, *gates) for vector in item.vectors)


@dataclass(frozen=True)
class SteeringPlan:
    """The request to change the steering, and the vectors that it names."""

    request: inference_pb2.UpdateSteeringRequest
    """The message."""
    vectors: tuple[Vector, ...]
    """The vectors, without repeats."""
    operations: tuple[Operation, ...] = ()
    """The steering."""

    def filled(self, found: Mapping[StoredRow, Vector]) -> SteeringPlan:
        """Return the plan with vectors in place of stored rows."""
        request = inference_pb2.UpdateSteeringRequest()
        request.CopyFrom(self.request)
        return SteeringPlan(request, _fill(request.steering, self.operations, found))


def plan_steering(request_id: RequestLike, steer: Operation | Iterable[Operation] | None) -> SteeringPlan:
    """Return the plan of a change of the steering.

    Raises:
        InvalidRequest: The request ID or an operation is invalid; the message says what to change.
        TypeError: `steer` contains something other than operations.
    """
    operations = operation_list(steer)
    steering = steering_spec(_without_rows(operations))
    request = inference_pb2.UpdateSteeringRequest(request_id=check_id(request_id), steering=steering)
    return SteeringPlan(request, vectors_of(operations), tuple(operations))


@whole_characters()
def plan_generation(
    prompt: Prompt,
    *,
    capture: Capture | None,
    steer: Operation | Iterable[Operation] | None,
    request_id: str | None,
    registration: Registration | str | None,
    model: str | None,
    updatable: bool,
    if_exists: str = "fail",
    probes: Probe | Iterable[Probe] | None = None,
    score_prompt: bool = False,
    rules: Rule | Iterable[Rule] | None = None,
    without_operator_rules: bool = False,
    sampling: Mapping[str, Any],
) -> GenerationPlan:
    """Return the plan of a generation, either of a registered request or of one with its own spec.

    Raises:
        InvalidRequest: The request is invalid; the message says what to change.
        TypeError: An argument has the wrong type or is unknown.
    """
    request = inference_pb2.GenerateRequest()
    _set_prompt(request, prompt)
    _check_size(request)
    if sampling:
        request.sampling.CopyFrom(sampling_parameters(sampling))
    if registration is None:
        plan = plan_spec(
            capture, steer, request_id, model,
            updatable=updatable, if_exists=if_exists, probes=probes, score_prompt=score_prompt, rules=rules,
            without_operator_rules=without_operator_rules,
        )  # fmt: skip
        request.spec.CopyFrom(plan.spec)
        return GenerationPlan(request, plan.vectors, plan.operations, plan.probes, plan.sae)
    given = (
        steer, request_id, model, updatable, if_exists != "fail", probes, score_prompt, rules, without_operator_rules
    )  # fmt: skip
    if capture is not None or any(given):
        raise InvalidRequest(
            "A registered request already has its capture, steer, request_id, model, updatable, if_exists, probes, "
            "score_prompt, rules and without_operator_rules. Pass them only to register().",
            reason="INVALID_FIELD",
        )
    if isinstance(registration, Registration):
        request.request_id = check_id(registration.request_id)
        return GenerationPlan(request, registration.vectors, probes=registration.probes, sae=registration.sae)
    request.request_id = check_id(registration)
    return GenerationPlan(request, ())


class HasRequestId(Protocol):
    """A Reply, a Registration, a Stream, or anything else that has a request ID."""

    @property
    def request_id(self) -> str:
        """The ID of the request."""
        ...


class HasCaptureId(Protocol):
    """A Manifest, a CaptureSummary, or anything else that has a capture ID."""

    @property
    def capture_id(self) -> str:
        """The ID of the capture, which is also that of its request."""
        ...


RequestLike = Union[str, HasRequestId, HasCaptureId]  # noqa: UP007 - evaluated at run time on Python 3.10
"""A request: its ID, or an object that has its ID, such as its reply."""


def check_id(request: RequestLike) -> str:
    """Return the ID of a request after checking it.

    Raises:
        InvalidRequest: The text is not a valid ID.
        TypeError: `request` is neither a text nor an object with a request ID or capture ID.
    """
    request_id = request
    for name in ("request_id", "capture_id"):
        if not isinstance(request_id, str):
            request_id = getattr(request, name, request_id)
    if not isinstance(request_id, str):
        raise TypeError(
            f"A request must be an ID, or an object with a request ID such as a Reply, not {short(request)}."
        )
    if not is_valid_id(request_id):
        raise InvalidRequest(
            f"{_shown(request_id)} is not a valid request ID. Use 1 to 128 of a-z A-Z 0-9 . _ - and do not start with "
            ". or -",
            reason="INVALID_FIELD",
        )
    return request_id


def check_capture_id(request: RequestLike) -> str:
    """Return the ID of a request's capture.

    Raises:
        UnknownCapture: `request` is a reply to a request that captured nothing.
        InvalidRequest: The text is not a valid ID.
        TypeError: `request` is neither a text nor an object with a request ID or capture ID.
    """
    capture_id = check_id(request)
    if isinstance(request, Reply) and not request.captured:
        raise UnknownCapture(
            f"The request {capture_id} captured nothing, so it has no capture. To capture, pass capture= when you "
            "generate: generate(..., capture=residuum.Capture()).",
            reason="UNKNOWN_CAPTURE",
            metadata={"capture_id": capture_id},
        )
    return capture_id


def _shown(text: str) -> str:
    """Return a text for an error message. A long text is truncated."""
    return repr(text) if len(text) <= MAX_ID_LENGTH else f"{text[:_SHOWN]!r}… ({len(text)} characters)"


def distinct(vectors: Iterable[Vector]) -> tuple[Vector, ...]:
    """Return vectors without repeats, in order."""
    return tuple({vector.digest: vector for vector in vectors}.values())


_UINT32 = (1 << 32) - 1
_MAX_PROMPT_BYTES = MAX_MESSAGE_BYTES - (64 << 10)  # leaves room for steering, sampling and the request ID


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise EmptyPrompt("The prompt is empty.", reason="EMPTY_PROMPT")
        request.text = prompt
        return
    items: list[Any] = (
        list(prompt) if isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, Mapping)) else [None]
    )
    if not items:
        raise EmptyPrompt("The prompt has no tokens.", reason="EMPTY_PROMPT")
    kinds = set(map(type, items))  # checking few types is faster than checking every item
    if all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
        _add_token_ids(request.token_ids, items if kinds == {int} else list(map(int, items)))
    elif all(issubclass(kind, Mapping) for kind in kinds):
        request.chat.messages.extend(_chat_message(item) for item in items)
    else:
        raise TypeError(
            "A prompt must be a text, a list of token IDs, or a conversation as a list of "
            f'{{"role": ..., "content": ...}}, not {short(prompt)}. For several prompts, use generate_many().'
        )


def _check_size(request: inference_pb2.GenerateRequest) -> None:
    size = request.ByteSize()
    if size > _MAX_PROMPT_BYTES:
        raise PromptTooLong(
            f"The prompt takes {size} bytes, but a message can hold at most {_MAX_PROMPT_BYTES}. Shorten it.",
            reason="PROMPT_TOO_LONG",
            metadata={"bytes": str(size), "limit": str(_MAX_PROMPT_BYTES)},
        )


def _add_token_ids(tokens: inference_pb2.TokenIds, items: Sequence[int]) -> None:
    try:
        tokens.ids.extend(items)  # protobuf checks each; checks in Python would take three times as long
    except (ValueError, OverflowError):
        wrong = next((item for item in items if not 0 <= item <= _UINT32), None)
        if wrong is None:
            raise
        raise InvalidRequest(
            f"{wrong} is not a token ID. Token IDs are 0 to {_UINT32}.",
            reason="INVALID_FIELD",
            metadata={"field": "token_ids"},
        ) from None


def _chat_message(item: Any) -> inference_pb2.ChatMessage:
    if set(item) != {"role", "content"} or not all(isinstance(part, str) for part in item.values()):
        raise InvalidRequest(
            f'A message of a conversation must be {{"role": ..., "content": ...}} with two texts, not {dict(item)!r}.',
            reason="INVALID_FIELD",
            metadata={"field": "chat"},
        )
    if item["role"] not in CHAT_ROLES:
        raise InvalidRequest(
            f"A message of a conversation has the role {short(item['role'])}, which does not exist. Choose among "
            f"{', '.join(CHAT_ROLES)}.",
            reason="INVALID_FIELD",
            metadata={"field": "chat"},
        )
    return inference_pb2.ChatMessage(role=item["role"], content=item["content"])
