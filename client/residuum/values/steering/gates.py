"""Gates: an operation applies to a row only as far as the row itself says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace

from residuum.exceptions import BadVector, InvalidRequest
from residuum.v1 import steering_pb2
from residuum.values.tensors.numbers import finite_float32
from residuum.values.tensors.vector import LayerVectors, Vector, by_steered_layer, rows_site
from residuum.wire.limits import MAX_DIRECTION_NORM, MIN_DIRECTION_NORM

MEASURES = {
    name.removeprefix("GATE_MEASURE_").lower(): number for name, number in steering_pb2.GateMeasure.items() if number
}
"""What a gate may measure, by name."""

MEASURE_NAMES = {number: name for name, number in MEASURES.items()}

SITE_ADVICE = "A gate measures the rows of its operation: give both the same site."
"""What to do about a gate for rows of another kind than those of the operation."""


@dataclass(frozen=True)
class Gate:
    """Lets an operation apply to a row only if the row points along a vector.

    The server decides for each row x, as it is right before the operation, by the row's score. The score is
    measure + bias, with one of three measures:

        projection      x·v̂, in units of x, with v̂ = v / |v|
        inner_product   x·v; with a bias, this is what a linear probe computes
        cosine          x·v̂ / |x|, from -1 to 1

    The operation applies if the score is above the threshold. Otherwise the row stays as it is, to the bit. With
    `sharpness`, the operation's change of the row is multiplied by sigmoid(sharpness·(score - threshold)) instead.

    Attributes:
        vector: The vector, as long as the operation's rows; or one for each of the operation's layers, as
            {layer: vector} or Directions. Directions of "z" or "mlp_act" are only for operations at that site.
        threshold: The score above which the gate is open.
        bias: Added to the measure.
        sharpness: How fast the gate opens around the threshold, above 0; None: at once.
        measure: What the gate measures: "projection", "inner_product" or "cosine".
        below: Open the gate where the score is below the threshold instead.

    Raises:
        TypeError: An argument has the wrong type.
        BadVector: The vector has no direction.
        InvalidRequest: A number is out of range, or a cosine can never open the gate.

    Example:
        >>> gate = residuum.Gate(refusal[12], threshold=5.0)
        >>> residuum.Add(refusal[12], layer=12, scale=0.5, gate=gate)
    """

    vector: Vector | Mapping[int, Vector]
    threshold: float = 0.0
    _: KW_ONLY
    bias: float = 0.0
    sharpness: float | None = None
    measure: str = "projection"
    below: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.vector, Mapping):
            if not hasattr(self.vector, "placed"):  # the layers of Directions depend on the operation's site
                object.__setattr__(self, "vector", LayerVectors(self.vector))
        elif not isinstance(self.vector, Vector):
            raise TypeError("Gate takes a residuum.Vector; create one with Vector.from_array(array).")
        for name in ("threshold", "bias") if self.sharpness is None else ("threshold", "bias", "sharpness"):
            object.__setattr__(self, name, finite_float32(f"Gate: {name}", getattr(self, name)))
        if not isinstance(self.below, bool):
            raise TypeError(f"Gate: below must be True or False, not {self.below!r}.")
        self._check()

    def _check(self) -> None:
        if self.measure not in MEASURES:
            raise InvalidRequest(
                f"Gate: measure must be one of {', '.join(map(repr, MEASURES))}, not {self.measure!r}.",
                reason="INVALID_FIELD",
            )
        if self.sharpness is not None and not self.sharpness > 0:
            raise InvalidRequest(
                f"Gate: sharpness must be above 0, not {self.sharpness}. Leave it out for a gate that opens at once; "
                "below=True opens it below the threshold.",
                reason="INVALID_FIELD",
            )
        reach = (self.bias - self.threshold) * (-1 if self.below else 1)
        if self.measure == "cosine" and self.sharpness is None and reach <= -1:
            raise InvalidRequest(
                f"Gate: a cosine is from -1 to 1, so this gate never opens: bias={self.bias}, "
                f"threshold={self.threshold}, below={self.below}.",
                reason="INVALID_FIELD",
            )
        for vector in self.vectors:
            if not MIN_DIRECTION_NORM <= vector.norm <= MAX_DIRECTION_NORM:
                problem = f"has the norm {vector.norm:g}" if vector.norm else "is zero"
                raise BadVector(f"Gate needs a direction, but its vector {problem}.", reason="BAD_VALUES")

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The vectors: one, or one for each layer in the order of the layers."""
        return (self.vector,) if isinstance(self.vector, Vector) else tuple(self.vector.values())

    def at(self, site: str) -> Gate:
        """Return the gate of an operation at a site: its vectors are by the layer of the operation.

        Raises:
            InvalidRequest: The gate has directions of a site whose rows are of another kind.
        """
        if isinstance(self.vector, Vector):
            return self
        rows_site(self.vector, site, advice=SITE_ADVICE)
        return replace(self, vector=LayerVectors(by_steered_layer(self.vector, site)[0]))

    def to_proto(self) -> steering_pb2.Gate:
        """Return the gate's message, with the vectors' digests instead of their values."""
        message = steering_pb2.Gate(
            measure=MEASURES[self.measure],
            bias=self.bias,
            threshold=self.threshold,
            sharpness=self.sharpness,
            below=self.below,
        )
        if isinstance(self.vector, Vector):
            message.digest = self.vector.digest
        else:
            message.layer_digests.extend(vector.digest for vector in self.vectors)
        return message


@dataclass(frozen=True)
class GateRecord:
    """The gate of a steering operation, as it was applied.

    Attributes:
        digests: The digest of its vector in hexadecimal; or one digest for each layer, in the order of the layers.
        threshold: The score above which it was open.
        bias: What was added to the measure.
        sharpness: How fast it opened around the threshold; None: at once.
        measure: "projection", "inner_product" or "cosine"; "unknown" if this version does not know it.
        below: Whether it was open below the threshold.
    """

    digests: tuple[str, ...]
    threshold: float
    bias: float = 0.0
    sharpness: float | None = None
    measure: str = "projection"
    below: bool = False

    @classmethod
    def from_proto(cls, proto: steering_pb2.Gate) -> GateRecord:
        """Return the record of a message."""
        return cls(
            digests=tuple(digest.hex() for digest in proto.layer_digests or [proto.digest]),
            threshold=proto.threshold,
            bias=proto.bias,
            sharpness=proto.sharpness if proto.HasField("sharpness") else None,
            measure=MEASURE_NAMES.get(proto.measure or steering_pb2.GATE_MEASURE_PROJECTION, "unknown"),
            below=proto.below,
        )
