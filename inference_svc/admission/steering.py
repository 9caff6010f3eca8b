"""The steering spec of a request: its checks against the model, and its defaults."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from inference_svc.admission.fields import check_selection, invalid, layer_list, site_name
from inference_svc.admission.gates import gate_digests, has_gate, resolve_gate
from inference_svc.admission.probes import demanded
from inference_svc.taps.points import STEERABLE
from inference_svc.taps.steps.demand import MAX_ENTRIES, MAX_PROGRAMS, demand_of, point_name
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, steering_pb2
from residuum.wire.limits import DIGEST_BYTES, MAX_OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inference_svc.model_facts import ModelFacts
    from inference_svc.taps.steps.demand import Demand
    from residuum.v1 import probe_pb2, selection_pb2

OPERATIONS = tuple(field.name for field in steering_pb2.SteeringOperation.DESCRIPTOR.oneofs_by_name["operation"].fields)
"""The names of the steering operations."""


def digests_of(steering: steering_pb2.SteeringSpec) -> list[bytes]:
    """Return the digests of all vectors that a steering spec needs, in order and without duplicates."""
    return list(dict.fromkeys(digest for item in steering.operations for digest in _all_digests(item)))


def directions_of(steering: steering_pb2.SteeringSpec) -> set[bytes]:
    """Return the digests of the vectors that must not be zero: those that a spec normalizes, and those of gates."""
    own = (item for item in steering.operations if item.WhichOneof("operation") in ("ablate", "cap", "replace"))
    gates = (digest for item in steering.operations if item.HasField("gate") for digest in gate_digests(item))
    return {digest for item in own for digest in layer_digests(item)} | set(gates)


class VectorUse(NamedTuple):
    """A vector that a request needs, and what for."""

    digest: bytes
    width: int
    """The elements of the rows that it is for."""
    field: str
    """The field that names it, for errors."""


def uses_of(steering: steering_pb2.SteeringSpec, facts: ModelFacts, name: str = "steering") -> list[VectorUse]:
    """Return the vectors of a checked spec. `name` is the name of its field."""
    return distinct_uses(
        VectorUse(digest, facts.width(item.site or capture_pb2.SITE_RESID_POST), f"{name}.operations[{index}]")
        for index, item in enumerate(steering.operations)
        for digest in _all_digests(item)
    )


def distinct_uses(uses: Iterable[VectorUse]) -> list[VectorUse]:
    """Return the first use of each vector for rows of each width."""
    first: dict[tuple[bytes, int], VectorUse] = {}
    for use in uses:
        first.setdefault((use.digest, use.width), use)
    return list(first.values())


def _all_digests(operation: steering_pb2.SteeringOperation) -> list[bytes]:
    return layer_digests(operation) + gate_digests(operation)


def layer_digests(operation: steering_pb2.SteeringOperation) -> list[bytes]:
    """Return the digests of a checked operation's vectors: one for all its layers, or one for each layer."""
    kind = operation.WhichOneof("operation")
    return list(operation.layer_digests) or [bytes(getattr(operation, kind).digest) if kind else b""]


def resolve_steering(
    spec: steering_pb2.SteeringSpec, facts: ModelFacts, name: str = "steering"
) -> steering_pb2.SteeringSpec:
    """Check a steering spec against the model, and return it with every default filled in.

    Args:
        spec: The spec.
        facts: The facts of the model.
        name: The name of its field, for errors.

    Raises:
        Failure: The steering is invalid. The reason and the metadata name the field.
    """
    if len(spec.operations) > MAX_OPERATIONS:
        raise invalid(
            f"{name}.operations", f"There are {len(spec.operations)} operations; send at most {MAX_OPERATIONS}."
        )
    resolved = steering_pb2.SteeringSpec(updatable=spec.updatable)
    for index, operation in enumerate(spec.operations):
        field = f"{name}.operations[{index}]"
        _check_operation(field, operation)
        site = operation.site or capture_pb2.SITE_RESID_POST
        _check_site(site, facts)
        check_selection(f"{field}.positions", operation.positions)
        checked = resolved.operations.add()
        checked.CopyFrom(operation)
        if operation.HasField("gate"):
            checked.gate.CopyFrom(resolve_gate(f"{field}.gate", operation.gate, operation.layers.list.layers))
        checked.layers.CopyFrom(layer_list(f"{field}.layers", operation.layers, facts, site))
        if operation.site == capture_pb2.SITE_RESID_POST:
            checked.ClearField("site")  # the default, so that equal steering has equal descriptions
    return resolved


