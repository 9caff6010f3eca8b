"""The part that all steering operations share: a vector, and where it is applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, ClassVar, cast

from residuum.exceptions import BadVector, InvalidRequest
from residuum.v1 import steering_pb2
from residuum.values.selections.layers_and_positions import (
    LayersLike,
    Positions,
    PositionsLike,
    layer_list,
    layer_selection,
    selects_all,
)
from residuum.values.selections.points import BESIDE_THE_STREAM, site_numbers
from residuum.values.steering.gates import Gate
from residuum.values.steering.stored_row import StoredRow
from residuum.values.tensors.numbers import finite_float32
from residuum.values.tensors.vector import LayerVectors, Vector, by_steered_layer
from residuum.wire.limits import MAX_DIRECTION_NORM, MIN_DIRECTION_NORM

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class PlacedOperation:
    """The fields that all operations share: a vector, and where it is applied."""

    _example: ClassVar[str] = "scale=6.0"

    vector: Vector | StoredRow | Mapping[int, Vector | StoredRow]
    """The vector, as long as a row at the site; or one vector for each layer, as {layer: vector} or Directions. A
    `StoredRow` stands for the row of a capture, which the client reads when it sends the request."""
    _: KW_ONLY
    layer: LayersLike | None = None
    """The layer at which the operation is applied."""
    layers: LayersLike | None = None
    """Several layers, or "all". Give exactly one of `layer` and `layers`, and neither with {layer: vector}."""
    positions: PositionsLike = None
    """The positions at which it is applied: all by default; "prompt" or "generated" for one phase."""
    keep_norm: bool = False
    """Scale each row back to the norm that it had before the operation."""
    site: str | None = None
    """Where in the layer: one of `client.info().steering_sites`. By default "resid_post", the stream after the layer;
    for Directions of "z" or "mlp_act" their own site."""
    gate: Gate | None = None
    """Apply the operation to a row only as far as this gate is open for it; None: to every row."""

    def __new__(cls, *values: object, **_named: object) -> Self:
        """Refuse further positional arguments, with a clearer message than Python's."""
        if len(values) > 1:
            raise TypeError(
                f"{cls.__name__} takes only the vector as a positional argument. Pass all others by name: "
                f"{cls.__name__}(vector, layer=12, {cls._example})."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.vector, Mapping):
            vectors, site = by_steered_layer(self.vector, self.site)
            object.__setattr__(self, "vector", LayerVectors(vectors, (Vector, StoredRow)))
            object.__setattr__(self, "site", site)
        elif not isinstance(self.vector, (Vector, StoredRow)):
            raise TypeError(f"{self._name} takes a residuum.Vector; create one with Vector.from_array(array).")
        for name in ("layer", "layers"):  # copy now, because an iterator can be read only once
            value = getattr(self, name)
            if value is not None and not selects_all(value):
                object.__setattr__(self, name, tuple(layer_list(value)))
        object.__setattr__(self, "positions", Positions.of(self.positions))
        object.__setattr__(self, "site", "resid_post" if self.site is None else self.site)
        for row in self.rows:
            if row.site != self.site and BESIDE_THE_STREAM & {row.site, self.site}:
                raise InvalidRequest(
                    f"{self._name}: {row} is of another kind than rows of {self.site}, even if they are as wide. Give "
                    "the operation and the row the same site.",
                    reason="INVALID_FIELD",
                )
        if not isinstance(self.keep_norm, bool):
            raise TypeError(f"{self._name}: keep_norm must be True or False, not {self.keep_norm!r}.")
        if self.gate is not None:
            object.__setattr__(self, "gate", self._placed_gate(self.gate))
        self._placed()
        self.check()

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The vectors: one, or one for each layer in the order of the layers. Stored rows are not among them."""
        return tuple(value for value in self._values if isinstance(value, Vector))

    @property
    def rows(self) -> tuple[StoredRow, ...]:
        """The stored rows that stand for vectors."""
        return tuple(value for value in self._values if isinstance(value, StoredRow))

    def with_rows(self, found: Mapping[StoredRow, Vector]) -> Self:
        """Return the operation with vectors in place of its stored rows.

        Raises:
            BadVector: The operation needs a direction, and a row is none.
        """
        if not self.rows:
            return self
        if isinstance(self.vector, StoredRow):
            return replace(self, vector=found[self.vector])
        given = cast("Mapping[int, Vector | StoredRow]", self.vector)
        return replace(
            self, vector={layer: found[item] if isinstance(item, StoredRow) else item for layer, item in given.items()}
        )

    @property
    def _values(self) -> tuple[Vector | StoredRow, ...]:
        return tuple(self.vector.values()) if isinstance(self.vector, Mapping) else (self.vector,)

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _digest(self) -> bytes:
        """The digest inside the operation; empty if each layer has its own vector."""
        if self.rows:
            raise InvalidRequest(
                f"{self._name}: {self.rows[0]} must be read before the operation is sent. Clients do that; elsewhere, "
                "give client.activations(...).vector(layer, position).",
                reason="INVALID_FIELD",
            )
        return self.vector.digest if isinstance(self.vector, Vector) else b""

    def check(self) -> None:
        """Check the operation's own fields."""

    def _check_number(self, name: str) -> None:
        """Check a number and store it as a float."""
        object.__setattr__(self, name, finite_float32(f"{self._name}: {name}", getattr(self, name)))

    def _placed_gate(self, given: Gate) -> Gate:
        if not isinstance(given, Gate):
            raise TypeError(f"{self._name}: gate must be a residuum.Gate, not {given!r}.")
        gate = given.at(str(self.site))
        if isinstance(gate.vector, Vector):
            return gate
        layers = self._layers()
        if selects_all(layers) or sorted(layer_list(layers)) != [*gate.vector]:
            raise InvalidRequest(
                f"{self._name}: the gate has vectors for the layers {[*gate.vector]}, the operation is for {layers}. "
                "Give the gate one vector, or one for each of the operation's layers.",
                reason="INVALID_FIELD",
            )
        return gate

    def _check_direction(self) -> None:
        for index, vector in enumerate(self._values):
            if isinstance(vector, StoredRow):
                continue
            if not MIN_DIRECTION_NORM <= vector.norm <= MAX_DIRECTION_NORM:
                layers = [*self.vector] if isinstance(self.vector, Mapping) else []
                subject = f"the vector of layer {layers[index]}" if layers else "this vector"
                problem = f"has the norm {vector.norm:g}" if vector.norm else "is zero"
                raise BadVector(f"{self._name} needs a direction, but {subject} {problem}.", reason="BAD_VALUES")

    def _placed(self) -> steering_pb2.SteeringOperation:
        message = steering_pb2.SteeringOperation(layers=layer_selection(self._layers()), keep_norm=self.keep_norm)
        if self.site != "resid_post":  # the default
            (message.site,) = site_numbers([str(self.site)])
        if isinstance(self.vector, Mapping):
            message.layer_digests.extend(vector.digest for vector in self.vectors)
        if self.gate is not None:
            message.gate.CopyFrom(self.gate.to_proto())
        positions = Positions.of(self.positions)
        if positions != Positions():
            message.positions.CopyFrom(positions.to_proto())
        return message

    def _layers(self) -> LayersLike:
        given = [layers for layers in (self.layer, self.layers) if layers is not None]
        if isinstance(self.vector, Mapping):
            if given:
                problem = "{layer: vector} already names the layers; leave out layer(s)="
                raise InvalidRequest(f"{self._name}: {problem}.", reason="INVALID_FIELD")
            return tuple(self.vector)
        if len(given) != 1:
            raise InvalidRequest(f"{self._name}: give exactly one of layer= and layers=.", reason="INVALID_FIELD")
        return given[0]

    def to_proto(self) -> steering_pb2.SteeringOperation:
        """Return the operation's message, with the vector's digest instead of its values."""
        raise NotImplementedError
