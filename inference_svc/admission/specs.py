"""The spec of a request: all its checks against the model, and its defaults."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from inference_svc.admission.captures import check_capture_labels, resolve_capture
from inference_svc.admission.fields import invalid
from inference_svc.admission.kept_parts import KeptParts
from inference_svc.admission.probes import probe_digests, resolve_probes
from inference_svc.admission.rules import STEER, check_steering_rules, has_action, resolve_rules, rule_digests
from inference_svc.admission.steering import check_demand, demand_of_steering, digests_of, resolve_steering
from inference_svc.resources.vector_cache import OPERATOR, vector_name
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, probe_pb2, steering_pb2
from residuum.wire.ids import is_valid_id
from residuum.wire.limits import MAX_ID_LENGTH

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from inference_svc.model_facts import ModelFacts
    from residuum.v1 import inference_pb2, selection_pb2

_IF_EXISTS = frozenset(capture_pb2.IfExists.values())

_Derived = TypeVar("_Derived")

_MAX_DERIVED = 16
"""How many results are kept for a spec. Plans differ when vectors have moved to other rows, so old ones must go."""

_MAX_NAMED = 32
"""The most adapters that a message names; it counts the others."""


@dataclass(frozen=True)
class SharedSpec:
    """What the specs of many requests have in common, resolved. Nothing changes it, because these requests share it."""

    capture: capture_pb2.CaptureSpec | None = None
    """`SpecResolver` leaves the labels out."""
    steering: steering_pb2.SteeringSpec | None = None
    """Layers of every operation as a list. None if there are no operations, and none can be added later."""
    probes: probe_pb2.ProbeSpec | None = None
    """The probes, with their sites, and the rules: the caller's, and then the operator's. None without probes."""
    own_probes: probe_pb2.ProbeSpec | None = None
    """The caller's own; None if there are none."""
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def derived(self, key: Hashable, make: Callable[[], _Derived]) -> _Derived:
        """Return what `make` makes. The results used last are kept with the spec, by their keys."""
        made: _Derived = self._derived.pop(key) if key in self._derived else make()
        self._derived[key] = made  # now the newest
        if len(self._derived) > _MAX_DERIVED:
            del self._derived[next(iter(self._derived))]
        return made

    @cached_property
    def may_change_steering(self) -> bool:
        """Whether the steering may change while the request generates."""
        return bool(self.steering and self.steering.updatable) or has_action(self.probes, STEER)

    @cached_property
    def digests(self) -> list[bytes]:
        """The digests of all vectors that the request needs: of its steering, projection, probes and rules."""
        found = self.capture.encoding_options.vectors if self.capture else ()
        steering = digests_of(self.steering) if self.steering else []
        return list(dict.fromkeys((*steering, *found, *probe_digests(self.probes), *rule_digests(self.probes))))

    @cached_property
    def operator_digests(self) -> frozenset[bytes]:
        """The digests that only the operator's probes need: their vectors are the operator's, not the tenant's."""
        if self.probes is None or self.probes is self.own_probes:
            return frozenset()
        return frozenset(self.digests).difference(replace(self, probes=self.own_probes).digests)

    @cached_property
    def sae_digest(self) -> bytes:
        """The digest of the encoder whose features are captured; empty without one."""
        return self.capture.encoding_options.sae.digest if self.capture else b""

    def vector_names(self, tenant: str) -> list[bytes]:
        """Return the names of the vectors that a tenant's request needs; see `vector_name`."""
        operators = self.operator_digests
        return [vector_name(OPERATOR if digest in operators else tenant, digest) for digest in self.digests]

    def cache_salt(self, prompt_tokens: int) -> str | None:
        """Return the salt for vLLM's prefix cache, so that only equally steered requests share KV.

        vLLM itself keeps the KV of LoRA adapters apart, by their names.

        The salt is a fingerprint of the operations: their vectors, factors and positions. If positions depend on where
        the prompt ends, the prompt's length is part of it. Otherwise a longer prompt could reuse rows that were steered
        as the last rows of a shorter one. A request whose steering may change later, by a caller or a rule, gets a
        random salt at each call, so that not even its own sequences share KV, because its future steering is unknown.

        Args:
            prompt_tokens: Tokens of the request's prompt.

        Returns:
            The salt; None if the request is not steered.
        """
        if self.may_change_steering:
            return secrets.token_hex(16)
        if self.steering is None:
            return None
        fingerprint = hashlib.sha256(self.steering.SerializeToString(deterministic=True))
        if any(_depends_on_prompt(operation.positions) for operation in self.steering.operations):
            fingerprint.update(prompt_tokens.to_bytes(8, "little"))
        return fingerprint.hexdigest()


@dataclass(frozen=True)
class ResolvedSpec:
    """A valid spec with every default filled in. Nothing changes its messages, because requests share them."""

    request_id: str
    """Empty if the service makes the ID."""
    capture: capture_pb2.CaptureSpec | None
    """With its labels. Layers as a list, sites, encoding with its options, and reduction named."""
    shared: SharedSpec
    """All that other requests may repeat."""
    if_exists: capture_pb2.IfExists.ValueType = capture_pb2.IF_EXISTS_UNSPECIFIED
    """What to do if a capture with the request's ID exists."""
    adapter: str = ""
    """The name of the LoRA adapter that the request uses; empty: none."""

    @property
    def steering(self) -> steering_pb2.SteeringSpec | None:
        """See `SharedSpec.steering`."""
        return self.shared.steering

    @property
    def probes(self) -> probe_pb2.ProbeSpec | None:
        """See `SharedSpec.probes`."""
        return self.shared.probes

    @property
    def own_probes(self) -> probe_pb2.ProbeSpec | None:
        """See `SharedSpec.own_probes`."""
        return self.shared.own_probes

    @property
    def shown_probes(self) -> Sequence[probe_pb2.Probe]:
        """The probes whose scores the caller gets: its own."""
        return self.own_probes.probes if self.own_probes is not None else ()

    @property
    def num_bytes(self) -> int:
        """The serialised size of the capture, the steering and the probes, in bytes."""
        return sum(part.ByteSize() for part in (self.capture, self.steering, self.probes) if part is not None)


