"""The sampling parameters of a request: their documentation, checks and message. No I/O: both clients use it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from residuum.exceptions import InvalidRequest
from residuum.protocol.arguments import check_flag, check_integer, check_list
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
)


class Sampling(TypedDict, total=False):
    """How tokens are sampled: keyword arguments of every call that generates. The server fills in the defaults.

    Attributes:
        max_tokens: The most tokens to generate in each sequence. Default 16. 0 only computes the prompt: the reply has
            no tokens, its finish reason is "length", and a capture has the rows of every position of the prompt.
        temperature: The sampling temperature, up to 2. 0 (the default) is greedy.
        top_p: Sample from the most likely tokens whose probabilities add up to this; above 0, at most 1. Default 1.
        top_k: Sample from this many most likely tokens; 0 (the default) means all.
        seed: The random seed, which makes sampling repeatable. Sequence i uses seed + i. Default: none.
        stop: Generation stops when one of these strings appears. The reply does not contain it. At most 16.
        ignore_eos: Continue after the end-of-sequence token. Default False.
        n: The number of sequences to generate from the prompt, at most 64. Default 1.
        min_tokens: Tokens to generate before a sequence may end. Default 0.
        stop_token_ids: Generation stops after one of these tokens. The reply's token IDs contain it; its text does not.
            At most 64.
        min_p: Sample only from tokens whose probability is at least this fraction of the greatest one; from 0 (the
            default) to 1.
        presence_penalty: Subtracted from the logits of tokens that the reply already has; from -2 to 2. Default 0.
        frequency_penalty: The same, once for each time that the reply has the token; from -2 to 2. Default 0.
        repetition_penalty: For tokens that the prompt or the reply already has: divides positive logits and multiplies
            negative ones; above 0. Default 1.
        logit_bias: Numbers to add to the logits of token IDs, before penalties. At most 1024.
        bad_words: Words that the reply must not contain. At most 128, none empty.
        json_schema: Make the reply a JSON document that matches this JSON schema, given as a dict or as JSON. A reply
            that reaches `max_tokens` may be cut off.
        regex: Make the whole reply match this regular expression. The reply may be cut off in the same way. Set this or
            `json_schema`, not both.
        logprobs: Return the log-probability of each generated token, and of this many most likely tokens in its place.
            With 0, only those of the generated tokens. The server has a limit, usually 20. See `Reply.logprobs`.
        prompt_logprobs: The same for the tokens of the prompt. The model then always computes the whole prompt. See
            `Reply.prompt_logprobs`.
        truncate_prompt: Use only this many tokens of the prompt, from its start. A conversation cannot be truncated.
            Default: all; a prompt that does not fit the model's context is refused.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool
    n: int
    min_tokens: int
    stop_token_ids: Sequence[int]
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    json_schema: str | Mapping[str, Any]
    regex: str
    logprobs: int
    prompt_logprobs: int
    truncate_prompt: int


def sampling_parameters(sampling: Mapping[str, Any]) -> inference_pb2.SamplingParameters:
    """Return the message of sampling parameters after checking them.

    Raises:
        InvalidRequest: A parameter is out of range.
        TypeError: A parameter is unknown, or has the wrong type.
    """
    unknown = sorted(set(sampling) - set(Sampling.__annotations__))
    if unknown:
        raise TypeError(
            f"There is no sampling parameter {unknown[0]!r}. Choose among {', '.join(Sampling.__annotations__)}."
        )
    given = {name: value for name, value in sampling.items() if value is not None}
    for name, (low, high) in _INTEGERS.items():
        check_integer(name, given.get(name, low), low, high)
    for name, (least, most) in _NUMBERS.items():
        _check_number(name, given.get(name, most), least, most)
    for name in ("top_p", "repetition_penalty"):
        if given.get(name) == 0:
            raise _invalid(name, f"{name} must be above 0.")
    if given.get("min_tokens", 0) > given.get("max_tokens", DEFAULT_MAX_TOKENS):
        raise _invalid("min_tokens", "min_tokens must not be above max_tokens.")
    given["ignore_eos"] = check_flag("ignore_eos", given.get("ignore_eos", False))
    given["stop"] = _strings("stop", given.get("stop", ()), MAX_STOP_STRINGS)
    given["bad_words"] = _strings("bad_words", given.get("bad_words", ()), MAX_BAD_WORDS)
    given["stop_token_ids"] = _stop_token_ids(given.get("stop_token_ids", ()))
    given["logit_bias"] = _logit_bias(given.get("logit_bias", {}))
    given.update(_structured_output(given.pop("json_schema", None), given.pop("regex", None)))
    given["num_sequences"] = given.pop("n", None)
    return inference_pb2.SamplingParameters(**given)


