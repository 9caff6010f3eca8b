"""Steering operations: Add, Ablate, Cap, Replace, Set, Multiply and ClampFeature.

For a row x at a site of a layer (float32), a vector v of the same length and its direction v̂ = v / |v|:

    Add       x + scale·v
    Ablate    x - scale·(x·v̂)v̂
    Cap       x + (clamp(x·v̂, min, max) - x·v̂)v̂
    Replace   x + (value - x·v̂)v̂
    Set       v
    Multiply  x·v, element by element
    ClampFeature  x + (clamp(f, min, max) - f)v, for the value f of a sparse autoencoder's feature

The server applies operations in list order, each at its site and layers and at its positions. With `keep_norm=True` it
then scales the row to the norm that it had before the operation. With `gate=Gate(...)`, an operation applies only to
rows that point along the gate's vector. Rows always stay finite: elements are clamped to
±1e16, far beyond those of any model (±32752 for a model in float16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Union

from residuum.exceptions import InvalidRequest
from residuum.v1 import steering_pb2
from residuum.values.selections.layers_and_positions import (
    LayersLike,
    PositionsLike,
    layer_list,
    selects_all,
)
from residuum.values.steering.placed_operation import PlacedOperation
from residuum.values.tensors.sae import SAE
from residuum.values.tensors.vector import Vector

if TYPE_CHECKING:
    from residuum.values.captures.activations import Activations


@dataclass(frozen=True, kw_only=True)
class Add(PlacedOperation):
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
class Ablate(PlacedOperation):
    """Removes a direction: x - scale·(x·v̂)v̂. With scale 1 it removes the whole projection.

    Example:
        >>> residuum.Ablate(refusal, layers="all")
    """

    scale: float = 1.0
    """The fraction of the projection that is removed."""

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
class Cap(PlacedOperation):
    """Keeps the projection onto a direction within bounds: x + (clamp(x·v̂, min, max) - x·v̂)v̂.

    Example:
        >>> residuum.Cap(joy, layer=12, max=4.0)
    """

    _example: ClassVar[str] = "max=6.0"

    min: float | None = None
    """The lower bound of the projection, in units of x; None for no lower bound."""
    max: float | None = None
    """The upper bound of the projection, in units of x; None for no upper bound."""

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
class Replace(PlacedOperation):
    """Sets the projection onto a direction: x + (value - x·v̂)v̂.

    Example:
        >>> residuum.Replace(joy, layer=12, value=4.0)
    """

    _example: ClassVar[str] = "value=4.0"

    value: float
    """The new projection, in units of x."""

    def check(self) -> None:
        """Check the value, and that the vector has a direction."""
        self._check_number("value")
        self._check_direction()

    def to_proto(self) -> steering_pb2.SteeringOperation:
        """Return the operation as it travels."""
        message = self._placed()
        message.replace.CopyFrom(steering_pb2.Replace(digest=self._digest, value=self.value))
        return message


@dataclass(frozen=True, kw_only=True)
class Set(PlacedOperation):
    """Sets the whole row to a vector. With rows of another request, this is activation patching.

    Example:
        >>> residuum.Set(row, layer=12, positions=[4])
        >>> residuum.Set.from_activations(acts, layers=[12], positions=[4])
    """

    _example: ClassVar[str] = "positions=[4]"

    def to_proto(self) -> steering_pb2.SteeringOperation:
        """Return the operation as it travels."""
        message = self._placed()
        message.set.CopyFrom(steering_pb2.Set(digest=self._digest))
        return message

    @classmethod
    def from_activations(
        cls,
        acts: Activations,
        *,
        layers: LayersLike | None = None,
        positions: Sequence[int] | None = None,
        at: Sequence[int] | None = None,
    ) -> list[Set]:
        """Return the operations that set rows of a request to those that were captured from another one.

        Args:
            acts: The captured rows. They are set at the selected site; those of "resid_pre" after the layer before.
            layers: The layers whose rows are set; by default all of `acts`.
            positions: The positions whose rows are taken; by default all of `acts`.
            at: The positions at which they are set, one for each of `positions`; by default the same.

        Returns:
            One operation for each position, with a vector for each layer.

        Raises:
            InvalidRequest: A row is not in `acts`, the rows are not of the full width, or `at` has another length than
                `positions`.

        Example:
            >>> acts = client.activations("clean")
            >>> client.generate(corrupted, steer=residuum.Set.from_activations(acts, layers=[12], positions=[4]))
        """
        shift = 1 if acts.site == "resid_pre" else 0
        site = "resid_post" if shift else acts.site
        sources = [int(position) for position in (acts.positions if positions is None else positions)]
        targets = sources if at is None else [int(position) for position in at]
        if len(sources) != len(targets):
            raise InvalidRequest(
                f"Set: there are {len(sources)} positions, and at= has {len(targets)}. Give one for each.",
                reason="INVALID_FIELD",
            )
        chosen = acts.layers if layers is None or selects_all(layers) else tuple(layer_list(layers))
        return [
            cls({layer - shift: acts.vector(layer, source) for layer in chosen}, positions=[target], site=site)
            for source, target in zip(sources, targets, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Multiply(PlacedOperation):
    """Multiplies each element of the row by the same element of a vector.

    With a vector of ones and zeros it removes attention heads ("z") or neurons ("mlp_act"); `ModelInfo.mask` makes one.

    Example:
        >>> residuum.Multiply(client.info().mask("z", [3, 7]), layer=12, site="z")
    """

    _example: ClassVar[str] = 'site="z"'

    def to_proto(self) -> steering_pb2.SteeringOperation:
        """Return the operation as it travels."""
        message = self._placed()
        message.multiply.CopyFrom(steering_pb2.Multiply(digest=self._digest))
        return message


@dataclass(frozen=True, kw_only=True)
class ClampFeature(PlacedOperation):
    """Sets a feature of a sparse autoencoder to a value, or keeps it between bounds. The rest of the row stays.

    A row x becomes x + (w - f)·v. Here f is the value that the feature has in x, v is the feature's row of the decoder,
    and w is `value`; or with bounds, f itself if it is between them, otherwise the nearer bound. Nothing else is added
    to the row. It takes no gate: the feature's value decides. To add to a feature, use `Add(sae.vector(123), ...)`.

    Args:
        vector: The `residuum.SAE`; afterwards, the attribute is the feature's direction.
        feature: The number of the feature.
        value: Set the feature to this value; 0 ablates it. Give it, or `min`, `max` or both.
        min: The least value. Rows whose feature is less get it, also those whose feature is 0.
        max: The greatest value.

    Raises:
        BadSAE: There is no such feature.
        InvalidRequest: The value of a feature depends on more than this feature ("topk") or on a norm of the row.

    Example:
        >>> residuum.ClampFeature(sae, feature=123, layer=12, value=0.0)  # ablate it
        >>> residuum.ClampFeature(sae, feature=123, layer=12, min=8.0, positions="generated")
    """

    _example: ClassVar[str] = "feature=123, value=0.0"

    feature: int
    value: float | None = None
    min: float | None = None
    max: float | None = None
    encoder: Vector | None = field(default=None, init=False, repr=False)
    """The feature's row of the encoder."""
    bias: float = field(default=0.0, init=False, repr=False)
    """Added to the inner product of a row and `encoder`."""
    threshold: float = field(default=0.0, init=False, repr=False)
    """The feature's value is 0 unless the sum is above this."""

    if TYPE_CHECKING:  # the others take a vector where this one takes an autoencoder

        def __init__(
            self,
            vector: SAE,
            *,
            feature: int,
            value: float | None = None,
            min: float | None = None,  # noqa: A002 - the name of the bound
            max: float | None = None,  # noqa: A002 - the name of the bound
            layer: LayersLike | None = None,
            layers: LayersLike | None = None,
            positions: PositionsLike = None,
            keep_norm: bool = False,
            site: str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        sae: Any = self.vector
        if not isinstance(sae, SAE):
            raise TypeError(
                f"ClampFeature takes a residuum.SAE, not {type(sae).__name__}; residuum.sae.load reads one."
            )
        number = sae.check_feature(self.feature)
        if sae.active is not None or sae.layer_norm:
            why = "depend on all features (topk)" if sae.active is not None else "depend on the row's layer norm"
            raise InvalidRequest(
                f"ClampFeature: the values of {sae!r} {why}, so a single feature cannot be clamped. Use "
                "Add(sae.vector(feature), ...).",
                reason="INVALID_FIELD",
            )
        object.__setattr__(self, "vector", sae.vector(number))
        object.__setattr__(self, "encoder", Vector.from_array(sae.encoder[number].astype("<f4")))
        object.__setattr__(self, "bias", float(sae.encoder_bias[number]))
        object.__setattr__(self, "threshold", 0.0 if sae.threshold is None else float(sae.threshold[number]))
        super().__post_init__()

    def check(self) -> None:
        """Check the bounds."""
        if self.gate is not None:
            raise InvalidRequest("ClampFeature takes no gate=: the feature decides.", reason="INVALID_FIELD")
        if (self.value is None) == (self.min is None and self.max is None):
            raise InvalidRequest("ClampFeature: give value=, or min=, max= or both.", reason="INVALID_FIELD")
        for name in ("value", "min", "max"):
            if getattr(self, name) is not None:
                self._check_number(name)
        if self.min is not None and self.max is not None and self.max < self.min:
            raise InvalidRequest(f"ClampFeature: max ({self.max}) is below min ({self.min}).", reason="INVALID_FIELD")

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The feature's rows of the decoder and of the encoder."""
        return (*super().vectors, *([self.encoder] if self.encoder is not None else []))

    def to_proto(self) -> steering_pb2.SteeringOperation:
        """Return the operation as it travels."""
        message = self._placed()
        message.clamp_feature.CopyFrom(
            steering_pb2.ClampFeature(
                digest=self._digest,
                encoder_digest=self.encoder.digest if self.encoder is not None else b"",
                bias=self.bias,
                threshold=self.threshold,
                min=self.min if self.value is None else self.value,
                max=self.max if self.value is None else self.value,
            )
        )
        return message


Operation = Union[Add, Ablate, Cap, Replace, Set, Multiply, ClampFeature]  # noqa: UP007 - evaluated at run time on Python 3.10
"""Any steering operation."""