class SpecResolver:
    """Checks specs against one model, and keeps the results for their parts, because callers repeat these."""

    def __init__(self, facts: ModelFacts) -> None:
        """Keep nothing yet."""
        self._facts = facts
        self._captures = KeptParts(lambda data: resolve_capture(capture_pb2.CaptureSpec.FromString(data), facts))
        self._steering = KeptParts(lambda data: resolve_steering(steering_pb2.SteeringSpec.FromString(data), facts))
        self._probes = KeptParts(lambda data: _resolve_scores(probe_pb2.ProbeSpec.FromString(data), facts))
        self._shared = KeptParts(self._resolve_shared)

    def resolve(self, spec: inference_pb2.RequestSpec) -> ResolvedSpec:
        """Return a spec with every default filled in.

        Raises:
            Failure: The spec is invalid. The reason and the metadata name the field.
        """
        if spec.request_id and not is_valid_id(spec.request_id):
            raise invalid(
                "request_id",
                "A request ID has 1 to 128 characters of a-z A-Z 0-9 . _ - and does not start with . or -.",
            )
        adapter = _adapter_named(spec.model, self._facts)
        steers = spec.steering.operations or spec.steering.updatable
        scores = spec.probes.probes or spec.probes.rules
        shared = self._shared(
            _without_labels(spec.capture).SerializeToString() if spec.HasField("capture") else None,
            spec.steering.SerializeToString() if steers else None,
            spec.probes.SerializeToString() if scores else None,
        )
        capture = shared.capture
        if shared.capture is not None and spec.capture.labels:
            check_capture_labels(spec.capture)
            capture = capture_pb2.CaptureSpec(labels=spec.capture.labels)
            capture.MergeFrom(shared.capture)  # which has none
        _check_if_exists(spec)
        return ResolvedSpec(spec.request_id, capture, shared, spec.if_exists, adapter)

    def _resolve_shared(self, capture: bytes | None, steering: bytes | None, probes: bytes | None) -> SharedSpec:
        """Check the serialised parts of a spec, and fill in their defaults."""
        captured = None if capture is None else self._captures(capture)
        steered = None if steering is None else self._steering(steering)
        scored = None if probes is None else self._probes(probes)
        shared = SharedSpec(captured, steered, scored, own_probes=scored)
        check_demand(demand_of_steering(shared.steering, shared.capture, shared.probes))
        check_steering_rules(shared)
        return shared


def _without_labels(spec: capture_pb2.CaptureSpec) -> capture_pb2.CaptureSpec:
    """Return a capture without its labels, which often differ where all else is the same."""
    if not spec.labels:
        return spec
    bare = capture_pb2.CaptureSpec()
    bare.CopyFrom(spec)
    bare.ClearField("labels")
    return bare


def _resolve_scores(spec: probe_pb2.ProbeSpec, facts: ModelFacts) -> probe_pb2.ProbeSpec:
    """Check probes and their rules against the model; return them with every default filled in."""
    resolved = resolve_probes(spec, facts)
    resolve_rules(resolved, facts)
    return resolved


def _adapter_named(model: str, facts: ModelFacts) -> str:
    """Return the LoRA adapter that a spec's `model` names; empty for the served model itself.

    Raises:
        Failure: The server has neither a model nor an adapter of this name.
    """
    if model in {"", facts.name}:
        return ""
    if model in facts.adapters:
        return model
    served = facts.name
    if facts.adapters:
        more = len(facts.adapters) - _MAX_NAMED
        named = ", ".join(facts.adapters[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        served += f" and its LoRA adapters {named}"
    shown = model[:MAX_ID_LENGTH]  # the caller chose the text, so bound the answer's size
    raise Failure(
        Reason.ERROR_REASON_UNKNOWN_MODEL,
        f"This server serves {served}, not {shown}. Name one of these, or leave model out. The server's operator adds "
        "LoRA adapters with --lora-modules.",
        model=shown,
        serving=facts.name,
    )


def _check_if_exists(spec: inference_pb2.RequestSpec) -> None:
    if spec.if_exists not in _IF_EXISTS:
        raise invalid("if_exists", f"if_exists is {int(spec.if_exists)}; set FAIL, REPLACE or SKIP.")
    if spec.if_exists > capture_pb2.IF_EXISTS_FAIL and not (spec.request_id and spec.HasField("capture")):
        raise invalid(
            "if_exists",
            "if_exists says what happens to an existing capture with the request's ID. Set a request_id and a capture, "
            "or leave it out.",
        )


def check_skip(spec: ResolvedSpec, parameters: inference_pb2.SamplingParameters) -> None:
    """Check that a capture that exists already can answer the request.

    Raises:
        Failure: It cannot, because the caller asks for log-probabilities, which a capture does not hold.
    """
    wants_logprobs = parameters.HasField("logprobs") or parameters.HasField("prompt_logprobs")
    if spec.if_exists == capture_pb2.IF_EXISTS_SKIP and wants_logprobs:
        raise invalid(
            "if_exists",
            "A capture that exists already holds no logprobs. Leave logprobs and prompt_logprobs out, or generate "
            "again: Set if_exists to REPLACE.",
        )


def _depends_on_prompt(positions: selection_pb2.PositionSelection) -> bool:
    return bool(positions.phases) or any(item.first < 0 or item.last < 0 for item in positions.ranges)
