"""The format of files of probes, without the reading of safetensors. `Probe.save` documents it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float32]

FORMAT = "residuum.probe.v1"
"""The value of "format" in the metadata."""

NO_ACTIVATION = "none"
"""The value of "activation" of a probe or a layer that has none."""


class FileLayer(NamedTuple):
    """A further layer of an MLP."""

    weights: FloatArray
    bias: FloatArray
    activation: str | None


class ProbeFile(NamedTuple):
    """The parts of a file. Its types are right; the shapes of the arrays and the names may be wrong."""

    weights: FloatArray
    """[outputs, elements of the rows at all places]."""
    bias: FloatArray
    places: tuple[tuple[str, int], ...]
    """The site and the layer of each place that the probe reads; at least one."""
    activation: str | None
    name: str
    smooth: str
    """Empty: the scores are not smoothed."""
    mlp: tuple[FileLayer, ...]
    output_names: tuple[str, ...]
    heads: int = 0
    """The heads of an attention probe; 0: it is none."""
    position_weights: FloatArray | None = None


def parse(arrays: Mapping[str, npt.NDArray[np.generic]], metadata: Mapping[str, str]) -> ProbeFile:
    """Return the parts of a file, given its tensors and its metadata.

    Raises:
        ValueError: It is no file of a probe; the message says why.
    """
    if metadata.get("format") != FORMAT:
        raise ValueError(f"its metadata does not have the format {FORMAT!r}, which Probe.save writes")
    missing = {"weight", "bias"} - {*arrays} or {"layer", "site", "activation", "name"} - {*metadata}
    if missing:
        raise ValueError(f"it has no {min(missing)}")
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", metadata["layer"], re.ASCII):
        raise ValueError(f"its layer is {metadata['layer']!r}")
    layers, sites = metadata["layer"].split(","), metadata["site"].split(",")
    if len(sites) not in {1, len(layers)}:
        raise ValueError(f"it has {len(sites)} sites for {len(layers)} layers")
    if not re.fullmatch(r"\d{1,4}", metadata.get("heads", "1"), re.ASCII) or metadata.get("heads") == "0":
        raise ValueError(f"its heads are {metadata['heads']!r}")
    wrong = {name for name in arrays if arrays[name].dtype != np.float32}
    if wrong:
        raise ValueError(f"its {min(wrong)} is not float32")
    numbers = {name: array.astype(np.float32, copy=False) for name, array in arrays.items()}
    return ProbeFile(
        weights=numbers["weight"],
        bias=numbers["bias"],
        places=tuple(zip(sites * (len(layers) // len(sites)), map(int, layers), strict=True)),
        activation=_activation(metadata, "activation"),
        name=metadata["name"],
        smooth=metadata.get("smooth", ""),
        mlp=tuple(_further_layers(numbers, metadata)),
        output_names=tuple(metadata["output_names"].split(",")) if "output_names" in metadata else (),
        heads=int(metadata.get("heads", "0")),
        position_weights=numbers.get("position_weight"),
    )


def _further_layers(arrays: Mapping[str, FloatArray], metadata: Mapping[str, str]) -> Iterator[FileLayer]:
    number = 2
    while {f"weight_{number}", f"bias_{number}"} <= {*arrays}:
        activation = _activation(metadata, f"activation_{number}")
        yield FileLayer(arrays[f"weight_{number}"], arrays[f"bias_{number}"], activation)
        number += 1


def _activation(metadata: Mapping[str, str], name: str) -> str | None:
    found = metadata.get(name, NO_ACTIVATION)
    return None if found == NO_ACTIVATION else found
