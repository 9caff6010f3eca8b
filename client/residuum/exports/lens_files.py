"""Files of lenses: our own safetensors files, and the folders of the package tuned-lens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from residuum.exceptions import InvalidRequest
from residuum.exports.tensor_files import write_safetensors
from residuum.exports.torch_files import read_state_dict
from residuum.values.tensors.files import read_safetensors
from residuum.values.tensors.lens import Lens, LensMap

OWN_FORMAT = "residuum.lens.v1"
"""The value of "format" in the metadata of our own files."""

_CONFIG, _PARAMETERS = "config.json", "params.pt"
_KIND = "linear_tuned_lens"


def save(lens: Lens, path: str | os.PathLike[str]) -> None:
    """Write a lens; see `Lens.save`."""
    arrays: dict[str, Any] = {}
    maps = {layer: item for layer, item in lens.items() if item is not None}
    for layer, item in maps.items():
        arrays |= {f"{layer}.weight": item.weights, f"{layer}.bias": item.bias}
    added = [layer for layer, item in maps.items() if item.is_added]
    metadata = {
        "format": OWN_FORMAT,
        "added": ",".join(map(str, added)),
        "as_is": ",".join(str(layer) for layer in lens if layer not in maps),
    }
    write_safetensors(path, arrays, metadata)


def load(path: str | os.PathLike[str]) -> Lens:
    """Read a lens; see `Lens.load`."""
    if not Path(path).exists():
        raise FileNotFoundError(f"{os.fspath(path)} does not exist.")
    arrays, metadata = read_safetensors(path)
    if metadata.get("format") != OWN_FORMAT:
        raise _refusal(path, f"its metadata does not have the format {OWN_FORMAT!r}, which Lens.save writes")
    added, as_is = (_layers(path, metadata, name) for name in ("added", "as_is"))
    layers = _numbers_of(path, arrays)
    maps = {
        layer: LensMap(arrays[f"{layer}.weight"], arrays.get(f"{layer}.bias"), is_added=layer in added)
        for layer in layers
    }
    return Lens({**maps, **dict.fromkeys(as_is)})


def from_tuned_lens(source: str | os.PathLike[str] | Mapping[str, Any]) -> Lens:
    """Read a lens of tuned-lens; see `Lens.from_tuned_lens`."""
    count = None
    if isinstance(source, Mapping):
        arrays, what = dict(source), "the state dict"
    else:
        folder = Path(source)
        what = os.fspath(folder)
        count = _translators(folder)
        arrays = read_state_dict(folder / _PARAMETERS)
    arrays = {name.removeprefix("layer_translators."): array for name, array in arrays.items()}
    numbers = _numbers_of(what, arrays)
    count = len(numbers) if count is None else count
    if numbers != list(range(count)):
        missing = sorted({*range(count)} - {*numbers})
        detail = f"lacks the translator {missing[0]}" if missing else f"has {len(numbers)} translators"
        raise _refusal(what, f"it {detail}; there must be one for each of {count} layers")
    maps: dict[int, LensMap | None] = {
        number - 1: LensMap(arrays[f"{number}.weight"], arrays.get(f"{number}.bias"), is_added=True)
        for number in numbers
    }
    return Lens({**maps, count - 1: None})


def _translators(folder: Path) -> int:
    """Return how many translators a folder's configuration promises."""
    for name in (_CONFIG, _PARAMETERS):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder} has no {name}, so it is not a folder that TunedLens.save wrote.")
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        kind, count = config.get("lens_type", _KIND), config["num_hidden_layers"]
    except (ValueError, KeyError, AttributeError):
        raise _refusal(folder, f"{_CONFIG} is not an object with num_hidden_layers") from None
    if kind != _KIND:
        raise _refusal(folder, f"its lens_type is {kind!r}; only {_KIND!r} is known")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise _refusal(folder, f"num_hidden_layers is {count!r}, not a positive whole number")
    return count


def _numbers_of(path: str | os.PathLike[str], arrays: Mapping[str, Any]) -> list[int]:
    """Return the numbers N of the arrays "N.weight", sorted, if all arrays are called so or "N.bias"."""
    found = set()
    for name in arrays:
        match = re.fullmatch(r"(-?\d+)\.(weight|bias)", name)
        if match is None or f"{match[1]}.weight" not in arrays:
            raise _refusal(path, f"it has {name!r}; expected are '<number>.weight', each with or without a bias")
        found.add(int(match[1]))
    if not found:
        raise _refusal(path, "it has no matrix")
    return sorted(found)


def _layers(path: str | os.PathLike[str], metadata: Mapping[str, str], name: str) -> list[int]:
    text = metadata.get(name, "")
    if not re.fullmatch(r"(-?\d+(,-?\d+)*)?", text):
        raise _refusal(path, f"its metadata has {name}={text!r}, not layers separated by commas")
    return [int(number) for number in text.split(",") if number]


def _refusal(path: str | os.PathLike[str], why: str) -> InvalidRequest:
    return InvalidRequest(f"No lens can be read from {os.fspath(path)}: {why}.", reason="INVALID_FIELD")
