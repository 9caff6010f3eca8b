"""Checks of a prompt and its sampling parameters."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from inference_svc.admission.fields import invalid
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2
from residuum.wire.limits import DEFAULT_MAX_TOKENS, MAX_CAPTURE_TOKENS, MAX_SEQUENCES, MAX_STOP_TEXTS

if TYPE_CHECKING:
    from inference_svc.engine.facts import ModelFacts
    from residuum.v1 import capture_pb2

_MAX_TEMPERATURE = 2.0


def max_new_tokens(parameters: inference_pb2.SamplingParameters) -> int:
    """Return how many tokens each sequence may generate at most."""
    return parameters.max_tokens if parameters.HasField("max_tokens") else DEFAULT_MAX_TOKENS


def num_sequences(parameters: inference_pb2.SamplingParameters) -> int:
    """Return how many sequences are generated."""
    return parameters.num_sequences if parameters.HasField("num_sequences") else 1


def sampling_digest(parameters: inference_pb2.SamplingParameters) -> bytes:
    """Return a hash of checked sampling parameters. It is the same for a default and for its explicit value."""
    p = inference_pb2.SamplingParameters()
    p.CopyFrom(parameters)
    p.max_tokens, p.num_sequences = max_new_tokens(p), num_sequences(p)
    p.temperature, p.top_k, p.min_tokens = p.temperature, p.top_k, p.min_tokens
    p.top_p = p.top_p if p.HasField("top_p") else 1.0
    return hashlib.sha256(p.SerializeToString(deterministic=True)).digest()


def check_sampling(parameters: inference_pb2.SamplingParameters) -> None:
    """Check the range of each sampling parameter.

    Raises:
        Failure: A parameter is out of range. The metadata names it.
    """
    p = parameters
    max_tokens = max_new_tokens(p)
    rules = (
        ("max_tokens", max_tokens >= 1, "at least 1"),
        ("temperature", not p.HasField("temperature") or 0 <= p.temperature <= _MAX_TEMPERATURE, "from 0 to 2"),
        ("top_p", not p.HasField("top_p") or 0 < p.top_p <= 1, "above 0 and at most 1"),
        ("stop", len(p.stop) <= MAX_STOP_TEXTS and all(p.stop), f"at most {MAX_STOP_TEXTS} texts, none empty"),
        (
            "num_sequences",
            not p.HasField("num_sequences") or 1 <= p.num_sequences <= MAX_SEQUENCES,
            f"from 1 to {MAX_SEQUENCES}",
        ),
        (
            "min_tokens",
            p.min_tokens <= (p.max_tokens if p.HasField("max_tokens") else DEFAULT_MAX_TOKENS),
            "at most max_tokens",
        ),
        ("seed", p.seed < 1 << 63, "below 2^63"),
        ("top_k", p.top_k < 1 << 31, "below 2^31"),
    )
    for field, holds, allowed in rules:
        if not holds:
            raise invalid(f"sampling.{field}", f"{field} must be {allowed}.")


def check_prompt(token_ids: list[int], parameters: inference_pb2.SamplingParameters, facts: ModelFacts) -> None:
    """Check that a prompt has tokens, and that prompt and reply together fit the model's context.

    Raises:
        Failure: EMPTY_PROMPT or PROMPT_TOO_LONG.
    """
    if not token_ids:
        raise Failure(Reason.ERROR_REASON_EMPTY_PROMPT, "The prompt has no tokens; send at least one.")
    new_tokens = max_new_tokens(parameters)
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
        Failure: The capture could have more than `MAX_CAPTURE_TOKENS` tokens.
    """
    tokens = num_sequences(parameters) * (prompt_tokens + max_new_tokens(parameters))
    if capture is not None and tokens > MAX_CAPTURE_TOKENS:
        raise invalid(
            "sampling.num_sequences",
            f"A capture has at most {MAX_CAPTURE_TOKENS} tokens in all sequences, and this one could have {tokens}. "
            "Lower max_tokens, or send several requests instead of several sequences.",
        )
