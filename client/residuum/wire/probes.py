"""The arithmetic of probes, and what their names may be. probe.proto defines both."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from residuum.v1 import probe_pb2

if TYPE_CHECKING:
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float32]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


def is_valid_probe_name(name: str) -> bool:
    """Tell whether `name` is a valid name of a probe: 1 to 64 of the characters a-z A-Z 0-9 . _ -."""
    return _NAME.fullmatch(name) is not None


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
    with np.errstate(invalid="ignore"):  # the softmax of an infinite output is NaN
        if activation == probe_pb2.PROBE_ACTIVATION_SIGMOID:
            small = np.exp(-np.abs(exact))  # at most 1
            scores = np.where(exact < 0, small, 1.0) / (1.0 + small)
        elif activation == probe_pb2.PROBE_ACTIVATION_SOFTMAX:
            powers = np.exp(exact - exact.max(axis=-1, keepdims=True))
            scores = powers / powers.sum(axis=-1, keepdims=True)
        else:
            raise ValueError(f"{activation} is not an activation of probes.")
    rounded: FloatArray = scores.astype(np.float32)
    return rounded


def score(
    rows: FloatArray,
    weights: FloatArray,
    biases: FloatArray,
    activation: probe_pb2.ProbeActivation.ValueType,
) -> FloatArray:
    """Return what a probe computes for rows: float32 [rows, outputs].

    Args:
        rows: float32 [rows, width].
        weights: float32 [outputs, width]: the vector of each output.
        biases: float32 [outputs].
        activation: As for `activate`.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # huge rows give infinite outputs, as on a device
        return activate(rows @ weights.T + biases, activation)
