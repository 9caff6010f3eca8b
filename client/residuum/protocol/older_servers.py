"""What a server that is older than the client would ignore in a request. No I/O: both clients use it."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from residuum import exceptions as exc
from residuum.v1 import inference_pb2
from residuum.values.model.info import ModelInfo
from residuum.values.probes.probe import Probe


class _Part(NamedTuple):
    """A part of requests that some servers do not read."""

    error: type[exc.InvalidRequest]
    reason: str
    problem: str
    field: str = ""


def _older(consequence: str, advice: str) -> str:
    return f"This server is older than the client, and {consequence}. Update it, or leave out {advice}."


_SAMPLING = (
    "bad_words", "frequency_penalty", "json_schema", "logit_bias", "logprobs", "min_p", "presence_penalty",
    "prompt_logprobs", "regex", "repetition_penalty", "stop_token_ids", "truncate_prompt",
)  # fmt: skip
"""The sampling parameters that some servers do not read."""

_PARTS = {
    "sites": _Part(exc.UnknownSite, "UNKNOWN_SITE", _older("steers only at resid_post", "site=")),
    "gates": _Part(exc.UnknownOperation, "UNKNOWN_OPERATION", _older("would ignore the gate", "gate=")),
    "probes": _Part(
        exc.InvalidRequest,
        "INVALID_FIELD",
        "This server has no probes: it was started with --score-mib 0 or with data or pipeline parallelism, or it is "
        "older than the client. Ask its operator to change that, or leave out probes= and rules=.",
        "probes",
    ),
    "rules": _Part(
        exc.InvalidRequest,
        "INVALID_FIELD",
        "This server has no rules. Ask its operator to update it, or leave out rules=.",
        "probes.rules",
    ),
    "labels": _Part(
        exc.InvalidRequest,
        "INVALID_FIELD",
        _older("would keep neither labels nor the text of the prompt", "labels= and keep_prompt="),
        "capture",
    ),
    "sampling": _Part(
        exc.InvalidRequest,
        "INVALID_FIELD",
        _older("would ignore some of the sampling parameters", ", ".join(_SAMPLING)),
        "sampling",
    ),
    "attention": _Part(
        exc.InvalidRequest,
        "INVALID_FIELD",
        _older("would ignore the attention of a probe", "the attention probes"),
        "probes",
    ),
    "places": _Part(
        exc.InvalidRequest,
        "INVALID_FIELD",
        _older("would read only the first place of a probe", "the probes that read several places"),
        "probes",
    ),
}


def needed_parts(
    spec: inference_pb2.RequestSpec, probes: Sequence[Probe], sampling: inference_pb2.SamplingParameters | None
) -> set[str]:
    """Return the parts that a request has."""
    operations = spec.steering.operations
    uses = {
        "sites": any(operation.site for operation in operations),
        "gates": any(operation.HasField("gate") for operation in operations),
        "probes": bool(probes),
        "rules": bool(spec.probes.rules),
        "labels": bool(spec.capture.labels) or spec.capture.keep_prompt,
        "sampling": any(field.name in _SAMPLING for field, _ in sampling.ListFields()) if sampling else False,
        "attention": any(probe.attention for probe in probes),
        "places": any(len(probe.places) > 1 for probe in probes),
    }
    return {name for name, is_used in uses.items() if is_used}


def known_parts(info: ModelInfo) -> frozenset[str]:
    """Return the parts that a server reads."""
    lists: dict[str, object] = {
        "sites": info.steering_sites,
        "gates": info.gate_measures,
        "probes": info.probe_sites,
        "rules": info.limits["max_rules"],
        # No server that lists steering_sites is older than these.
        "labels": info.steering_sites,
        "sampling": info.steering_sites,
        "attention": info.limits["max_probe_heads"],
        "places": info.limits["max_probe_places"],
    }
    return frozenset(name for name, known in lists.items() if known)


def check_parts(needed: AbstractSet[str], known: AbstractSet[str]) -> None:
    """Check that a server reads all parts of a request. An older server ignores them, in silence.

    Raises:
        UnknownSite: The server does not read the site.
        UnknownOperation: The server does not read the gate.
        InvalidRequest: The server does not read the probes, the rules, the labels or the sampling parameters.
    """
    for name, part in _PARTS.items():
        if name in needed - known:
            raise part.error(
                part.problem,
                reason=part.reason,
                metadata={"field": part.field} if part.field else None,
            )
