"""The further layers of probes that are small MLPs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import BadVector, InvalidRequest
from residuum.v1 import probe_pb2
from residuum.values.vector import as_float32

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
