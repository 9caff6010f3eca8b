"""Reads and writes directions: safetensors, and GGUF as repeng and llama.cpp use it for control vectors."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.directions.values import Directions, Origin
from residuum.exceptions import InvalidRequest, UnknownLayer, UnknownSite
from residuum.exports.target import workplace
from residuum.exports.tensor_files import write_safetensors
from residuum.rpc.extras import install_extra
from residuum.values.selections.layers_and_positions import LayersLike
from residuum.values.tensors.files import read_safetensors

FORMAT = "residuum.directions.v1"
"""The value of "format" in the metadata of safetensors files."""

_ARCHITECTURE = "controlvector"
"""The value of `general.architecture` in GGUF files."""

_Path = str | os.PathLike[str]


def save(directions: Directions, path: _Path) -> None:
    """Write a safetensors file; see `Directions.save`."""
    site = directions.origin.site
    arrays = {f"{site}.{layer}": np.ascontiguousarray(vector.values) for layer, vector in directions.items()}
    metadata = {"format": FORMAT, "origin": json.dumps(dataclasses.asdict(directions.origin))}
    write_safetensors(path, dict(arrays), metadata)


def load(path: _Path) -> Directions:
    """Read a safetensors file; see `Directions.load`."""
    arrays, metadata = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise _refusal(path, "it was not written by Directions.save; residuum.load_vectors reads any vectors")
    origin = _origin(path, metadata.get("origin", ""))
    return _directions(path, arrays, origin.site, origin)


def saved_directions(path: _Path) -> Directions | None:
    """Return the directions of a file that `Directions.save` wrote; None for any other file, or if it is missing."""
    try:
        is_ours = read_safetensors(path)[1].get("format") == FORMAT
    except (OSError, InvalidRequest):  # the caller reads the file in another way, which reports its own errors
        return None
    return load(path) if is_ours else None


def _origin(path: _Path, text: str) -> Origin:
    """Return the origin in the metadata. Fields of a newer version are ignored."""
    try:
        facts = json.loads(text)
        known = {field.name: facts[field.name] for field in dataclasses.fields(Origin) if field.name in facts}
    except (ValueError, TypeError):
        raise _refusal(path, "its metadata does not say where the directions came from") from None
    for name, value in known.items():
        if type(value) is not type(getattr(Origin(), name)):
            raise _refusal(path, f"its metadata says that {name} is {value!r}")
    return Origin(**known)


def from_gguf(path: _Path) -> Directions:
    """Read a control vector; see `Directions.from_gguf`."""
    gguf = _gguf()
    try:
        reader = gguf.GGUFReader(os.fspath(path))
        architecture = _text(reader, "general.architecture") or _ARCHITECTURE
        hint = _text(reader, f"{_ARCHITECTURE}.model_hint")
        tensors = [tensor for tensor in reader.tensors if tensor.name.startswith("direction.")]
        arrays = {tensor.name: _values(gguf, tensor) for tensor in tensors}
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - the package checks little, so bad bytes raise any exception
        raise _refusal(path, f"it is not a GGUF file, or is damaged ({type(error).__name__}: {error})") from None
    if architecture != _ARCHITECTURE:
        raise _refusal(path, f"it is a GGUF file, but of architecture {architecture!r} and not a control vector")
    return _directions(path, arrays, "direction", Origin(method="control_vector", model=hint))


def _text(reader: Any, name: str) -> str:
    field = reader.get_field(name)
    return "" if field is None else str(field.contents())


def _values(gguf: ModuleType, tensor: Any) -> npt.NDArray[Any]:
    """Return a copy of a tensor's elements, because the reader only maps the file."""
    if tensor.data.dtype.kind == "f":
        return np.array(tensor.data)
    return np.array(gguf.dequantize(tensor.data, tensor.tensor_type))


def to_gguf(directions: Directions, path: _Path, layers: LayersLike | None, model_hint: str) -> None:
    """Write a control vector; see `Directions.to_gguf`."""
    placed = directions.placed(layers)
    if directions.steering_site != "resid_post":
        raise UnknownSite(
            f"Directions of {directions.steering_site} cannot be written as GGUF: llama.cpp and repeng add them to the "
            "residual stream. Use save().",
            reason="UNKNOWN_SITE",
        )
    if any(place == 0 for _, place, _ in placed):
        raise UnknownLayer(
            "llama.cpp cannot steer after layer 0, and refuses a file with a direction for it. Leave it out with "
            f"layers={[layer for layer, place, _ in placed if place]}.",
            reason="UNKNOWN_LAYER",
        )
    gguf = _gguf()
    with workplace(Path(path), overwrite=True) as made:
        writer = gguf.GGUFWriter(os.fspath(made.result), _ARCHITECTURE)
        writer.add_string(f"{_ARCHITECTURE}.model_hint", model_hint)
        writer.add_uint32(f"{_ARCHITECTURE}.layer_count", len(placed))
        for _, place, vector in placed:
            writer.add_tensor(f"direction.{place}", vector.values)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _gguf() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise ImportError(f"GGUF files need the package gguf: {install_extra('gguf')}.") from None
    return gguf


def _directions(path: _Path, arrays: dict[str, npt.NDArray[Any]], prefix: str, origin: Origin) -> Directions:
    """Return directions from tensors that are named PREFIX.LAYER."""
    if not arrays:
        raise _refusal(path, "it has no tensors of directions")
    layers: dict[int, npt.NDArray[Any]] = {}
    for name, array in arrays.items():
        match = re.fullmatch(rf"{re.escape(prefix)}\.(\d{{1,9}})", name, re.ASCII)
        if match is None or int(match[1]) in layers:
            raise _refusal(path, f"its tensor {name!r} is not named {prefix}.LAYER, or repeats a layer")
        layers[int(match[1])] = array
    try:
        return Directions(layers, origin=origin)
    except InvalidRequest as error:
        raise type(error)(f"{os.fspath(path)}: {error}", reason=error.reason) from None


def _refusal(path: _Path, why: str) -> InvalidRequest:
    return InvalidRequest(f"{os.fspath(path)} holds no directions: {why}.", reason="INVALID_FIELD")
