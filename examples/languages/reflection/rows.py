"""Decodes chunks into float32 rows. The layouts are in capture.proto."""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import crc32c
import numpy as np
import numpy.typing as npt

_NUMPY = {"FP32": "<f4", "FP16": "<f2", "BF16": "<u2"}  # bfloat16 is the upper half of a float32
_RAW_DTYPES = {"DATA_TYPE_FLOAT32": "FP32", "DATA_TYPE_FLOAT16": "FP16", "DATA_TYPE_BFLOAT16": "BF16"}


class Shape(NamedTuple):
    """The rows that count. An array of them is [layers, positions, width]."""

    layers: list[int]
    positions: list[int]
    width: int


class Rows:
    """The rows of one sequence at one site. They may arrive in any order."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._rows)

    def add(self, chunk: Any) -> None:
        """Add the rows of a chunk.

        Raises:
            ValueError: It is damaged, or has an unsupported encoding.
        """
        header = chunk.header
        if crc32c.crc32c(chunk.payload) != chunk.crc32c:
            raise ValueError("A chunk's payload does not match its CRC-32C.")
        shape = (len(header.layers), len(header.positions), header.width)
        values = _decode(chunk.payload, _element_type(header), math.prod(shape)).reshape(shape)
        with self._lock:
            for layer, of_layer in zip(header.layers, values, strict=True):
                for position, row in zip(header.positions, of_layer, strict=True):
                    self._rows[layer, position] = row

    def array(self, shape: Shape) -> npt.NDArray[np.float32]:
        """Return the rows of a shape as one array.

        Raises:
            ValueError: A row is missing.
        """
        with self._lock:
            try:
                rows = [self._rows[layer, position] for layer in shape.layers for position in shape.positions]
            except KeyError as error:
                layer, position = error.args[0]
                raise ValueError(f"The row of layer {layer} at position {position} is missing.") from None
        return np.stack(rows).reshape(len(shape.layers), len(shape.positions), shape.width)


def shape_of(manifest: Any) -> Shape:
    """Return the rows that count, from the manifest of a complete capture of one sequence and site.

    Raises:
        ValueError: The capture has other sequences or sites.
    """
    if len(manifest.present) != 1:
        raise ValueError(f"This example reads one sequence and site, but the capture has {len(manifest.present)}.")
    (present,) = manifest.present
    positions = [position for run in present.positions for position in range(run.first, run.last + 1)]
    return Shape(list(present.layers), positions, manifest.description.hidden_size)


def _element_type(header: Any) -> str:
    """Return the element type of a chunk's payload. RAW has the model's own type."""
    names = header.DESCRIPTOR.fields_by_name
    encoding = names["encoding"].enum_type.values_by_number[header.encoding].name.removeprefix("ENCODING_")
    if encoding != "RAW":
        return encoding
    return _RAW_DTYPES[names["dtype"].enum_type.values_by_number[header.dtype].name]


def _decode(payload: bytes, element_type: str, count: int) -> npt.NDArray[np.float32]:
    """Return `count` little-endian elements as float32, which holds every value of the narrower types exactly."""
    if element_type not in _NUMPY:
        raise ValueError(f"Rows encoded as {element_type} are not supported here.")
    dtype = np.dtype(_NUMPY[element_type])
    if len(payload) != count * dtype.itemsize:
        raise ValueError(f"A chunk has {len(payload)} bytes instead of {count} numbers of {dtype.itemsize} bytes.")
    elements = np.frombuffer(payload, dtype)
    if element_type == "BF16":
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.astype(np.float32)
