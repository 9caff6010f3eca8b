"""Checks the requests of an API server, before vLLM's endpoint begins its answer."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from inference_svc.admission.fields import invalid
from inference_svc.requests.prompts import no_prompt_text
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2
from residuum.wire.ids import is_valid_id, make_id
from residuum.wire.limits import MAX_ID_LENGTH, MAX_SEQUENCES

if TYPE_CHECKING:
    from inference_svc.admission.admission import Admission
    from inference_svc.admission.specs import ResolvedSpec
    from inference_svc.vllm_serve.requests.xargs import ResiduumArguments
    from inference_svc.vllm_serve.score_fields import Answer
    from inference_svc.vllm_serve.shared_vectors import RequestVectors

_NUMBERED = re.compile("(cmpl-.+)-([0-9]+)|(resp_.+)_([0-9]+)", re.DOTALL)
"""The ID that vLLM gives a prompt of a completion, or a turn of a response: the answer's `id`, and the number."""
_CONVERSATION = re.compile("(chatcmpl-.+)_([0-9]+)", re.DOTALL)
"""The ID that vLLM gives a conversation of a batch. That of a single chat may look the same."""


@dataclass(frozen=True)
class ReceivedRequest:
    """A request as vLLM's endpoint passes it on."""

    arguments: ResiduumArguments
    """What the request asks of residuum."""
    prompt: Any
    """The prompt in vLLM's form."""
    sampling: Any
    """vLLM's sampling parameters, without residuum's arguments."""
    request_id: str
    """The ID that vLLM gave the request."""
    adapter: str
    """The name of the LoRA adapter that it uses; empty for the model itself."""
    answer: Answer | None
    """Where the scores go; None if the server runs without the middleware."""

    @property
    def prompt_number(self) -> int:
        """The number of the prompt among those of its HTTP request, from 0."""
        return self._answer_id_and_number[1]

    @property
    def known_id(self) -> str:
        """The ID that the caller knows: its own choice, otherwise the `id` of the answer; with the prompt's number.

        Callers do not see the number of a single prompt, so the first prompt has none.
        """
        answer_id, number = self._answer_id_and_number
        return (self.arguments.spec.request_id or answer_id) + (f"-{number}" if number else "")

    @cached_property
    def _answer_id_and_number(self) -> tuple[str, int]:
        form = _CONVERSATION if self.answer is not None and self.answer.is_batch else _NUMBERED
        found = form.fullmatch(self.request_id)
        if found is None:
            return self.request_id, 0
        answer_id, number = filter(None, found.groups())
        return answer_id, int(number)


@dataclass(frozen=True)
class AdmittedRequest:
    """A valid request."""

    received: ReceivedRequest
    spec: ResolvedSpec
    """The resolved spec. Its request ID is that of the capture."""
    token_ids: list[int]
    """The tokens of the prompt."""
    parameters: inference_pb2.SamplingParameters
    """The part of the sampling parameters that plans and checks need."""


