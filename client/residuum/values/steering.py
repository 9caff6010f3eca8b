"""Changing the residual stream: Add, Ablate, Cap and Replace.

For a row x of the residual stream (float32 [hidden]), a vector v and its direction v̂ = v / |v|:

    Add      x + scale·v
    Ablate   x - scale·(x·v̂)v̂
    Cap      x + (clamp(x·v̂, min, max) - x·v̂)v̂
    Replace  x + (value - x·v̂)v̂

Each is applied after the layers it names, to the positions it names, in the order of the list. With `keep_norm=True`
the row is then scaled to the norm that it had before the operation. Whatever is asked for, rows stay finite: elements
end at ±1e16, far beyond those of any model (±32752 if it runs in float16).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Union

import numpy as np

from residuum.exceptions import BadVector, InvalidRequest
from residuum.v1 import steering_pb2
from residuum.values.selections import LayersLike, Positions, PositionsLike, layer_list, layer_selection
from residuum.values.vector import Vector
from residuum.wire.limits import MAX_DIRECTION_NORM, MAX_OPERATIONS, MIN_DIRECTION_NORM

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class _Placed:
    """What every operation has: a vector, and where it works."""

    _example: ClassVar[str] = "scale=6.0"

    vector: Vector | Mapping[int, Vector]
    """The vector; its length must be the model's hidden size. Or one for each layer: {layer: vector}, or Directions."""
    _: KW_ONLY
    layer: LayersLike | None = None
    """The layer after which it works."""
    layers: LayersLike | None = None
    """Several layers, or "all". Exactly one of `layer` and `layers` must be given, and none with {layer: vector}."""
    positions: PositionsLike = None
    """The positions to which it is applied; all by default, "prompt" or "generated" for one phase."""
    keep_norm: bool = False
    """Scale the row, after the operation, to the norm that it had before it."""

    def __new__(cls, *values: object, **_named: object) -> Self:
        """Refuse a second value without its name before Python does so in words of its own."""
        if len(values) > 1:
            raise TypeError(
                f"{cls.__name__} takes the vector, and everything else by name: "
                f"{cls.__name__}(vector, layer=12, {cls._example})."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.vector, Mapping):
            object.__setattr__(self, "vector", LayerVectors(_by_place(self.vector)))
        elif not isinstance(self.vector, Vector):
            raise TypeError(f"{self._name} takes a residuum.Vector; make one with Vector.from_array(array).")
        for name in ("layer", "layers"):  # an iterator could be read only once
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                object.__setattr__(self, name, tuple(layer_list(value)))
        object.__setattr__(self, "positions", Positions.of(self.positions))
        if not isinstance(self.keep_norm, bool):
            raise TypeError(f"{self._name}: keep_norm is True or False, not {self.keep_norm!r}.")
        self._placed()
        self.check()

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The vectors: one, or one for each layer in their order."""
        return (self.vector,) if isinstance(self.vector, Vector) else tuple(self.vector.values())

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _digest(self) -> bytes:
        """The digest inside the operation: none if each layer has a vector of its own."""
        return self.vector.digest if isinstance(self.vector, Vector) else b""

    def check(self) -> None:
        """Check what is particular to the operation."""

    def _check_number(self, name: str) -> None:
        """Check a number, and keep it as a float: arrays and tensors of one element count as numbers."""
        value: Any = getattr(self, name)
        if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__float__"):
            raise TypeError(f"{self._name}: {name} is a number, not {value!r}.")
        try:
            number = float(value.item() if hasattr(value, "item") else value)
        except OverflowError:
            number = math.inf
        except (TypeError, ValueError, RuntimeError):  # an array, or a tensor, of several
            raise TypeError(f"{self._name}: {name} is one number, not {type(value).__name__} of several.") from None
        if not math.isfinite(number) or abs(number) > 3.4e38:  # noqa: PLR2004 - the largest float32
            raise InvalidRequest(
                f"{self._name}: {name} must be a finite float32, not {number}.", reason="INVALID_FIELD"
            )
        object.__setattr__(self, name, number)

    def _check_direction(self) -> None:
        for index, vector in enumerate(self.vectors):
            if not MIN_DIRECTION_NORM <= vector.norm <= MAX_DIRECTION_NORM:
                which = "this vector" if isinstance(self.vector, Vector) else f"that of layer {[*self.vector][index]}"
                what = f"has the norm {vector.norm:g}" if vector.norm else "is zero"
                raise BadVector(f"{self._name} needs a direction, and {which} {what}.", reason="BAD_VALUES")

    def _placed(self) -> steering_pb2.SteeringOperation:
        message = steering_pb2.SteeringOperation(layers=layer_selection(self._layers()), keep_norm=self.keep_norm)
        if not isinstance(self.vector, Vector):
            message.layer_digests.extend(vector.digest for vector in self.vectors)
        positions = Positions.of(self.positions)
        if positions != Positions():
            message.positions.CopyFrom(positions.to_proto())
        return message

    def _layers(self) -> LayersLike:
        given = [layers for layers in (self.layer, self.layers) if layers is not None]
        if not isinstance(self.vector, Vector):
            if given:
                raise InvalidRequest(f"{self._name}: the layers are those of {{layer: vector}}; leave out layer(s)=.")
            return tuple(self.vector)
        if len(given) != 1:
            raise InvalidRequest(f"{self._name}: say where with exactly one of layer= and layers=.")
        return given[0]

    def to_proto(self) -> steering_pb2.SteeringOperation:
        """Return the operation as it travels: with the vector's digest, not its values."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Add(_Placed):
    """Adds a multiple of a vector: x + scale·v.

    Example:
        >>> residuum.Add(joy, layer=12, scale=6.0)
        >>> residuum.Add(joy, layers=range(10, 20), scale=0.5, positions="generated")
    """

    scale: float = 1.0
    """The factor."""

    def check(self) -> None:
        """Check the factor."""
        self._check_number("scale")

    def to_proto(self) -> steering_pb2.SteeringOperation:
        """Return the operation as it travels."""
        message = self._placed()
        message.add.CopyFrom(steering_pb2.Add(digest=self._digest, scale=self.scale))
        return message


