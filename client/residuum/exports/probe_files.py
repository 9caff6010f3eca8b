"""Reads and writes probes as safetensors files; `Probe.save` documents the format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.exports.tensor_files import read_safetensors, write_safetensors
from residuum.values.probe_layers import ProbeLayer
from residuum.values.probes import Probe
from residuum.values.smoothing import parse_smoothing

FORMAT = "residuum.probe.v1"
"""The value of "format" in the metadata."""

_NO_ACTIVATION = "none"
"""The value of "activation" of a probe that has none."""


def save(probe: Probe, path: str | os.PathLike[str]) -> None:
    """Write a file; see `Probe.save`."""
    metadata = {
        "format": FORMAT,
        "layer": str(probe.layer),
        "site": probe.site,
        "activation": probe.activation or _NO_ACTIVATION,
        "name": probe.name,
    }
    if probe.output_names:
        metadata["output_names"] = ",".join(probe.output_names)
    if probe.smooth is not None:
        metadata["smooth"] = str(probe.smooth)
    tensors = {"weight": probe.weights, "bias": probe.bias}
    for number, layer in enumerate(probe.mlp, 2):
        tensors |= {f"weight_{number}": layer.weights, f"bias_{number}": layer.bias}
        metadata[f"activation_{number}"] = layer.activation or _NO_ACTIVATION
    write_safetensors(path, tensors, metadata)


def load(path: str | os.PathLike[str]) -> Probe:
    """Read a file; see `Probe.load`."""
    arrays, metadata = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise _refusal(path, f"its metadata does not have the format {FORMAT!r}, which Probe.save writes")
    missing = {"weight", "bias"} - {*arrays} or {"layer", "site", "activation", "name"} - {*metadata}
    if missing:
        raise _refusal(path, f"it has no {min(missing)}")
    layer, activation = metadata["layer"], metadata["activation"]
    if not re.fullmatch(r"\d{1,9}", layer, re.ASCII):
        raise _refusal(path, f"its layer is {layer!r}")
    wrong = {name for name in arrays if arrays[name].dtype != np.float32}
    if wrong:
        raise _refusal(path, f"its {min(wrong)} is not float32")
    try:
        return Probe(
            arrays["weight"],
            arrays["bias"],
            layer=int(layer),
            site=metadata["site"],
            activation=None if activation == _NO_ACTIVATION else activation,
            name=metadata["name"],
            smooth=parse_smoothing(metadata["smooth"]) if "smooth" in metadata else None,
            mlp=list(_further_layers(arrays, metadata)),
            output_names=metadata["output_names"].split(",") if "output_names" in metadata else (),
        )
    except InvalidRequest as error:
        raise type(error)(f"{os.fspath(path)}: {error}", reason=error.reason) from None


def _further_layers(arrays: Mapping[str, npt.NDArray[np.float32]], metadata: Mapping[str, str]) -> Iterator[ProbeLayer]:
    number = 2
    while {f"weight_{number}", f"bias_{number}"} <= {*arrays}:
        activation = metadata.get(f"activation_{number}", _NO_ACTIVATION)
        hidden = None if activation == _NO_ACTIVATION else activation
        yield ProbeLayer(arrays[f"weight_{number}"], arrays[f"bias_{number}"], hidden)
        number += 1


def _refusal(path: str | os.PathLike[str], why: str) -> InvalidRequest:
    return InvalidRequest(f"{os.fspath(path)} holds no probe: {why}.", reason="INVALID_FIELD")
