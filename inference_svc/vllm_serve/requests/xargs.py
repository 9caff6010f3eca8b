"""Reads residuum's arguments in a request's `vllm_xargs`, which reach vLLM as `SamplingParams.extra_args`.

* `residuum` is a `RequestSpec` in protobuf's JSON form. It is a string, because vLLM accepts no objects there.
* `residuum_vectors` are the vectors that the spec names by digest, except those already on the server. Each is a string
  of base64: float32 values, little-endian.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from google.protobuf import json_format

from inference_svc.admission.fields import invalid
from inference_svc.taps.plan import KEY as PLAN_KEY
from inference_svc.vllm_serve import SPEC_KEY, VECTORS_KEY
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2, tensor_pb2
from residuum.wire.digests import digest_of_bytes

_ARGUMENT_KEYS = frozenset({SPEC_KEY, VECTORS_KEY, PLAN_KEY})
_FLOAT_BYTES = 4
_SHOWN = 64
_MAX_KEPT_TEXT = 4096
"""The longest spec whose form as a message is kept for later requests, which often send the same text."""
_RESEMBLANCE = 0.85
"""The ratio of `difflib` from which on two names resemble each other: one or two letters differ."""


@dataclass(frozen=True)
class ResiduumArguments:
    """Residuum's arguments of one request."""

    spec: inference_pb2.RequestSpec
    """The spec, not yet checked against the model."""
    vectors: tuple[tensor_pb2.Vector, ...]
    """The vectors that came with it."""


def without_residuum_arguments(extra_args: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a request's `extra_args` without residuum's; None if nothing is left.

    This also removes a plan. Plans must never come from a caller, because the worker trusts them.
    """
    return {name: value for name, value in (extra_args or {}).items() if name not in _ARGUMENT_KEYS} or None


def has_residuum_arguments(extra_args: Mapping[str, Any] | None) -> bool:
    """Return whether a request's `extra_args` contain an argument of residuum's."""
    return bool(extra_args) and not _ARGUMENT_KEYS.isdisjoint(extra_args or ())


def check_argument_names(extra_args: Mapping[str, Any] | None) -> None:
    """Refuse an argument that resembles one of residuum's. vLLM would ignore it, and nothing would be captured.

    Raises:
        Failure: A name is misspelt. The message has the right one.
    """
    for name in extra_args or ():
        if name in _ARGUMENT_KEYS:
            continue
        plain = name.lower().replace("-", "_")
        close = get_close_matches(plain, (SPEC_KEY, VECTORS_KEY), n=1, cutoff=_RESEMBLANCE)
        if close or plain.startswith(SPEC_KEY):
            raise _bad(
                name[:_SHOWN],
                f"there is no such argument. Did you mean {close[0] if close else SPEC_KEY}? Residuum reads {SPEC_KEY} "
                f"and {VECTORS_KEY}",
            )


def read_residuum_arguments(extra_args: Mapping[str, Any]) -> ResiduumArguments | None:
    """Return residuum's arguments of a request; None if there is no spec.

    Raises:
        Failure: The arguments cannot be parsed. The message names the argument and the error.
    """
    if SPEC_KEY not in extra_args:
        if VECTORS_KEY in extra_args:
            raise _bad(VECTORS_KEY, f"there are vectors, but no spec that names them; add {SPEC_KEY}")
        return None
    return ResiduumArguments(_spec(extra_args[SPEC_KEY]), tuple(_vectors(extra_args.get(VECTORS_KEY) or ())))


def _spec(value: object) -> inference_pb2.RequestSpec:
    spec = inference_pb2.RequestSpec()
    try:
        if isinstance(value, Mapping):
            return json_format.ParseDict(dict(value), spec)
        if isinstance(value, str):
            return inference_pb2.RequestSpec.FromString(_kept(value) if len(value) <= _MAX_KEPT_TEXT else _read(value))
    except (json_format.ParseError, RecursionError, ValueError, TypeError, AttributeError) as error:
        raise _bad(
            SPEC_KEY, f"it is not a RequestSpec in protobuf's JSON: {error or 'it is nested too deeply'}"
        ) from None
    raise _bad(SPEC_KEY, "send a string with a RequestSpec in protobuf's JSON; residuum.vllm_xargs() makes one")


def _read(text: str) -> bytes:
    """Return a spec in protobuf's JSON as bytes."""
    return json_format.Parse(text, inference_pb2.RequestSpec()).SerializeToString()


@lru_cache(maxsize=64)
def _kept(text: str) -> bytes:
    """Return what `_read` does, and keep the last results: reading JSON takes much longer than reading bytes."""
    return _read(text)


def _vectors(value: object) -> list[tensor_pb2.Vector]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise _bad(VECTORS_KEY, "send a list of strings, each a vector as base64 of little-endian float32")
    return [_vector(text) for text in texts]


def _vector(text: str) -> tensor_pb2.Vector:
    try:
        values = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad(
            VECTORS_KEY, f"a vector is not valid base64: {error}; send base64 of little-endian float32"
        ) from None
    if len(values) % _FLOAT_BYTES:
        raise Failure(
            Reason.ERROR_REASON_WRONG_LENGTH,
            f"vllm_xargs.{VECTORS_KEY}: a vector has {len(values)} bytes, which is not a multiple of {_FLOAT_BYTES}. "
            "Send base64 of little-endian float32.",
            length=len(values) / _FLOAT_BYTES,
        )
    dtype = tensor_pb2.DATA_TYPE_FLOAT32
    return tensor_pb2.Vector(digest=digest_of_bytes(dtype, values), dtype=dtype, values=values)


def _bad(key: str, message: str) -> Failure:
    return invalid(f"vllm_xargs.{key}", f"vllm_xargs.{key}: {message}.")
