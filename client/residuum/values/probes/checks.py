"""Checks of what users give to `Probe`. A wrong value is a BadVector, an InvalidRequest or a TypeError."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import BadVector, InvalidRequest
from residuum.v1 import probe_pb2
from residuum.values.probes.layers import ProbeAttention, ProbeLayer
from residuum.values.selections.layers_and_positions import layer_list
from residuum.values.selections.points import site_numbers
from residuum.values.tensors.vector import as_float32
from residuum.wire.probes.arithmetic import is_valid_probe_name

FloatArray = npt.NDArray[np.float32]

ACTIVATIONS: dict[str | None, probe_pb2.ProbeActivation.ValueType] = {
    None: probe_pb2.PROBE_ACTIVATION_UNSPECIFIED,
    "sigmoid": probe_pb2.PROBE_ACTIVATION_SIGMOID,
    "softmax": probe_pb2.PROBE_ACTIVATION_SOFTMAX,
}
"""What a probe may apply to its outputs."""


def count_outputs(weights: FloatArray, attention: ProbeAttention | None, mlp: tuple[ProbeLayer, ...]) -> int:
    """Return the number of scores of each row."""
    if mlp:
        return len(mlp[-1].bias)
    return len(weights) // attention.heads - 1 if attention else len(weights)


def checked_weights(given: npt.ArrayLike) -> FloatArray:
    """Return weights as float32 [outputs, width], read-only."""
    values = checked_float32("weights", given)
    shown = list(values.shape)
    if values.ndim == 1:
        values = values[None]
    if values.ndim != 2 or not values.size:  # noqa: PLR2004 - [outputs, width]
        raise BadVector(
            f"Probe: weights must have the shape [outputs, width], or [width] for one output, not {shown}.",
            reason="WRONG_LENGTH",
        )
    return _finite("weights", values)


def checked_bias(given: npt.ArrayLike, outputs: int) -> FloatArray:
    """Return the bias of each output as float32 [outputs], read-only."""
    values = checked_float32("bias", given)
    if values.shape not in {(), (outputs,)}:
        raise InvalidRequest(
            f"Probe: bias must be one number, or [outputs], which is [{outputs}], not {list(values.shape)}.",
            reason="INVALID_FIELD",
        )
    return _finite("bias", np.broadcast_to(values, (outputs,)).copy())


def checked_float32(what: str, given: npt.ArrayLike) -> FloatArray:
    """Return an array as float32. `what` names it in errors."""
    try:
        return as_float32(given)
    except BadVector as error:
        raise BadVector(f"Probe: {what}: {error}", reason=error.reason) from None


def _finite(what: str, values: FloatArray) -> FloatArray:
    bad = int(np.count_nonzero(~np.isfinite(values)))
    if bad:
        raise BadVector(
            f"Probe: {bad} of {values.size} elements of {what} are NaN, infinite or beyond float32. Every element must "
            "be finite.",
            reason="BAD_VALUES",
        )
    values.setflags(write=False)  # this is a copy, so the caller's array stays writable
    return values


def checked_places(layer: Any, site: Any, width: int) -> tuple[int | tuple[int, ...], str | tuple[str, ...]]:
    """Return the layer and the site, or those of several places, whose rows have `width` elements together."""
    if _is_number(layer) or not _is_list(layer):
        if not isinstance(site, str):
            raise TypeError(f"Probe: site must be the name of one site, not {site!r}; or give a list of layers, too.")
        return _layer(layer), _site(site)
    layers = tuple(map(_layer, layer))
    sites = tuple(map(_site, site)) if _is_list(site) else _site(site)
    if not layers or (isinstance(sites, tuple) and len(sites) != len(layers)):
        raise InvalidRequest(
            f"Probe: there are {len(layers)} layers and {len(sites) if isinstance(sites, tuple) else 1} sites. Give at "
            "least one layer, and one site for all layers or one for each.",
            reason="INVALID_FIELD",
        )
    if width % len(layers):
        raise BadVector(
            f"Probe: weights of {width} elements cannot be those of {len(layers)} places, whose rows are equally long.",
            reason="WRONG_LENGTH",
        )
    return layers, sites


def _is_number(given: Any) -> bool:
    """Return whether this is a whole number: also one of numpy or torch, which may look like a list."""
    try:
        operator.index(given)
    except TypeError:
        return False
    return not isinstance(given, bool)


def _is_list(given: Any) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping))


def _layer(given: Any) -> int:
    if not _is_number(given):
        raise TypeError(f"Probe: layer must be the number of a layer, or a list of numbers, not {given!r}.")
    return layer_list(operator.index(given))[0]


def _site(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"Probe: site must be the name of a site, or a list of names, not {given!r}.")
    site_numbers([given])
    return given


def checked_activation(given: Any, outputs: int) -> str | None:
    """Return the name of the activation; None if there is none."""
    if given not in [*ACTIVATIONS]:
        raise InvalidRequest(
            f"Probe: activation must be None, 'sigmoid' or 'softmax', not {given!r}.", reason="INVALID_FIELD"
        )
    if given == "softmax" and outputs == 1:
        raise InvalidRequest(
            "Probe: the softmax of one output is always 1. Use 'sigmoid', or give a row of weights for each class.",
            reason="INVALID_FIELD",
        )
    return None if given is None else str(given)


def checked_output_names(given: Any) -> tuple[str, ...]:
    """Return the names of the outputs."""
    names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"Probe: output_names must be a list of texts, not {given!r}.")
    return names


def checked_name(given: Any) -> str:
    """Return the name of the probe."""
    if not isinstance(given, str):
        raise TypeError(f"Probe: name must be a text, not {given!r}.")
    if not is_valid_probe_name(given):
        raise InvalidRequest(
            f"Probe: {given!r} is not a valid name. Use 1 to 64 of the characters a-z A-Z 0-9 . _ -",
            reason="INVALID_FIELD",
        )
    return given