class RequestAdmission:
    """Admits the requests that one API server can serve."""

    def __init__(
        self, admission: Admission, vectors: RequestVectors, max_model_len: int, *, has_store: bool, has_rules: bool
    ) -> None:
        """Prepare to check requests.

        Args:
            admission: The checks that both entry points share.
            vectors: Keeps the vectors that come with requests.
            max_model_len: The most tokens that a prompt and its reply may have together.
            has_store: Whether requests can be captured.
            has_rules: Whether the operator's rules watch every request.
        """
        self._admission = admission
        self._vectors = vectors
        self._max_model_len = max_model_len
        self._has_store = has_store
        self._has_rules = has_rules

    def admit(self, received: ReceivedRequest) -> AdmittedRequest:
        """Check a request in full.

        Raises:
            Failure: The request is invalid, or the server cannot capture or steer.
        """
        asked = received.arguments.spec
        spec = self._admission.resolve(_checked_model(asked, received.adapter))
        # With rules of the operator, a request may have nothing of its own. It may also opt out of rules that are not
        # there: callers need not know whether the operator has any.
        is_empty = spec.capture is None and spec.steering is None and spec.probes is None
        if is_empty and not self._has_rules and not asked.probes.without_operator_rules:
            raise invalid(
                "vllm_xargs.residuum", "The spec has no capture, steering or probes. Set one, or leave it out."
            )
        if spec.steering is not None and spec.steering.updatable:
            raise invalid(
                "steering.updatable",
                "The OpenAI API cannot change the steering of a running request; unset updatable.",
            )
        if spec.capture is not None and not self._has_store:
            raise invalid(
                "capture", "This server has no store, so it cannot capture. Its operator can set RESIDUUM_STORE."
            )
        token_ids = _token_ids(received.prompt)
        if spec.capture is not None and spec.capture.keep_prompt and not received.prompt.get("prompt"):
            raise no_prompt_text()
        parameters = self._parameters(received.sampling, len(token_ids))
        self._vectors.keep(received.arguments, spec)
        self._admission.check_request(spec, "", len(token_ids), parameters)
        spec = replace(spec, request_id=capture_id(spec, received.known_id), adapter=received.adapter)
        return AdmittedRequest(received, spec, token_ids, parameters)

    def _parameters(self, sampling: Any, prompt_tokens: int) -> inference_pb2.SamplingParameters:
        if not 1 <= sampling.n <= MAX_SEQUENCES:
            raise invalid(
                "n", f"n must be from 1 to {MAX_SEQUENCES} for a request that is captured, steered or watched by rules."
            )
        room = max(self._max_model_len - prompt_tokens, 1)
        return inference_pb2.SamplingParameters(
            max_tokens=min(sampling.max_tokens or room, room),
            num_sequences=sampling.n,
            stop=sampling.stop or (),
            # Only whether they are asked for counts here. vLLM reads the numbers from its own parameters.
            logprobs=None if sampling.logprobs is None else 0,
            prompt_logprobs=None if sampling.prompt_logprobs is None else 0,
        )


def capture_id(spec: ResolvedSpec, known_id: str) -> str:
    """Return the ID of the request's capture: the one that the caller knows.

    Raises:
        Failure: This is not a valid capture ID.
    """
    if spec.capture is None and not spec.request_id:
        return make_id()  # not vLLM's ID: the registry refuses running IDs, and a caller may repeat X-Request-Id
    if is_valid_id(known_id):
        return known_id
    if spec.request_id:
        raise invalid(
            "request_id",
            f"With the number of the prompt, the request ID is longer than {MAX_ID_LENGTH} characters: {known_id}. "
            "Choose a shorter one.",
        )
    raise invalid(
        "request_id",
        f"{known_id[:128]!r}, made from the X-Request-Id, is not a valid capture ID: 1 to 128 characters of a-z A-Z "
        "0-9 . _ -, not starting with . or -. Choose another X-Request-Id, or set request_id in the spec.",
    )


def _checked_model(spec: inference_pb2.RequestSpec, adapter: str) -> inference_pb2.RequestSpec:
    """Return a spec without the `model` that it expects, if the request uses the LoRA adapter of that name.

    Raises:
        Failure: The request uses an adapter, and the spec expects another model.
    """
    if not adapter or not spec.model:
        return spec
    if spec.model != adapter:
        shown = spec.model[:MAX_ID_LENGTH]
        raise Failure(
            Reason.ERROR_REASON_UNKNOWN_MODEL,
            f"The request's model is the LoRA adapter {adapter}, but vllm_xargs.residuum expects {shown}. Leave model "
            "out of vllm_xargs.residuum.",
            model=shown,
            serving=adapter,
        )
    checked = inference_pb2.RequestSpec()
    checked.CopyFrom(spec)
    checked.ClearField("model")
    return checked


def _token_ids(prompt: Any) -> list[int]:
    """Return the token IDs of a prompt in the form that vLLM's endpoints use.

    Raises:
        Failure: The prompt has something other than tokens.
    """
    is_tokens = isinstance(prompt, dict) and prompt.get("type", "token") == "token" and prompt.get("prompt_token_ids")
    if not is_tokens or prompt.get("multi_modal_data"):
        raise invalid(
            "prompt",
            "Only prompts of text or token IDs can be captured, steered and watched by rules. This one has other "
            "parts, such as images.",
        )
    return list(prompt["prompt_token_ids"])