def demand_of_steering(
    steering: steering_pb2.SteeringSpec | None,
    capture: capture_pb2.CaptureSpec | None,
    probes: probe_pb2.ProbeSpec | None = None,
) -> Demand:
    """Return how much room a valid request takes in the taps' tables."""
    operations: list[tuple[Sequence[tuple[int, int]], selection_pb2.PositionSelection, bool]] = []
    for item in steering.operations if steering else ():
        places = [point_name(item.site, layer) for layer in item.layers.list.layers]
        is_split = item.layer_digests or item.gate.layer_digests
        groups = [[place] for place in places] if is_split else [places]
        operations += [(group, item.positions, has_gate(item)) for group in groups]
    return demand_of(operations + demanded(probes), capture.positions if capture else None)


def check_demand(demand: Demand) -> None:
    """Check that a request fits its share of the taps' tables, which does not depend on other requests.

    Raises:
        Failure: The request takes too many programs or entries.
    """
    if demand.programs > MAX_PROGRAMS or demand.entries > MAX_ENTRIES:
        raise invalid(
            "steering.operations",
            f"Steering and probes need {demand.programs} different programs (at most {MAX_PROGRAMS}) with "
            f"{demand.entries} operations in total (at most {MAX_ENTRIES}; twice as many count where one has a gate). "
            "Use fewer operations, outputs or position ranges, or give more operations the same layers and positions.",
        )


def _check_operation(field: str, operation: steering_pb2.SteeringOperation) -> None:
    kind = operation.WhichOneof("operation")
    if kind is None:
        raise Failure(
            Reason.ERROR_REASON_UNKNOWN_OPERATION,
            f"{field} has no operation that this server supports; set one of {', '.join(OPERATIONS)}.",
            field=field,
        )
    _check_digests(field, kind, operation)
    if kind in ("add", "ablate") and not math.isfinite(getattr(operation, kind).scale):
        raise invalid(f"{field}.{kind}.scale", "The scale must be finite.")
    if kind == "replace" and not math.isfinite(operation.replace.value):
        raise invalid(f"{field}.replace.value", "The value must be finite.")
    if kind == "cap":
        _check_bounds(f"{field}.cap", operation.cap)
    if kind == "clamp_feature":
        _check_feature(field, operation)


def _check_site(site: capture_pb2.Site.ValueType, facts: ModelFacts) -> None:
    if site in facts.steering_sites:
        return
    enabled = [site_name(known) for known in facts.steering_sites]
    advice = "Its operator enables the site with --capture-sites." if site in STEERABLE else "No server steers there."
    if site == capture_pb2.SITE_RESID_PRE:
        advice = "Steer SITE_RESID_POST of the layer before."
    raise Failure(
        Reason.ERROR_REASON_UNKNOWN_SITE,
        f"Rows at the site {site_name(site)} cannot be steered; this server steers at: {', '.join(enabled)}. {advice}",
        site=site_name(site),
        armed=",".join(enabled),
    )


def _check_digests(field: str, kind: str, operation: steering_pb2.SteeringOperation) -> None:
    own = len(operation.layer_digests)
    if any(len(digest) != DIGEST_BYTES for digest in layer_digests(operation)):
        name = "layer_digests" if own else f"{kind}.digest"
        raise invalid(f"{field}.{name}", f"A digest must be {DIGEST_BYTES} bytes long: the SHA-256 of the vector.")
    if own and getattr(operation, kind).digest:
        raise invalid(f"{field}.layer_digests", f"Set either layer_digests or {kind}.digest, not both.")
    if own and own != len(operation.layers.list.layers):
        raise invalid(
            f"{field}.layer_digests",
            f"There are {own} layer_digests for {len(operation.layers.list.layers)} listed layers; send one for each.",
        )


def _check_feature(field: str, operation: steering_pb2.SteeringOperation) -> None:
    feature, name = operation.clamp_feature, f"{field}.clamp_feature"
    if operation.HasField("gate"):
        raise invalid(f"{field}.gate", "clamp_feature takes no gate: the feature itself decides about each row.")
    if operation.layer_digests:
        raise invalid(f"{field}.layer_digests", "clamp_feature has one feature for all its layers. Send one for each.")
    if len(feature.encoder_digest) != DIGEST_BYTES:
        raise invalid(
            f"{name}.encoder_digest", f"A digest must be {DIGEST_BYTES} bytes long: the SHA-256 of the vector."
        )
    for number in ("bias", "threshold"):
        if not math.isfinite(getattr(feature, number)):
            raise invalid(f"{name}.{number}", f"The {number} is {getattr(feature, number)}; it must be finite.")
    _check_bounds(name, feature)


def _check_bounds(field: str, cap: steering_pb2.Cap | steering_pb2.ClampFeature) -> None:
    given = [name for name in ("min", "max") if cap.HasField(name)]
    if not given:
        raise invalid(field, "Set min, max or both; without a bound it does nothing.")
    if not all(math.isfinite(getattr(cap, name)) for name in given):
        raise invalid(field, "A bound must be finite; leave it unset for no bound.")
    if len(given) == 2 and cap.max < cap.min:  # noqa: PLR2004 - both
        raise invalid(field, f"max ({cap.max}) is below min ({cap.min}).")
