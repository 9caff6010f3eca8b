"""Element types: the proto's enum, numpy's dtypes and their names.

Messages carry a dtype as `DataType`, never as numpy's string, because that of bfloat16 is `'<V2'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from residuum.v1 import tensor_pb2

if TYPE_CHECKING:
    from typing import Any

_DTYPES: dict[tensor_pb2.DataType.ValueType, np.dtype[Any]] = {
    tensor_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    tensor_pb2.DATA_TYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
_NAMES: dict[tensor_pb2.DataType.ValueType, str] = {
    tensor_pb2.DATA_TYPE_FLOAT32: "float32",
    tensor_pb2.DATA_TYPE_FLOAT16: "float16",
    tensor_pb2.DATA_TYPE_BFLOAT16: "bfloat16",
}


def numpy_dtype(dtype: tensor_pb2.DataType.ValueType) -> np.dtype[Any]:
    """Return numpy's dtype for an element type.

    Raises:
        ValueError: This version does not know the element type.
    """
    try:
        return _DTYPES[dtype]
    except KeyError:
        raise ValueError(f"unknown element type {int(dtype)}; known: {', '.join(_NAMES.values())}") from None


def dtype_name(dtype: tensor_pb2.DataType.ValueType) -> str:
    """Return the name of an element type: "float32", "float16" or "bfloat16"; "unknown" for any other value."""
    return _NAMES.get(dtype, "unknown")


def item_bytes(dtype: tensor_pb2.DataType.ValueType) -> int:
    """Return the size of one element in bytes."""
    return numpy_dtype(dtype).itemsize
