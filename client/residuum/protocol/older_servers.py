"""What a server that is older than the client would ignore in a request. No I/O: both clients use it."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from residuum import exceptions as exc
from residuum.v1 import steering_pb2
from residuum.values.model.info import ModelInfo
from residuum.values.probes.probe import Probe


class _Part(NamedTuple):
    """A part of requests that some servers do not read."""

    error: type[exc.InvalidRequest]
    reason: str
    problem: str


def _older(consequence: str, advice: str) -> str:
    return f"This server is older than the client, and {consequence}. Update it, or leave out {advice}."


_PARTS = {
    "sites": _Part(exc.UnknownSite, "UNKNOWN_SITE", _older("steers only at resid_post", "site=")),
    "gates": _Part(exc.UnknownOperation, "UNKNOWN_OPERATION", _older("would ignore the gate", "gate=")),
    "probes": _Part(
        exc.InvalidRequest,
        "INVALID_FIELD",
        "This server has no probes: it was started with --score-mib 0 or with data or pipeline parallelism, or it is "
        "older than the client. Ask its operator to change that, or leave out probes= and rules=.",
    ),
    "attention": _Part(
        exc.InvalidRequest, "INVALID_FIELD", _older("would ignore the attention of a probe", "the attention probes")
    ),
    "places": _Part(
        exc.InvalidRequest,
        "INVALID_FIELD",
        _older("would read only the first place of a probe", "the probes that read several places"),
    ),
}


def needed_parts(steering: steering_pb2.SteeringSpec, probes: Sequence[Probe]) -> set[str]:
    """Return the parts that a request has."""
    uses = {
        "sites": any(operation.site for operation in steering.operations),
        "gates": any(operation.HasField("gate") for operation in steering.operations),
        "probes": bool(probes),
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
        "attention": info.limits["max_probe_heads"],
        "places": info.limits["max_probe_places"],
    }
    return frozenset(name for name, known in lists.items() if known)


def check_parts(needed: AbstractSet[str], known: AbstractSet[str]) -> None:
    """Check that a server reads all parts of a request. An older server ignores them, in silence.

    Raises:
        UnknownSite: The server does not read the site.
        UnknownOperation: The server does not read the gate.
        InvalidRequest: The server does not read the probes.
    """
    for name, part in _PARTS.items():
        if name in needed - known:
            raise part.error(
                part.problem,
                reason=part.reason,
                metadata={"field": "probes"} if part.reason == "INVALID_FIELD" else None,
            )