@dataclass(frozen=True, kw_only=True)
class Ablate(_Placed):
    """Removes a direction: x - scale·(x·v̂)v̂, all of the projection with scale 1.

    Example:
        >>> residuum.Ablate(refusal, layers="all")
    """

    scale: float = 1.0
    """How much of the projection is removed."""

    def check(self) -> None:
        """Check the factor, and that the vector has a direction."""
        self._check_number("scale")
        self._check_direction()

    def to_proto(self) -> steering_pb2.SteeringOperation:
        """Return the operation as it travels."""
        message = self._placed()
        message.ablate.CopyFrom(steering_pb2.Ablate(digest=self._digest, scale=self.scale))
        return message


@dataclass(frozen=True, kw_only=True)
class Cap(_Placed):
    """Keeps the projection onto a direction within bounds: x + (clamp(x·v̂, min, max) - x·v̂)v̂.

    Example:
        >>> residuum.Cap(joy, layer=12, max=4.0)
    """

    _example: ClassVar[str] = "max=6.0"

    min: float | None = None
    """The least projection that stays as it is, in units of x."""
    max: float | None = None
    """The greatest projection that stays as it is."""

    def check(self) -> None:
        """Check the bounds, and that the vector has a direction."""
        if self.min is None and self.max is None:
            raise InvalidRequest("Cap: give min=, max= or both.", reason="INVALID_FIELD")
        for name in ("min", "max"):
            if getattr(self, name) is not None:
                self._check_number(name)
        if self.min is not None and self.max is not None and self.max < self.min:
            raise InvalidRequest(f"Cap: max ({self.max}) is below min ({self.min}).", reason="INVALID_FIELD")
        self._check_direction()

    def to_proto(self) -> steering_pb2.SteeringOperation:
        """Return the operation as it travels."""
        message = self._placed()
        message.cap.CopyFrom(steering_pb2.Cap(digest=self._digest, min=self.min, max=self.max))
        return message


