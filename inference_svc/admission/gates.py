"""The gate of a steering operation: its checks, and its numbers in the worker's form.

In the worker, the feature that `clamp_feature` clamps is a gate, too: an inner product with a vector and a threshold.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from inference_svc.admission.fields import invalid
from inference_svc.taps.plan import Gate, Measure
from residuum.v1 import steering_pb2
from residuum.wire.limits import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

_MEASURES = {
    steering_pb2.GATE_MEASURE_PROJECTION: Measure.PROJECTION,
    steering_pb2.GATE_MEASURE_INNER_PRODUCT: Measure.INNER_PRODUCT,
    steering_pb2.GATE_MEASURE_COSINE: Measure.COSINE,
}

GATE_MEASURES = tuple(_MEASURES)
"""What a gate may measure."""

_MAX_FLOAT32 = 3.4e38


def gate_digests(operation: steering_pb2.SteeringOperation) -> list[bytes]:
    """Return the digests of an operation's gate: one for all layers, or one for each layer; none without a gate.

    Those of `clamp_feature` are those of the feature's row of the encoder.
    """
    if operation.HasField("clamp_feature"):
        return [operation.clamp_feature.encoder_digest]
    if not operation.HasField("gate"):
        return []
    return list(operation.gate.layer_digests) or [operation.gate.digest]


def resolve_gate(field: str, gate: steering_pb2.Gate, layers: Sequence[int]) -> steering_pb2.Gate:
    """Check a gate, and return it with every default filled in.

    Args:
        field: The name of the gate's field, for errors.
        gate: The gate.
        layers: The layers that its operation lists; empty if it selects all.

    Raises:
        Failure: The gate is invalid. The message says what to change.
    """
    _check_digests(field, gate, layers)
    resolved = steering_pb2.Gate()
    resolved.CopyFrom(gate)
    resolved.measure = gate.measure or steering_pb2.GATE_MEASURE_PROJECTION
    if resolved.measure not in _MEASURES:
        names = ", ".join(map(steering_pb2.GateMeasure.Name, GATE_MEASURES))
        raise invalid(f"{field}.measure", f"The measure is {int(gate.measure)}; this server knows {names}.")
    for name in ("threshold", "bias"):
        if not math.isfinite(getattr(gate, name)):
            raise invalid(f"{field}.{name}", f"The {name} is {getattr(gate, name)}; it must be finite.")
    if gate.HasField("sharpness") and not (math.isfinite(gate.sharpness) and gate.sharpness > 0):
        raise invalid(
            f"{field}.sharpness",
            f"The sharpness is {gate.sharpness}; it must be finite and above 0. Leave it unset for a gate that opens "
            "at once.",
        )
    _check_opens(field, resolved)
    return resolved


def has_gate(operation: steering_pb2.SteeringOperation) -> bool:
    """Return whether an operation has a gate in the worker's form."""
    return operation.HasField("gate") or operation.HasField("clamp_feature")


def make_gate(operation: steering_pb2.SteeringOperation, row: int) -> Gate:
    """Return the gate of a checked operation in the worker's form.

    Args:
        operation: The operation.
        row: The row of the gate's vector in the bank.
    """
    if operation.HasField("clamp_feature"):
        feature = operation.clamp_feature
        return Gate(row, max(feature.threshold, 0.0), feature.bias, Measure.FEATURE)
    gate = operation.gate
    sharpness = gate.sharpness if gate.HasField("sharpness") else math.inf
    return Gate(row, gate.threshold - gate.bias, -sharpness if gate.below else sharpness, _MEASURES[gate.measure])


def _check_digests(field: str, gate: steering_pb2.Gate, layers: Sequence[int]) -> None:
    own = len(gate.layer_digests)
    if any(len(digest) != DIGEST_BYTES for digest in gate.layer_digests or [gate.digest]):
        name = "layer_digests" if own else "digest"
        raise invalid(f"{field}.{name}", f"A digest must be {DIGEST_BYTES} bytes long: the SHA-256 of the vector.")
    if own and gate.digest:
        raise invalid(f"{field}.layer_digests", "Set either layer_digests or digest, not both.")
    if own and own != len(layers):
        raise invalid(
            f"{field}.layer_digests",
            f"There are {own} layer_digests for {len(layers)} listed layers of the operation; send one for each.",
        )


def _check_opens(field: str, gate: steering_pb2.Gate) -> None:
    """Check that some row could open a gate without sharpness."""
    threshold = gate.threshold - gate.bias
    if abs(threshold) > _MAX_FLOAT32:
        raise invalid(f"{field}.threshold", f"threshold - bias is {threshold:g}, which is beyond float32.")
    reach = -threshold if not gate.below else threshold
    if gate.measure == steering_pb2.GATE_MEASURE_COSINE and not gate.HasField("sharpness") and reach <= -1:
        side = "at least 1" if not gate.below else "at most -1"
        raise invalid(
            f"{field}.threshold",
            f"The gate never opens: threshold - bias is {threshold:g}, {side}, and a cosine is from -1 to 1.",
        )
