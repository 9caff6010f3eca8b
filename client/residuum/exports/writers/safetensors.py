"""safetensors: the rows as captured, without decoding, with the manifest in the metadata.

The library's writer holds the whole file in memory twice, so this module writes the format itself: a length, a JSON
header and the arrays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from residuum.exports.formats import Advance
from residuum.exports.parts import Stored, selections, stored

if TYPE_CHECKING:
    from residuum.values.captures.activations import Activations

FORMAT = "residuum.activations.v1"
"""The value of "format" in the file's metadata."""

_ALIGNMENT = 8
DTYPES = {
    np.dtype(np.bool_): "BOOL",
    np.dtype("u1"): "U8",
    np.dtype("<u2"): "U16",
    np.dtype("<u4"): "U32",
    np.dtype("<i8"): "I64",
    np.dtype("<f4"): "F32",
    np.dtype("<f2"): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
}
"""The format's names of the element types that occur here."""


def write(acts: Activations, path: Path, advance: Advance) -> None:
    """Write activations; see `Activations.to_safetensors`."""
    tensors = sorted(_tensors(acts), key=lambda tensor: -tensor.values.dtype.itemsize)  # keeps all aligned
    with path.open("wb") as file:
        file.write(_header(acts, tensors))
        for tensor in tensors:
            for values, count in tensor.slices():
                file.write(values.view(np.uint8).data if values.size else b"")
                advance(count)


def _tensors(acts: Activations) -> Iterator[Stored]:
    for selection in selections(acts):
        yield from stored(selection)
        for item, array in selection.small_arrays().items():
            yield Stored(f"{selection.name}.{item}", array, present=None, kept_bytes=0.0)


def header(metadata: Mapping[str, str], tensors: Iterable[tuple[str, np.dtype[Any], Sequence[int]]]) -> bytes:
    """Return the start of a file: everything before the arrays.

    Args:
        metadata: The file's metadata.
        tensors: The name, element type and shape of each array, in the order in which they follow. Readers map the file
            into memory, so arrays with larger elements must come first.
    """
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        document[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _header(acts: Activations, tensors: list[Stored]) -> bytes:
    metadata = {
        "format": FORMAT,
        "manifest": acts.manifest.to_json(),
        "sites": ",".join(acts.sites),
        "selected": f"{acts.sequence}/{acts.site}",
    }
    return header(metadata, ((tensor.name, tensor.values.dtype, tensor.values.shape) for tensor in tensors))
