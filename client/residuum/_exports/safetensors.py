"""safetensors: the rows in the dtype in which they were captured, with the manifest in the metadata.

The library's own writer has all of a file in memory, twice; the format is a length, a JSON header and the arrays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt

from residuum._exports.formats import Advance
from residuum._exports.parts import selections, slices, small_arrays

if TYPE_CHECKING:
    from residuum.activations import Activations

FORMAT = "residuum.activations.v1"
"""What the file says it is, in its metadata under "format"."""

_ALIGNMENT = 8
_DTYPES = {
    np.dtype(np.bool_): "BOOL",
    np.dtype("<i8"): "I64",
    np.dtype("<f4"): "F32",
    np.dtype("<f2"): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
}


@dataclass(frozen=True)
class _Tensor:
    name: str
    array: npt.NDArray[Any]
    is_rows: bool


def write(acts: Activations, path: Path, advance: Advance) -> None:
    """Write activations; see `Activations.to_safetensors`."""
    tensors = sorted(_tensors(acts), key=lambda tensor: -tensor.array.dtype.itemsize)  # so each begins at its multiple
    with path.open("wb") as file:
        file.write(_header(acts, tensors))
        for tensor in tensors:
            _write_array(file, tensor, advance)


def _tensors(acts: Activations) -> Iterator[_Tensor]:
    for name, selected in selections(acts):
        for layer in selected.layers:
            yield _Tensor(f"{name}.{layer}", selected.raw(layer), is_rows=True)
        for item, array in small_arrays(selected).items():
            yield _Tensor(f"{name}.{item}", array, is_rows=False)


def _header(acts: Activations, tensors: list[_Tensor]) -> bytes:
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "manifest": acts.manifest.to_json(),
            "sites": ",".join(acts.sites),
            "selected": f"{acts.sequence}/{acts.site}",
        }
    }
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.array.nbytes
        shape, dtype = list(tensor.array.shape), _DTYPES[tensor.array.dtype]
        header[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_array(file: BinaryIO, tensor: _Tensor, advance: Advance) -> None:
    array = tensor.array
    if not array.size:
        return
    for part in slices(len(array), array.nbytes // len(array)):
        file.write(np.ascontiguousarray(array[part]).view(np.uint8).data)
        if tensor.is_rows:
            advance(array[part].nbytes)
