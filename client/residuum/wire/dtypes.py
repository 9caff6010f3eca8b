"""Element types: the proto's enum, numpy's dtypes and the names people use.

numpy calls bfloat16 `'<V2'`, so a dtype never travels by its string; it travels as `DataType`.
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
        ValueError: The value is not an element type that this version knows.
    """
    try:
        return _DTYPES[dtype]
    except KeyError:
        raise ValueError(f"unknown element type {int(dtype)}; known: {', '.join(_NAMES.values())}") from None


def dtype_name(dtype: tensor_pb2.DataType.ValueType) -> str:
    """Return the name people use: "float32", "float16" or "bfloat16"; "unknown" for anything else."""
    return _NAMES.get(dtype, "unknown")


def item_bytes(dtype: tensor_pb2.DataType.ValueType) -> int:
    """Return the bytes of one element."""
    return numpy_dtype(dtype).itemsize
