"""The arithmetic of probes, and what their names may be. probe.proto defines both."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from residuum.v1 import probe_pb2
from residuum.wire.limits import DIGEST_BYTES, MAX_PROBE_HEADS, MAX_PROBE_LAYERS, MAX_PROBE_OUTPUTS, MAX_PROBE_PLACES

if TYPE_CHECKING:
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float32]

_FLOAT_BYTES = 4
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


def is_valid_probe_name(name: str) -> bool:
    """Tell whether `name` is a valid name of a probe: 1 to 64 of the characters a-z A-Z 0-9 . _ -."""
    return _NAME.fullmatch(name) is not None


def num_outputs(probe: probe_pb2.Probe) -> int:
    """Return how many scores a probe gives to each row."""
    return len(probe.mlp[-1].biases) if probe.mlp else _num_pooled(probe)


def problem_of_places(probe: probe_pb2.Probe) -> str:
    """Return what is wrong with the further places of a probe, in words; empty if nothing is.

    Whether the model has them is not checked. Their sites must be set.
    """
    places = [(probe.site, probe.layer), *((place.site, place.layer) for place in probe.further_places)]
    if len(places) > MAX_PROBE_PLACES:
        return f"a probe reads at most {MAX_PROBE_PLACES} places, and this one has {len(places)}"
    for number, place in enumerate(probe.further_places, 2):
        if places.index(places[number - 1]) < number - 1:
            return f"place {number} is the same as place {places.index(places[number - 1]) + 1}"
        if len(place.digests) != len(probe.outputs):
            return (
                f"each output needs a vector at each place, but place {number} has {len(place.digests)}, and the "
                f"number of outputs is {len(probe.outputs)}"
            )
        if any(len(digest) != DIGEST_BYTES for digest in place.digests):
            return f"a digest of place {number} is not {DIGEST_BYTES} bytes long, as the SHA-256 of a vector is"
    return ""


def _num_pooled(probe: probe_pb2.Probe) -> int:
    """Return the outputs of a probe before its further layers: those of its rows, or pooled over positions."""
    heads = probe.attention.heads
    return len(probe.outputs) // heads - 1 if heads else len(probe.outputs)


def problem_of_attention(probe: probe_pb2.Probe) -> str:
    """Return what is wrong with the attention of a probe, in words; empty if nothing is."""
    if not probe.HasField("attention"):
        return ""
    heads, weights = probe.attention.heads, probe.attention.position_weights
    if not 1 <= heads <= MAX_PROBE_HEADS:
        return f"it has {heads} heads; from 1 to {MAX_PROBE_HEADS}"
    if len(probe.outputs) % heads or len(probe.outputs) == heads:
        return (
            f"the first layer has {len(probe.outputs)} outputs; {heads} heads need {heads} for their logits, and as "
            "many again for each pooled output"
        )
    if weights and len(weights) != heads:
        return f"there are {len(weights)} position weights for {heads} heads"
    return "" if np.isfinite(weights).all() else "its position weights are not all finite"


def problem_of_names(probe: probe_pb2.Probe) -> str:
    """Return what is wrong with the names of a probe's outputs, in words; empty if nothing is."""
    names = list(probe.output_names)
    if not names:
        return ""
    if len(names) != num_outputs(probe):
        return f"there are {len(names)} names for {num_outputs(probe)} outputs"
    if len({*names}) != len(names):
        return "two outputs have the same name"
    wrong = [name for name in names if not is_valid_probe_name(name)]
    return f"{wrong[0][:64]!r} is not a name of 1 to 64 of the characters a-z A-Z 0-9 . _ -" if wrong else ""


def problem_of_mlp(probe: probe_pb2.Probe) -> str:
    """Return what is wrong with the further layers of a probe, in words; empty if nothing is."""
    if len(probe.mlp) > MAX_PROBE_LAYERS:
        return f"it has {len(probe.mlp)} layers after the first; at most {MAX_PROBE_LAYERS}"
    inputs = _num_pooled(probe)
    for number, layer in enumerate(probe.mlp, 2):
        outputs = len(layer.biases)
        if not 1 <= outputs <= MAX_PROBE_OUTPUTS:
            return f"its layer {number} has {outputs} outputs; from 1 to {MAX_PROBE_OUTPUTS}"
        if len(layer.weights) != _FLOAT_BYTES * inputs * outputs:
            given = len(layer.weights) / (_FLOAT_BYTES * outputs)
            return f"its layer {number} has weights of {given:g} inputs, but the layer before has {inputs} outputs"
        if not (np.isfinite(_weights(layer, inputs)).all() and np.isfinite(layer.biases).all()):
            return f"the numbers of its layer {number} are not all finite"
        if layer.activation not in _HIDDEN:
            return f"the activation {int(layer.activation)} of its layer {number} is not known"
        inputs = outputs
    return ""


