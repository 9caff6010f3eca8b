"""From what a user writes to the messages of the contract. No I/O: both clients use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Union

import numpy as np

from residuum.exceptions import EmptyPrompt, InvalidRequest, PromptTooLong, UnknownCapture
from residuum.protocol.sampling import sampling_parameters
from residuum.v1 import capture_pb2, inference_pb2
from residuum.values.capture import Capture
from residuum.values.replies import Registration, Reply
from residuum.values.steering import Operation, operation_list, steering_spec
from residuum.values.vector import Vector
from residuum.wire.ids import is_valid_id
from residuum.wire.limits import MAX_ID_LENGTH, MAX_MESSAGE_BYTES

_SHOWN = 32
"""Characters of an overlong ID that an error shows."""

Prompt = Union[str, Sequence[int], Sequence[Mapping[str, str]]]  # noqa: UP007 - evaluated at run time on Python 3.10
"""A text, token ids, or a conversation as a list of {"role": ..., "content": ...}. The reply continues a conversation's
last message if that is the assistant's, and answers it otherwise."""


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
    """A spec, ready to be sent, with the vectors that it names."""

    spec: inference_pb2.RequestSpec
    """The message."""
    vectors: tuple[Vector, ...]
    """The vectors, distinct."""


@dataclass(frozen=True)
class GenerationPlan:
    """A generation, ready to be sent, with the vectors that it needs."""

    request: inference_pb2.GenerateRequest
    """The message."""
    vectors: tuple[Vector, ...]
    """The vectors, distinct."""


def plan_spec(
    capture: Capture | None,
    steer: Operation | Iterable[Operation] | None,
    request_id: str | None,
    model: str | None,
    *,
    updatable: bool = False,
    if_exists: str = "fail",
) -> SpecPlan:
    """Build a spec.

    Raises:
        InvalidRequest: Something in it can never be meant so.
        TypeError: `capture` is not a Capture, or `steer` holds something else than operations.
    """
    if capture is not None and not isinstance(capture, Capture):
        raise TypeError(f"capture= takes a residuum.Capture, not {capture!r}.")
    operations = operation_list(steer)
    spec = inference_pb2.RequestSpec(request_id=check_id(request_id) if request_id else "", model=model or "")
    if if_exists != "fail":
        spec.if_exists = _if_exists(if_exists, has_both=bool(request_id) and capture is not None)
    if capture is not None:
        spec.capture.CopyFrom(capture.to_proto())
    if operations or updatable:
        spec.steering.CopyFrom(steering_spec(operations, updatable=updatable))
    projection = capture.projection_vectors if capture is not None else ()
    return SpecPlan(spec, distinct((*vectors_of(operations), *projection)))


def _if_exists(choice: str, *, has_both: bool) -> capture_pb2.IfExists.ValueType:
    """Return the contract's value of `if_exists`.

    Raises:
        InvalidRequest: There is no such choice, or the request lacks an ID or a capture.
    """
    field = {"field": "if_exists"}
    if choice not in IF_EXISTS:
        raise InvalidRequest(
            f"if_exists is {short(choice)}; choose among {', '.join(IF_EXISTS)}.",
            reason="INVALID_FIELD",
            metadata=field,
        )
    if not has_both:
        raise InvalidRequest(
            f"if_exists={choice!r} says what happens to an existing capture with the request's id; give request_id= "
            "and capture= too.",
            reason="INVALID_FIELD",
            metadata=field,
        )
    return IF_EXISTS[choice]


def vectors_of(operations: Iterable[Operation]) -> tuple[Vector, ...]:
    """Return the vectors that operations name, each once."""
    return distinct(vector for operation in operations for vector in operation.vectors)


@dataclass(frozen=True)
class SteeringPlan:
    """A change of the steering, ready to be sent, with the vectors that it names."""

    request: inference_pb2.UpdateSteeringRequest
    """The message."""
    vectors: tuple[Vector, ...]
    """The vectors, distinct."""


def plan_steering(request_id: RequestLike, steer: Operation | Iterable[Operation] | None) -> SteeringPlan:
    """Build a change of the steering.

    Raises:
        InvalidRequest: Something in it can never be meant so.
        TypeError: `steer` holds something else than operations.
    """
    operations = operation_list(steer)
    request = inference_pb2.UpdateSteeringRequest(request_id=check_id(request_id), steering=steering_spec(operations))
    return SteeringPlan(request, vectors_of(operations))


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
    sampling: Mapping[str, Any],
) -> GenerationPlan:
    """Build a generation, either of a registered request or with its spec inline.

    Raises:
        InvalidRequest: Something in it can never be meant so.
        TypeError: An argument is of the wrong kind or unknown.
    """
    request = inference_pb2.GenerateRequest()
    _set_prompt(request, prompt)
    _check_size(request)
    if sampling:
        request.sampling.CopyFrom(sampling_parameters(sampling))
    if registration is None:
        plan = plan_spec(capture, steer, request_id, model, updatable=updatable, if_exists=if_exists)
        request.spec.CopyFrom(plan.spec)
        return GenerationPlan(request, plan.vectors)
    if capture is not None or steer or request_id or model or updatable or if_exists != "fail":
        raise InvalidRequest(
            "A registered request has its capture, steering, id, model and if_exists already; give them to register() "
            "alone.",
            reason="INVALID_FIELD",
        )
    if isinstance(registration, Registration):
        request.request_id = check_id(registration.request_id)
        return GenerationPlan(request, registration.vectors)
    request.request_id = check_id(registration)
    return GenerationPlan(request, ())


