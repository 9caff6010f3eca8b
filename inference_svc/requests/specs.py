"""Checking what a request asks for, in full, before anything is promised; and filling in every default."""

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference_svc.requests.capture_specs import resolve_capture
from inference_svc.requests.checks import check_selection, invalid, layer_list
from inference_svc.taps.steps.demand import MAX_ENTRIES, MAX_PROGRAMS, demand_of
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2, selection_pb2, steering_pb2
from residuum.wire.ids import is_valid_id
from residuum.wire.limits import (
    DEFAULT_MAX_TOKENS,
    DIGEST_BYTES,
    MAX_CAPTURE_TOKENS,
    MAX_OPERATIONS,
    MAX_SEQUENCES,
    MAX_STOP_TEXTS,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference_svc.engine.facts import ModelFacts
    from inference_svc.taps.steps.demand import Demand

OPERATIONS = tuple(field.name for field in steering_pb2.SteeringOperation.DESCRIPTOR.oneofs_by_name["operation"].fields)
"""The names of the steering operations."""

_MAX_TEMPERATURE = 2.0


@dataclass(frozen=True)
class ResolvedSpec:
    """A spec that was found good, with every default filled in."""

    request_id: str
    """Empty: one is to be made."""
    capture: capture_pb2.CaptureSpec | None
    """Layers as a list, sites, encoding with its options, and reduction named."""
    steering: steering_pb2.SteeringSpec | None
    """Layers of every operation as a list; None if there are no operations, and none can come."""

    @property
    def digests(self) -> list[bytes]:
        """The digests of the vectors that it needs, to steer or to project onto, each once, in their order."""
        steering = digests_of(self.steering) if self.steering else []
        projection = self.capture.encoding_options.vectors if self.capture else []
        return list(dict.fromkeys((*steering, *projection)))

    @property
    def num_bytes(self) -> int:
        """Bytes of its messages."""
        return sum(part.ByteSize() for part in (self.capture, self.steering) if part is not None)

    def cache_salt(self, prompt_tokens: int) -> str | None:
        """Return what keeps the KV cache of differently steered requests apart; None if the request is not steered.

        Equal steering shares KV: the salt is a fingerprint of the operations, their vectors, factors and positions.
        Where positions are counted from the prompt's end, or chosen by phase, equal means of prompts of equal length,
        too: else a longer prompt would read rows that were steered as another's last, or as generated ones. A request
        whose steering can change shares nothing, not even its own sequences with each other: each asks anew.

        Args:
            prompt_tokens: Tokens of the request's prompt.
        """
        if self.steering is None:
            return None
        if self.steering.updatable:
            return secrets.token_hex(16)  # what it will be steered by nobody knows yet, so nobody may share it
        fingerprint = hashlib.sha256(self.steering.SerializeToString(deterministic=True))
        if any(_depends_on_prompt(operation.positions) for operation in self.steering.operations):
            fingerprint.update(prompt_tokens.to_bytes(8, "little"))
        return fingerprint.hexdigest()


def resolve_spec(spec: inference_pb2.RequestSpec, facts: ModelFacts) -> ResolvedSpec:
    """Check a spec against the model.

    Raises:
        Failure: Something in it cannot be; the reason and the metadata say what.
    """
    if spec.request_id and not is_valid_id(spec.request_id):
        raise invalid("request_id", "A request id is 1 to 128 of a-z A-Z 0-9 . _ - and starts with none of . and -.")
    if spec.model and spec.model != facts.name:
        raise Failure(
            Reason.ERROR_REASON_UNKNOWN_MODEL,
            f"This server serves {facts.name}, not {spec.model}.",
            model=spec.model,
            serving=facts.name,
        )
    capture = resolve_capture(spec.capture, facts) if spec.HasField("capture") else None
    asked = spec.steering.operations or spec.steering.updatable
    steering = resolve_steering(spec.steering, facts) if asked else None
    if capture is not None or steering is not None:
        check_demand(demand_of_steering(steering, capture))
    return ResolvedSpec(spec.request_id, capture, steering)


def max_new_tokens(parameters: inference_pb2.SamplingParameters) -> int:
    """Return how many tokens each sequence may generate at most."""
    return parameters.max_tokens if parameters.HasField("max_tokens") else DEFAULT_MAX_TOKENS


def num_sequences(parameters: inference_pb2.SamplingParameters) -> int:
    """Return how many sequences are generated."""
    return parameters.num_sequences if parameters.HasField("num_sequences") else 1


def check_sampling(parameters: inference_pb2.SamplingParameters) -> None:
    """Check sampling parameters by themselves.

    Raises:
        Failure: One is out of range; the metadata name the field.
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
    """Check that a prompt has tokens, and fits the model's context together with the tokens to generate.

    Raises:
        Failure: It does not.
    """
    if not token_ids:
        raise Failure(Reason.ERROR_REASON_EMPTY_PROMPT, "The prompt has no tokens; send at least one.")
    new_tokens = max_new_tokens(parameters)
    if len(token_ids) + new_tokens > facts.max_model_len:
        raise Failure(
            Reason.ERROR_REASON_PROMPT_TOO_LONG,
            f"The prompt has {len(token_ids)} tokens and max_tokens is {new_tokens}; together the model takes "
            f"{facts.max_model_len}. Shorten the prompt or lower max_tokens.",
            prompt_tokens=len(token_ids),
            limit=facts.max_model_len,
        )


def check_capture_size(
    capture: capture_pb2.CaptureSpec | None, prompt_tokens: int, parameters: inference_pb2.SamplingParameters
) -> None:
    """Check that the manifest of a capture will fit a message, whatever is generated.

    Raises:
        Failure: Too many tokens would be captured.
    """
    tokens = num_sequences(parameters) * (prompt_tokens + max_new_tokens(parameters))
    if capture is not None and tokens > MAX_CAPTURE_TOKENS:
        raise invalid(
            "sampling.num_sequences",
            f"A capture has at most {MAX_CAPTURE_TOKENS} tokens in all sequences, and this one could have {tokens}. "
            "Lower max_tokens, or send several requests instead of several sequences.",
        )


def digests_of(steering: steering_pb2.SteeringSpec) -> list[bytes]:
    """Return the digests of the vectors that a steering needs, each once, in their order."""
    return list(dict.fromkeys(digest for item in steering.operations for digest in layer_digests(item)))


def directions_of(steering: steering_pb2.SteeringSpec) -> set[bytes]:
    """Return the digests of the vectors of which a steering takes the direction."""
    return {
        digest
        for item in steering.operations
        if item.WhichOneof("operation") != "add"
        for digest in layer_digests(item)
    }


def layer_digests(operation: steering_pb2.SteeringOperation) -> list[bytes]:
    """Return the digests of a checked operation's vectors: one for all of its layers, or one for each."""
    kind = operation.WhichOneof("operation")
    return list(operation.layer_digests) or [bytes(getattr(operation, kind).digest) if kind else b""]


def resolve_steering(spec: steering_pb2.SteeringSpec, facts: ModelFacts) -> steering_pb2.SteeringSpec:
    """Check a steering against the model, and fill in every default.

    Raises:
        Failure: Something in it cannot be; the reason and the metadata say what.
    """
    if len(spec.operations) > MAX_OPERATIONS:
        raise invalid("steering.operations", f"At most {MAX_OPERATIONS} operations, not {len(spec.operations)}.")
    resolved = steering_pb2.SteeringSpec(updatable=spec.updatable)
    for index, operation in enumerate(spec.operations):
        field = f"steering.operations[{index}]"
        _check_operation(field, operation)
        check_selection(f"{field}.positions", operation.positions)
        checked = resolved.operations.add()
        checked.CopyFrom(operation)
        checked.layers.CopyFrom(layer_list(f"{field}.layers", operation.layers, facts))
    return resolved


def demand_of_steering(steering: steering_pb2.SteeringSpec | None, capture: capture_pb2.CaptureSpec | None) -> Demand:
    """Return how much room of the taps' tables a checked request takes."""
    operations: list[tuple[Sequence[int], selection_pb2.PositionSelection]] = []
    for item in steering.operations if steering else ():
        layers = item.layers.list.layers
        groups = [[layer] for layer in layers] if item.layer_digests else [layers]
        operations += [(group, item.positions) for group in groups]
    return demand_of(operations, capture.positions if capture else None)


def check_demand(demand: Demand) -> None:
    """Make sure that a request fits the taps' tables whatever runs beside it.

    Raises:
        Failure: It does not.
    """
    if demand.programs > MAX_PROGRAMS or demand.entries > MAX_ENTRIES:
        raise invalid(
            "steering.operations",
            f"Its positions fall into as many as {demand.programs} classes (at most {MAX_PROGRAMS}) with "
            f"{demand.entries} operations to apply (at most {MAX_ENTRIES}). Use fewer operations, fewer position "
            "ranges, or the same layers and positions for more of them.",
        )


def _depends_on_prompt(positions: selection_pb2.PositionSelection) -> bool:
    return bool(positions.phases) or any(item.first < 0 or item.last < 0 for item in positions.ranges)


def _check_operation(field: str, operation: steering_pb2.SteeringOperation) -> None:
    kind = operation.WhichOneof("operation")
    if kind is None:
        raise Failure(
            Reason.ERROR_REASON_UNKNOWN_OPERATION,
            f"{field} names no operation that this server knows; it knows {', '.join(OPERATIONS)}.",
            field=field,
        )
    _check_digests(field, kind, operation)
    if kind in ("add", "ablate") and not math.isfinite(getattr(operation, kind).scale):
        raise invalid(f"{field}.{kind}.scale", "The scale must be finite.")
    if kind == "replace" and not math.isfinite(operation.replace.value):
        raise invalid(f"{field}.replace.value", "The value must be finite.")
    if kind == "cap":
        _check_bounds(field, operation.cap)


def _check_digests(field: str, kind: str, operation: steering_pb2.SteeringOperation) -> None:
    own = len(operation.layer_digests)
    if any(len(digest) != DIGEST_BYTES for digest in layer_digests(operation)):
        name = "layer_digests" if own else f"{kind}.digest"
        raise invalid(f"{field}.{name}", f"A digest is {DIGEST_BYTES} bytes long.")
    if own and getattr(operation, kind).digest:
        raise invalid(f"{field}.layer_digests", f"Set either layer_digests or {kind}.digest, not both.")
    if own and own != len(operation.layers.list.layers):
        raise invalid(
            f"{field}.layer_digests",
            f"There are {own} layer_digests for {len(operation.layers.list.layers)} listed layers; give one for each.",
        )


def _check_bounds(field: str, cap: steering_pb2.Cap) -> None:
    given = [name for name in ("min", "max") if cap.HasField(name)]
    if not given:
        raise invalid(f"{field}.cap", "Set min, max or both; a cap without a bound does nothing.")
    if not all(math.isfinite(getattr(cap, name)) for name in given):
        raise invalid(f"{field}.cap", "A bound must be finite; leave it unset for none.")
    if len(given) == 2 and cap.max < cap.min:  # noqa: PLR2004 - both
        raise invalid(f"{field}.cap", f"max ({cap.max}) is below min ({cap.min}).")