_UINT32 = (1 << 32) - 1
_INTEGERS = {
    "max_tokens": (0, _UINT32),
    "top_k": (0, MAX_TOP_K),
    "seed": (0, MAX_SEED),
    "n": (1, MAX_SEQUENCES),
    "min_tokens": (0, _UINT32),
    "logprobs": (0, _UINT32),
    "prompt_logprobs": (0, _UINT32),
    "truncate_prompt": (1, _UINT32),
}
_NUMBERS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, float(np.finfo(np.float32).max)),
}


def _invalid(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, reason="INVALID_FIELD", metadata={"field": name})


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{name} must be a number, not {value!r}.")
    if not (math.isfinite(value) and low <= value <= high):
        raise _invalid(name, f"{name} must be from {low:g} to {high:g}, not {value}.")


def _strings(name: str, value: str | Sequence[str], limit: int) -> list[str]:
    strings = [value] if isinstance(value, str) else check_list(name, value, "texts")
    if len(strings) > limit or not all(isinstance(string, str) and string for string in strings):
        raise _invalid(name, f"{name} takes at most {limit} strings, none of them empty.")
    return strings


def _stop_token_ids(value: Sequence[int]) -> list[int]:
    token_ids = check_list("stop_token_ids", value, "token IDs")
    for token_id in token_ids:
        check_integer("stop_token_ids", token_id, 0, _UINT32)
    if len(token_ids) > MAX_STOP_TOKENS:
        raise _invalid("stop_token_ids", f"stop_token_ids takes at most {MAX_STOP_TOKENS} IDs, not {len(token_ids)}.")
    return [int(token_id) for token_id in token_ids]


def _logit_bias(value: Mapping[int, float]) -> list[inference_pb2.LogitBias]:
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must be a mapping of token IDs to numbers, not {value!r}.")
    high = float(np.finfo(np.float32).max)
    for token_id, bias in value.items():
        check_integer("logit_bias", token_id, 0, _UINT32)
        _check_number("logit_bias", bias, -high, high)
    if len(value) > MAX_LOGIT_BIASES:
        raise _invalid("logit_bias", f"logit_bias takes at most {MAX_LOGIT_BIASES} token IDs, not {len(value)}.")
    return [inference_pb2.LogitBias(token_id=int(token_id), bias=bias) for token_id, bias in value.items()]


def _structured_output(schema: object, regex: object) -> dict[str, str]:
    """Return the field that requests a structured output; empty if none is requested."""
    if schema is not None and regex is not None:
        raise _invalid("regex", "A reply cannot follow both a json_schema and a regex. Give one of them.")
    if schema is not None:
        return {"json_schema": _grammar("json_schema", _schema_text(schema))}
    if regex is None:
        return {}
    if not isinstance(regex, str):
        raise TypeError(f"regex must be a text, not {regex!r}.")
    return {"regex": _grammar("regex", regex)}


def _schema_text(schema: object) -> str:
    """Return a JSON schema as JSON."""
    if not isinstance(schema, (str, Mapping)):
        raise TypeError(f"json_schema must be a dict or its JSON, not {schema!r}.")
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        text = schema if isinstance(schema, str) else json.dumps(schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise _invalid("json_schema", f"json_schema is not a JSON document: {error}.") from None
    if not isinstance(found, Mapping):
        raise _invalid("json_schema", 'json_schema must be a JSON object, such as {"type": "object"}.')
    return text


def _grammar(name: str, text: str) -> str:
    if not 0 < len(text.encode()) <= MAX_GRAMMAR_BYTES:
        raise _invalid(name, f"{name} must have 1 to {MAX_GRAMMAR_BYTES} bytes, not {len(text.encode())}.")
    return text