class HasRequestId(Protocol):
    """A Reply, a Registration, a Stream, or anything else that names its request."""

    @property
    def request_id(self) -> str:
        """The name of the request."""
        ...


class HasCaptureId(Protocol):
    """A Manifest, a CaptureSummary, or anything else that names its capture."""

    @property
    def capture_id(self) -> str:
        """The name of the capture, which is that of its request."""
        ...


RequestLike = Union[str, HasRequestId, HasCaptureId]  # noqa: UP007 - evaluated at run time on Python 3.10
"""A request as a user names it: by its id, or by what has it, such as its reply."""


def check_id(request: RequestLike) -> str:
    """Return the id of a request if it may be one.

    Raises:
        InvalidRequest: It may not.
        TypeError: It is neither a text nor something that has a request's or capture's id.
    """
    request_id = request
    for name in ("request_id", "capture_id"):
        if not isinstance(request_id, str):
            request_id = getattr(request, name, request_id)
    if not isinstance(request_id, str):
        raise TypeError(f"A request id is a text, or a Reply or something else that has one, not {request!r}.")
    if not is_valid_id(request_id):
        raise InvalidRequest(
            f"{_shown(request_id)} cannot name a request: 1 to 128 of the characters a-z A-Z 0-9 . _ - and no dot or "
            "dash at the start.",
            reason="INVALID_FIELD",
        )
    return request_id


def check_capture_id(request: RequestLike) -> str:
    """Return the ID of a request's capture.

    Raises:
        UnknownCapture: It is a reply to a request that captured nothing.
        InvalidRequest: It cannot be an ID.
        TypeError: It is neither a text nor something that has a request's or capture's ID.
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
    """Return a text as an error shows it: a long one is cut."""
    return repr(text) if len(text) <= MAX_ID_LENGTH else f"{text[:_SHOWN]!r}… ({len(text)} characters)"


def distinct(vectors: Iterable[Vector]) -> tuple[Vector, ...]:
    """Return vectors without repeats, in order."""
    return tuple({vector.digest: vector for vector in vectors}.values())


_UINT32 = (1 << 32) - 1
_MAX_PROMPT_BYTES = MAX_MESSAGE_BYTES - (64 << 10)  # what else a request holds: steering, sampling, its name


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise EmptyPrompt("The prompt is empty.", reason="EMPTY_PROMPT")
        request.text = prompt
        return
    items = list(prompt) if isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, Mapping)) else [None]
    if not items:
        raise EmptyPrompt("The prompt has no tokens.", reason="EMPTY_PROMPT")
    kinds = set(map(type, items))  # few, however many items there are
    if all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
        request.token_ids.ids.extend(_token_ids(items))
    elif all(issubclass(kind, Mapping) for kind in kinds):
        request.chat.messages.extend(_chat_message(item) for item in items)
    else:
        raise TypeError(
            "A prompt is a text, a list of token ids, or a conversation as a list of "
            f'{{"role": ..., "content": ...}}, not {short(prompt)}; for several prompts there is generate_many().'
        )


def short(value: object) -> str:
    """Return a value as a message shows it, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - enough to know it again


def _check_size(request: inference_pb2.GenerateRequest) -> None:
    size = request.ByteSize()
    if size > _MAX_PROMPT_BYTES:
        raise PromptTooLong(
            f"The prompt takes {size} bytes on its way, and at most {_MAX_PROMPT_BYTES} fit into a message; "
            "shorten it.",
            reason="PROMPT_TOO_LONG",
            metadata={"bytes": str(size), "limit": str(_MAX_PROMPT_BYTES)},
        )


def _token_ids(items: Sequence[Any]) -> list[int]:
    for item in (min(items), max(items)):
        if not 0 <= item <= _UINT32:
            raise InvalidRequest(f"{item} is not a token id.", reason="INVALID_FIELD", metadata={"field": "token_ids"})
    return list(map(int, items))


def _chat_message(item: Any) -> inference_pb2.ChatMessage:
    if set(item) != {"role", "content"} or not all(isinstance(part, str) for part in item.values()):
        raise InvalidRequest(
            f'A turn of a conversation is {{"role": ..., "content": ...}} with two texts, not {dict(item)!r}.',
            reason="INVALID_FIELD",
            metadata={"field": "chat"},
        )
    return inference_pb2.ChatMessage(role=item["role"], content=item["content"])
