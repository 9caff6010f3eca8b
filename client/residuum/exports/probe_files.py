"""Reads and writes probes as safetensors files; `Probe.save` documents the format."""

from __future__ import annotations

import os

from residuum.exceptions import InvalidRequest
from residuum.exports.tensor_files import write_safetensors
from residuum.values.probes.layers import ProbeAttention, ProbeLayer
from residuum.values.probes.probe import Probe
from residuum.values.probes.smoothing import parse_smoothing
from residuum.values.tensors.files import read_safetensors
from residuum.wire.probes.files import FORMAT, NO_ACTIVATION, parse


def save(probe: Probe, path: str | os.PathLike[str]) -> None:
    """Write a file; see `Probe.save`."""
    metadata = {
        "format": FORMAT,
        "layer": ",".join(str(layer) for _, layer in probe.places),
        "site": probe.site if isinstance(probe.site, str) else ",".join(probe.site),
        "activation": probe.activation or NO_ACTIVATION,
        "name": probe.name,
    }
    if probe.output_names:
        metadata["output_names"] = ",".join(probe.output_names)
    if probe.smooth is not None:
        metadata["smooth"] = str(probe.smooth)
    tensors = {"weight": probe.weights, "bias": probe.bias}
    for number, layer in enumerate(probe.mlp, 2):
        tensors |= {f"weight_{number}": layer.weights, f"bias_{number}": layer.bias}
        metadata[f"activation_{number}"] = layer.activation or NO_ACTIVATION
    if probe.attention is not None:
        metadata["heads"] = str(probe.attention.heads)
        if probe.attention.position_weights is not None:
            tensors["position_weight"] = probe.attention.position_weights
    write_safetensors(path, tensors, metadata)


def load(path: str | os.PathLike[str]) -> Probe:
    """Read a file; see `Probe.load`."""
    arrays, metadata = read_safetensors(path)
    try:
        file = parse(arrays, metadata)
    except ValueError as error:
        raise InvalidRequest(f"{os.fspath(path)} holds no probe: {error}.", reason="INVALID_FIELD") from None
    layers, sites = [layer for _, layer in file.places], [site for site, _ in file.places]
    try:
        return Probe(
            file.weights,
            file.bias,
            layer=layers if len(layers) > 1 else layers[0],
            site=sites if len({*sites}) > 1 else sites[0],
            activation=file.activation,
            name=file.name,
            smooth=parse_smoothing(file.smooth) if file.smooth else None,
            mlp=[ProbeLayer(*layer) for layer in file.mlp],
            output_names=file.output_names,
            attention=ProbeAttention(file.heads, file.position_weights) if file.heads else None,
        )
    except InvalidRequest as error:
        raise type(error)(f"{os.fspath(path)}: {error}", reason=error.reason) from None