@dataclass(frozen=True, kw_only=True)
class Replace(_Placed):
    """Sets the projection onto a direction: x + (value - x·v̂)v̂.

    Example:
        >>> residuum.Replace(joy, layer=12, value=4.0)
    """

    _example: ClassVar[str] = "value=4.0"

    value: float
    """What the projection becomes, in units of x."""

    def check(self) -> None:
        """Check the value, and that the vector has a direction."""
        self._check_number("value")
        self._check_direction()

    def to_proto(self) -> steering_pb2.SteeringOperation:
        """Return the operation as it travels."""
        message = self._placed()
        message.replace.CopyFrom(steering_pb2.Replace(digest=self._digest, value=self.value))
        return message


class LayerVectors(Mapping[int, Vector]):
    """A vector for each of some layers, ascending; immutable."""

    def __init__(self, vectors: Mapping[int, Vector]) -> None:
        """Take the vectors by their layers.

        Raises:
            TypeError: A key is not a layer's number, or a value is not a Vector.
            InvalidRequest: There are none; UnknownLayer if one is negative.
        """
        for layer, vector in vectors.items():
            if not isinstance(vector, Vector) or isinstance(layer, bool) or not hasattr(layer, "__index__"):
                raise TypeError(
                    f"Vectors for layers are {{layer number: residuum.Vector}}, not "
                    f"{{{layer!r}: {type(vector).__name__}}}."
                )
        if not vectors:
            raise InvalidRequest("Vectors for layers: name at least one layer.", reason="INVALID_FIELD")
        self._vectors = {int(layer): vectors[layer] for layer in sorted(vectors)}
        layer_list(self._vectors)

    def __getitem__(self, layer: int) -> Vector:
        return self._vectors[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    def __hash__(self) -> int:
        return hash(tuple(self._vectors.items()))

    def __repr__(self) -> str:
        return repr(self._vectors)


def _by_place(vectors: Mapping[int, Vector]) -> Mapping[int, Vector]:
    """Return vectors by the layers after which they work; `Directions` of resid_pre work after the layer before."""
    placed = getattr(vectors, "placed", None)
    return vectors if placed is None else {place: vector for _, place, vector in placed()}


_WHERE = "vector, layer=12, scale=6.0"

Operation = Union[Add, Ablate, Cap, Replace]  # noqa: UP007 - evaluated at run time on Python 3.10
"""Any steering operation."""


def operation_list(steer: Operation | Iterable[Operation] | None) -> list[Operation]:
    """Return what a user gave as `steer=` as a list.

    Raises:
        TypeError: One of them is not an operation.
        InvalidRequest: There are more than 256.
    """
    given: Any = steer  # as it came, whatever its annotation says
    single = isinstance(given, (Mapping, str)) or not isinstance(given, Iterable)
    items: list[Any] = [] if given is None else [given] if single else list(given)
    for item in items:
        if not isinstance(item, (Add, Ablate, Cap, Replace)):
            raise TypeError(f"steer= takes residuum.Add, Ablate, Cap and Replace, not {_what(item)}")
    if len(items) > MAX_OPERATIONS:
        raise InvalidRequest(
            f"One request takes at most {MAX_OPERATIONS} operations, not {len(items)}; name several layers in one.",
            reason="INVALID_FIELD",
        )
    return items


def _what(item: object) -> str:
    """Say what stands in the place of an operation, and what to write instead."""
    if isinstance(item, Mapping):
        return f"a {type(item).__name__} by itself: say what is done with the vectors, as in Add({{layer: vector}})."
    if isinstance(item, Vector):
        return f"{item!r}. A vector by itself does not say where: write Add({_WHERE})."
    if isinstance(item, (list, tuple)):
        return "a list in the list: write [*joy.add(0.5), Ablate(...)], with a star before each list."
    return f"{item!r}."


def steering_spec(operations: Iterable[Operation], *, updatable: bool = False) -> steering_pb2.SteeringSpec:
    """Return the message for operations in their order."""
    return steering_pb2.SteeringSpec(operations=[operation.to_proto() for operation in operations], updatable=updatable)
