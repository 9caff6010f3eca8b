"""What a manifest says about rows, sequences and steering, as frozen Python values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from residuum.v1 import capture_pb2, steering_pb2
from residuum.values.captures.manifest_names import site_name
from residuum.values.selections.layers_and_positions import Positions
from residuum.values.steering.gates import GateRecord


@dataclass(frozen=True)
class RowSet:
    """Rows of one sequence at one site: every combination of some layers and some positions.

    Attributes:
        sequence: The sequence.
        site: The site, such as "resid_post".
        layers: The layers.
        ranges: The positions as ascending runs (first, last), both inclusive.
    """

    sequence: int
    site: str
    layers: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        runs = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in self.ranges)
        return f"{self.site}, layers {_runs(self.layers)}, sequence {self.sequence}: positions {runs}"


@dataclass(frozen=True)
class SequenceOutcome:
    """How one sequence ended.

    Attributes:
        generated_token_ids: The IDs of the generated tokens.
        finish_reason: "stop", "length" or "abort".
    """

    generated_token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True)
class SteeringRecord:
    """One steering operation, as it was applied.

    Attributes:
        operation: "add", "ablate", "cap", "replace", "set", "multiply" or "clamp_feature"; "unknown" if this version
            does not know it.
        layers: The layers at which it was applied.
        digests: The digest of its vector in hexadecimal; or one digest for each layer, in the order of the layers.
        positions: The positions to which it was applied.
        scale: The factor of "add" and "ablate".
        min: The lower bound of "cap" and "clamp_feature".
        max: The upper bound of "cap" and "clamp_feature".
        value: The projection that "replace" set.
        keep_norm: Whether each row was scaled back to the norm that it had before.
        site: The site at which it was applied.
        gate: How far it was applied to each row; None: completely.
        encoder_digest: For "clamp_feature", the digest of the feature's row of the encoder in hexadecimal.
        bias: For "clamp_feature", the feature's bias.
        threshold: For "clamp_feature", the feature's threshold.
    """

    operation: str
    layers: tuple[int, ...]
    digests: tuple[str, ...]
    positions: Positions
    scale: float | None = None
    min: float | None = None
    max: float | None = None
    value: float | None = None
    keep_norm: bool = False
    site: str = "resid_post"
    gate: GateRecord | None = None
    encoder_digest: str = ""
    bias: float | None = None
    threshold: float | None = None

    @classmethod
    def from_proto(cls, proto: steering_pb2.SteeringOperation) -> SteeringRecord:
        """Return the record of a message."""
        kind = proto.WhichOneof("operation")
        layers, positions = tuple(proto.layers.list.layers), Positions.from_proto(proto.positions)
        site = site_name(proto.site or capture_pb2.SITE_RESID_POST)
        gate = GateRecord.from_proto(proto.gate) if proto.HasField("gate") else None
        common: dict[str, Any] = {"keep_norm": proto.keep_norm, "site": site, "gate": gate}
        if kind is None:
            return cls("unknown", layers, (), positions, **common)
        operation: Any = getattr(proto, kind)
        numbers = {
            name: getattr(operation, name)
            for name, item in operation.DESCRIPTOR.fields_by_name.items()
            if name != "digest" and (not item.has_presence or operation.HasField(name))
        }
        if kind == "clamp_feature":
            numbers["encoder_digest"] = operation.encoder_digest.hex()
        if kind == "ablate":
            numbers.setdefault("scale", 1.0)
        digests = proto.layer_digests or [operation.digest]
        return cls(
            operation=kind,
            layers=layers,
            digests=tuple(digest.hex() for digest in digests),
            positions=positions,
            **common,
            **numbers,
        )


@dataclass(frozen=True)
class SteeringChange:
    """A change of the steering while the request was generating.

    Attributes:
        first_positions: For each sequence, the first position with this steering; the number of its tokens if it had
            ended already. A change by a rule is for one sequence only; for the others, this is 4294967295.
        steering: The operations from there on, in order; empty if there are none.
        rule: The name of the rule that fired; empty if `update_steering` made the change.
    """

    first_positions: tuple[int, ...]
    steering: tuple[SteeringRecord, ...]
    rule: str = ""


def steering_records(spec: steering_pb2.SteeringSpec) -> tuple[SteeringRecord, ...]:
    """Return the records of a request's operations, in order."""
    return tuple(SteeringRecord.from_proto(operation) for operation in spec.operations)


def row_sets(sets: Iterable[capture_pb2.RowSet]) -> tuple[RowSet, ...]:
    """Return the values of messages."""
    return tuple(
        RowSet(
            sequence=rows.sequence,
            site=site_name(rows.site),
            layers=tuple(rows.layers),
            ranges=tuple((run.first, run.last) for run in rows.positions),
        )
        for rows in sets
    )


def _runs(numbers: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
