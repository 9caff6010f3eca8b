"""Checks of a prompt and its sampling parameters."""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Literal

import numpy as np

from inference_svc.admission.fields import invalid
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2
from residuum.wire.limits import (
    DEFAULT_MAX_TOKENS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIASES,
    MAX_SEED,
    MAX_SEQUENCES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOP_K,
    max_capture_tokens,
)

if TYPE_CHECKING:
    from inference_svc.model_facts import ModelFacts
    from residuum.v1 import capture_pb2

_MAX_TEMPERATURE = 2.0
_MAX_PENALTY = 2.0

_DEFAULTS: dict[Literal["min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"], float] = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Parameters that the hash leaves out if they have these values, their defaults."""


def max_new_tokens(parameters: inference_pb2.SamplingParameters) -> int:
    """Return how many tokens each sequence may generate at most."""
    return parameters.max_tokens if parameters.HasField("max_tokens") else DEFAULT_MAX_TOKENS


def is_prefill_only(parameters: inference_pb2.SamplingParameters) -> bool:
    """Return whether only the prompt is computed, and no token is generated."""
    return parameters.HasField("max_tokens") and parameters.max_tokens == 0


def num_sequences(parameters: inference_pb2.SamplingParameters) -> int:
    """Return how many sequences are generated."""
    return parameters.num_sequences if parameters.HasField("num_sequences") else 1


def sampling_digest(parameters: inference_pb2.SamplingParameters) -> bytes:
    """Return a hash of checked sampling parameters: of those that decide which tokens are generated.

    It is the same for a default and for its explicit value, and with log-probabilities or without.
    """
    p = inference_pb2.SamplingParameters()
    p.CopyFrom(parameters)
    p.max_tokens, p.num_sequences = max_new_tokens(p), num_sequences(p)
    p.temperature, p.top_k, p.min_tokens = p.temperature, p.top_k, p.min_tokens
    p.top_p = p.top_p if p.HasField("top_p") else 1.0
    for name, default in _DEFAULTS.items():
        if getattr(p, name) == default:
            p.ClearField(name)
    p.ClearField("logprobs")
    p.ClearField("prompt_logprobs")
    p.ClearField("truncate_prompt")  # it decides the prompt, which is compared itself
    return hashlib.sha256(p.SerializeToString(deterministic=True)).digest()


def check_sampling(parameters: inference_pb2.SamplingParameters, facts: ModelFacts) -> None:
    """Check each sampling parameter that needs no tokenizer.

    Raises:
        Failure: A parameter is out of range, or not what it must be. The metadata names it.
    """
    _check_ranges(parameters, facts)
    _check_grammar(parameters)


def _check_ranges(p: inference_pb2.SamplingParameters, facts: ModelFacts) -> None:
    in_vocabulary = f"IDs below {facts.vocab_size}, the size of the vocabulary"
    penalty = f"from {-_MAX_PENALTY:g} to {_MAX_PENALTY:g}"
    biased = {item.token_id for item in p.logit_bias}
    top = f"from 0 to {facts.max_logprobs}, the server's limit"
    rules = (
        ("temperature", not p.HasField("temperature") or 0 <= p.temperature <= _MAX_TEMPERATURE, "from 0 to 2"),
        ("top_p", not p.HasField("top_p") or 0 < p.top_p <= 1, "above 0 and at most 1"),
        ("stop", len(p.stop) <= MAX_STOP_STRINGS and all(p.stop), f"at most {MAX_STOP_STRINGS} strings, none empty"),
        (
            "num_sequences",
            not p.HasField("num_sequences") or 1 <= p.num_sequences <= MAX_SEQUENCES,
            f"from 1 to {MAX_SEQUENCES}",
        ),
        (
            "min_tokens",
            p.min_tokens <= max_new_tokens(p),
            "at most max_tokens",
        ),
        ("seed", p.seed <= MAX_SEED, f"at most {MAX_SEED}"),
        ("top_k", p.top_k <= MAX_TOP_K, f"at most {MAX_TOP_K}"),
        ("min_p", 0 <= p.min_p <= 1, "from 0 to 1"),
        ("presence_penalty", abs(p.presence_penalty) <= _MAX_PENALTY, penalty),
        ("frequency_penalty", abs(p.frequency_penalty) <= _MAX_PENALTY, penalty),
        (
            "repetition_penalty",
            not p.HasField("repetition_penalty") or 0 < p.repetition_penalty < math.inf,
            "above 0 and finite",
        ),
        (
            "stop_token_ids",
            len(p.stop_token_ids) <= MAX_STOP_TOKENS and max(p.stop_token_ids, default=0) < facts.vocab_size,
            f"at most {MAX_STOP_TOKENS} {in_vocabulary}",
        ),
        (
            "logit_bias",
            len(biased) == len(p.logit_bias) <= MAX_LOGIT_BIASES and max(biased, default=0) < facts.vocab_size,
            f"for at most {MAX_LOGIT_BIASES} different {in_vocabulary}",
        ),
        ("logit_bias", all(math.isfinite(item.bias) for item in p.logit_bias), "finite numbers"),
        (
            "bad_words",
            len(p.bad_words) <= MAX_BAD_WORDS and all(word.strip() for word in p.bad_words),
            f"at most {MAX_BAD_WORDS} words, none empty",
        ),
        ("logprobs", p.logprobs <= facts.max_logprobs, top),
        ("prompt_logprobs", p.prompt_logprobs <= facts.max_logprobs, top),
        ("truncate_prompt", not p.HasField("truncate_prompt") or p.truncate_prompt > 0, "at least 1"),
    )
    for field, holds, allowed in rules:
        if not holds:
            raise invalid(f"sampling.{field}", f"{field} must be {allowed}{_instead_of(getattr(p, field))}.")


def _instead_of(value: object) -> str:
    """Return the end of a sentence that names a value: a number, because texts and lists may be long."""
    if isinstance(value, float):
        return f", not {np.float32(value)!s}"  # as many digits as its 32 bits need
    return f", not {value}" if isinstance(value, int) else ""


def _check_grammar(p: inference_pb2.SamplingParameters) -> None:
    """Check the form of a structured output as far as that needs no grammar compiler."""
    kind = p.WhichOneof("structured_output")
    if kind is None:
        return
    text: str = getattr(p, kind)
    size = len(text.encode())
    if not text or "\0" in text or size > MAX_GRAMMAR_BYTES:
        raise invalid(
            f"sampling.{kind}",
            f"{kind} must have 1 to {MAX_GRAMMAR_BYTES} bytes and no NUL character; this one has {size} bytes.",
        )
    if kind == "json_schema":
        try:
            is_object = isinstance(json.loads(text), dict)
        except (ValueError, RecursionError) as error:
            raise invalid("sampling.json_schema", f"json_schema is not a JSON document: {error}.") from None
        if not is_object:
            raise invalid("sampling.json_schema", 'json_schema must be a JSON object, such as {"type": "object"}.')


def check_prompt(token_ids: list[int], parameters: inference_pb2.SamplingParameters, facts: ModelFacts) -> None:
    """Check that a prompt has tokens, and that prompt and reply together fit the model's context.

    Raises:
        Failure: EMPTY_PROMPT or PROMPT_TOO_LONG.
    """
    if not token_ids:
        raise Failure(Reason.ERROR_REASON_EMPTY_PROMPT, "The prompt has no tokens; send at least one.")
    new_tokens = max_new_tokens(parameters)
    if is_prefill_only(parameters) and len(token_ids) >= facts.max_model_len:
        raise Failure(
            Reason.ERROR_REASON_PROMPT_TOO_LONG,
            f"The prompt has {len(token_ids)} tokens. The model's context has {facts.max_model_len}, and the engine "
            "keeps one of them for a token after the prompt, even if max_tokens is 0. Shorten the prompt.",
            prompt_tokens=len(token_ids),
            limit=facts.max_model_len,
        )
    if len(token_ids) + new_tokens > facts.max_model_len:
        raise Failure(
            Reason.ERROR_REASON_PROMPT_TOO_LONG,
            f"The prompt has {len(token_ids)} tokens and max_tokens is {new_tokens}; together they exceed the model's "
            f"context of {facts.max_model_len} tokens. Shorten the prompt or lower max_tokens.",
            prompt_tokens=len(token_ids),
            limit=facts.max_model_len,
        )


def check_capture_size(
    capture: capture_pb2.CaptureSpec | None, prompt_tokens: int, parameters: inference_pb2.SamplingParameters
) -> None:
    """Check that the manifest of a capture fits one message, even if every sequence generates `max_tokens`.

    Raises:
        Failure: The capture could have more than `max_capture_tokens`.
    """
    tokens = num_sequences(parameters) * (prompt_tokens + max_new_tokens(parameters))
    if capture is None:
        return
    sites = max(len(capture.sites), 1)
    limit = max_capture_tokens(sites)
    if tokens > limit:
        raise invalid(
            "sampling.num_sequences",
            f"A capture at {sites} site{'s' * (sites > 1)} has at most {limit} tokens in all sequences, and this one "
            f"could have {tokens}, because each sequence counts the prompt. Lower max_tokens, shorten the prompt, or "
            "ask for fewer sequences or sites.",
        )