def evaluate(probe: probe_pb2.Probe, outputs: FloatArray) -> FloatArray:
    """Return a probe's scores, without smoothing: float32 [rows, outputs].

    Args:
        probe: A valid probe; see `problem_of_mlp`. The values of its vectors are not needed.
        outputs: float32 [rows, outputs of its first layer]: the inner products with the vectors, plus the biases. Of a
            probe with attention, the pooled outputs; see `residuum.wire.probes.pooling`.
    """
    for layer in probe.mlp:
        with np.errstate(over="ignore", invalid="ignore"):
            hidden = _HIDDEN[layer.activation](outputs.astype(np.float64))
            weights = _weights(layer, outputs.shape[-1]).astype(np.float64)
            outputs = (hidden @ weights.T + np.array(layer.biases)).astype(np.float32)
    return activate(outputs, probe.activation)


def _weights(layer: probe_pb2.ProbeLayer, inputs: int) -> FloatArray:
    return np.frombuffer(layer.weights, "<f4").reshape(len(layer.biases), inputs)


def _sigmoid(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    result: npt.NDArray[np.float64] = 0.5 * (1.0 + np.tanh(0.5 * values))
    return result


_ERF_END = 6.0
"""Above it, erf is 1 in float64."""
_ERF_STEPS = 512
"""Nodes in each unit."""
_ERF_NODES = np.arange(int(_ERF_END * _ERF_STEPS) + 1) / _ERF_STEPS
_ERF = np.array([math.erf(node) for node in _ERF_NODES])
_ERF_SLOPES = 2 / math.sqrt(math.pi) * np.exp(-(_ERF_NODES**2))


def erf(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the error function, within 1e-12. numpy has none.

    It is the Taylor series of third order at the nearest node.
    """
    size = np.minimum(np.abs(values), _ERF_END)
    nearest = np.rint(np.nan_to_num(size) * _ERF_STEPS).astype(np.int64)
    node = _ERF_NODES[nearest]
    step = size - node
    series = step * (1.0 - step * (node - step * (2.0 * node**2 - 1.0) / 3.0))
    result: npt.NDArray[np.float64] = np.copysign(_ERF[nearest] + _ERF_SLOPES[nearest] * series, values)
    return result


def _gelu(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    parts = 1.0 + erf(values / math.sqrt(2))
    result: npt.NDArray[np.float64] = np.where(np.isneginf(values), 0.0, values * parts / 2)
    return result


_HIDDEN: dict[int, Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]] = {
    probe_pb2.HIDDEN_ACTIVATION_UNSPECIFIED: lambda values: values,
    probe_pb2.HIDDEN_ACTIVATION_RELU: lambda values: np.maximum(values, 0.0),
    probe_pb2.HIDDEN_ACTIVATION_TANH: np.tanh,
    probe_pb2.HIDDEN_ACTIVATION_SIGMOID: _sigmoid,
    probe_pb2.HIDDEN_ACTIVATION_GELU: _gelu,
}
"""What a layer may apply to the outputs of the one before, float64."""


def activate(outputs: FloatArray, activation: probe_pb2.ProbeActivation.ValueType) -> FloatArray:
    """Return the scores of rows: their outputs after the activation, float32 [..., outputs].

    Neither activation overflows, however large the outputs are: both are computed in float64 and then rounded. NaN
    stays NaN.

    Args:
        outputs: float32 [..., outputs]: for each row, the inner product with each output's vector, plus its bias.
        activation: What is applied. PROBE_ACTIVATION_UNSPECIFIED returns the outputs as they are.

    Raises:
        ValueError: The activation is none of the contract's.
    """
    if activation == probe_pb2.PROBE_ACTIVATION_UNSPECIFIED:
        return outputs
    exact = outputs.astype(np.float64)
    if activation == probe_pb2.PROBE_ACTIVATION_SIGMOID:
        small = np.exp(-np.abs(exact))  # at most 1
        scores = np.where(exact < 0, small, 1.0) / (1.0 + small)
    elif activation == probe_pb2.PROBE_ACTIVATION_SOFTMAX:
        with np.errstate(invalid="ignore"):  # the softmax of an infinite output is NaN
            powers = np.exp(exact - exact.max(axis=-1, keepdims=True))
            scores = powers / powers.sum(axis=-1, keepdims=True)
    else:
        raise ValueError(f"{activation} is not an activation of probes.")
    rounded: FloatArray = scores.astype(np.float32)
    return rounded
