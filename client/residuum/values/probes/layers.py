"""The further layers of probes that are small MLPs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import BadVector, InvalidRequest
from residuum.v1 import probe_pb2
from residuum.values.tensors.vector import as_float32
from residuum.wire.limits import MAX_PROBE_HEADS

HIDDEN: dict[str | None, probe_pb2.HiddenActivation.ValueType] = {
    None: probe_pb2.HIDDEN_ACTIVATION_UNSPECIFIED,
    "relu": probe_pb2.HIDDEN_ACTIVATION_RELU,
    "tanh": probe_pb2.HIDDEN_ACTIVATION_TANH,
    "sigmoid": probe_pb2.HIDDEN_ACTIVATION_SIGMOID,
    "gelu": probe_pb2.HIDDEN_ACTIVATION_GELU,
}
"""What a layer may apply to the outputs of the layer before."""


@dataclass(frozen=True, eq=False)
class ProbeLayer:
    """A further layer of a probe that is a small MLP.

    Its outputs are weights · f(x) + bias, where x are the outputs of the layer before.

    Attributes:
        weights: [outputs, outputs of the layer before]: any array or tensor of finite numbers. The attribute is
            float32, read-only.
        bias: One number, or [outputs]. The attribute is float32 [outputs], read-only.
        activation: f: "relu", "tanh", "sigmoid", "gelu" (the exact one), or None for nothing.

    Raises:
        BadVector: The weights or the bias are not of this shape, or not finite.
        InvalidRequest: The activation does not exist.

    Example:
        >>> probe = residuum.Probe(w1, b1, layer=12, mlp=[residuum.ProbeLayer(w2, b2, "relu")], activation="sigmoid")
    """

    weights: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]
    activation: str | None = "relu"

    def __post_init__(self) -> None:
        weights = np.atleast_2d(as_float32(self.weights)).copy()
        bias = as_float32(self.bias)
        if weights.ndim != 2 or not weights.size or bias.shape not in {(), weights.shape[:1]}:  # noqa: PLR2004
            raise BadVector(
                f"ProbeLayer: weights must be [outputs, inputs] and bias one number or [outputs], not "
                f"{list(weights.shape)} and {list(bias.shape)}.",
                reason="WRONG_LENGTH",
            )
        bias = np.broadcast_to(bias, weights.shape[:1]).copy()
        if not (np.isfinite(weights).all() and np.isfinite(bias).all()):
            raise BadVector("ProbeLayer: every number must be finite.", reason="BAD_VALUES")
        if self.activation not in HIDDEN:
            names = ", ".join(repr(name) for name in HIDDEN)
            raise InvalidRequest(
                f"ProbeLayer: activation must be one of {names}, not {self.activation!r}.", reason="INVALID_FIELD"
            )
        for name, values in (("weights", weights), ("bias", bias)):
            values.setflags(write=False)
            object.__setattr__(self, name, values)

    def to_proto(self) -> probe_pb2.ProbeLayer:
        """Return the layer's message."""
        return probe_pb2.ProbeLayer(
            activation=HIDDEN[self.activation], weights=self.weights.astype("<f4").tobytes(), biases=self.bias.tolist()
        )

    def __eq__(self, other: object) -> bool:
        return self.to_proto() == other.to_proto() if isinstance(other, ProbeLayer) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.to_proto().SerializeToString(deterministic=True))


@dataclass(frozen=True, eq=False)
class ProbeAttention:
    """Makes a probe pool its outputs over the positions of the sequence, up to each token's.

    The weights of such a probe are those of the heads' logits, [heads, width], and then those of the heads' values,
    [heads · outputs, width], one head after the other. `Probe.from_attention` puts them together. For each head, the
    values of all positions are averaged with the softmax of the logits as weights; the averages of the heads are added.

    Attributes:
        heads: How many heads there are, 1 to 16.
        position_weights: [heads]: added to the logits, times the position, which counts from 0 at the prompt's first
            token; None: nothing is added. The attribute is float32 [heads], read-only, or None.

    Raises:
        InvalidRequest: The heads or the position weights are invalid.
        BadVector: The position weights are no array of numbers.
        TypeError: `heads` is not an integer.
    """

    heads: int
    position_weights: npt.NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.heads, bool) or not hasattr(self.heads, "__index__"):
            raise TypeError(f"ProbeAttention: heads must be a whole number, not {self.heads!r}.")
        heads = self.heads.__index__()
        if not 1 <= heads <= MAX_PROBE_HEADS:
            raise InvalidRequest(
                f"ProbeAttention: heads must be from 1 to {MAX_PROBE_HEADS}, not {heads}.", reason="INVALID_FIELD"
            )
        object.__setattr__(self, "heads", heads)
        if self.position_weights is None:
            return
        weights = as_float32(self.position_weights).copy()
        if weights.shape != (heads,) or not np.isfinite(weights).all():
            raise InvalidRequest(
                f"ProbeAttention: position_weights must be {heads} finite numbers, one for each head, and this array "
                f"has the shape {list(weights.shape)}.",
                reason="INVALID_FIELD",
            )
        weights.setflags(write=False)
        object.__setattr__(self, "position_weights", weights)

    def to_proto(self) -> probe_pb2.AttentionPooling:
        """Return the message."""
        weights = () if self.position_weights is None else self.position_weights.tolist()
        return probe_pb2.AttentionPooling(heads=self.heads, position_weights=weights)

    def __eq__(self, other: object) -> bool:
        return self.to_proto() == other.to_proto() if isinstance(other, ProbeAttention) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.to_proto().SerializeToString(deterministic=True))


def attention_of(given: Any, outputs: int) -> ProbeAttention | None:
    """Return the value of `attention=` of a probe whose first layer has this many outputs.

    Raises:
        TypeError: It is no ProbeAttention.
        InvalidRequest: The outputs are not those of its heads.
    """
    if given is None:
        return None
    if not isinstance(given, ProbeAttention):
        raise TypeError(f"Probe: attention must be a residuum.ProbeAttention, not {given!r}.")
    if outputs % given.heads or outputs == given.heads:
        raise InvalidRequest(
            f"Probe: with {given.heads} heads, weights must have {given.heads} rows for the logits and as many again "
            f"for each output, not {outputs} rows. Probe.from_attention puts them together.",
            reason="INVALID_FIELD",
        )
    return given


def layer_tuple(given: Any) -> tuple[ProbeLayer, ...]:
    """Return the value of `mlp=`.

    Raises:
        TypeError: An item is not a ProbeLayer.
    """
    items = tuple(given) if isinstance(given, Iterable) else (given,)
    for item in items:
        if not isinstance(item, ProbeLayer):
            raise TypeError(f"Probe: mlp must be a list of residuum.ProbeLayer, not {item!r}.")
    return items
