"""What a request asks for in `vllm_xargs`, which reaches vLLM as `SamplingParams.extra_args`.

`residuum` is a `RequestSpec` as protobuf's JSON, in a text, because vLLM takes no objects there. `residuum_vectors` are
the vectors that the spec names by digest, unless they were sent before: each is base64 of float32, little-endian.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format

from inference_svc.admission.fields import invalid
from inference_svc.taps.plan import KEY as PLAN_KEY
from inference_svc.vllm_serve import SPEC_KEY, VECTORS_KEY
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2, tensor_pb2
from residuum.wire.digests import digest_of_bytes

_OURS = frozenset({SPEC_KEY, VECTORS_KEY, PLAN_KEY})
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    spec: inference_pb2.RequestSpec
    """The spec, not checked against the model."""
    vectors: tuple[tensor_pb2.Vector, ...]
    """The vectors that came with it."""


def without_ours(extra_args: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what is left of a request's `extra_args` for others; None if nothing is.

    A plan is never taken from a caller: the worker trusts what it finds under that name.
    """
    return {name: value for name, value in (extra_args or {}).items() if name not in _OURS} or None


def asks(extra_args: Mapping[str, Any] | None) -> bool:
    """Tell whether anything in a request's `extra_args` is for us."""
    return bool(extra_args) and not _OURS.isdisjoint(extra_args or ())


def read_asked(extra_args: Mapping[str, Any]) -> Asked | None:
    """Return what a request asks for; None if nothing.

    Raises:
        Failure: It cannot be read. The message says what is wrong, and where.
    """
    if SPEC_KEY not in extra_args:
        if VECTORS_KEY in extra_args:
            raise _bad(VECTORS_KEY, f"vectors come with the spec that names them; add {SPEC_KEY}")
        return None
    return Asked(_spec(extra_args[SPEC_KEY]), tuple(_vectors(extra_args.get(VECTORS_KEY) or ())))


def _spec(value: object) -> inference_pb2.RequestSpec:
    spec = inference_pb2.RequestSpec()
    try:
        if isinstance(value, Mapping):
            return json_format.ParseDict(dict(value), spec)
        if isinstance(value, str):
            return json_format.Parse(value, spec)
    except (json_format.ParseError, RecursionError, ValueError, TypeError, AttributeError) as error:
        raise _bad(
            SPEC_KEY, f"it is not a RequestSpec in protobuf's JSON: {error or 'it is nested too deeply'}"
        ) from None
    raise _bad(SPEC_KEY, "it is a text, a RequestSpec in protobuf's JSON; residuum.vllm_xargs() makes one")


def _vectors(value: object) -> list[tensor_pb2.Vector]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise _bad(VECTORS_KEY, "it is a list of texts, each a vector as base64 of float32, little-endian")
    return [_vector(text) for text in texts]


def _vector(text: str) -> tensor_pb2.Vector:
    try:
        values = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad(
            VECTORS_KEY, f"a vector is base64 of float32, little-endian, and one is not base64: {error}"
        ) from None
    if len(values) % _FLOAT_BYTES:
        raise Failure(
            Reason.ERROR_REASON_WRONG_LENGTH,
            f"vllm_xargs.{VECTORS_KEY}: a vector of {len(values)} bytes is no whole number of float32.",
            length=len(values) / _FLOAT_BYTES,
        )
    dtype = tensor_pb2.DATA_TYPE_FLOAT32
    return tensor_pb2.Vector(digest=digest_of_bytes(dtype, values), dtype=dtype, values=values)


def _bad(key: str, message: str) -> Failure:
    return invalid(f"vllm_xargs.{key}", f"vllm_xargs.{key}: {message}.")
