"""The digest that names a steering vector. tensor.proto defines it; vector_digests.json has test vectors."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from residuum.v1 import tensor_pb2
from residuum.wire.dtypes import item_bytes, numpy_dtype

_DOMAIN = b"residuum.vector.v1"


def digest_of_bytes(dtype: tensor_pb2.DataType.ValueType, values: bytes) -> bytes:
    """Return the SHA-256 (32 bytes) that names a vector.

    Args:
        dtype: The element type.
        values: The elements, little-endian, densely packed.

    Raises:
        ValueError: The element type is unknown, or `values` ends within an element.
    """
    length, rest = divmod(len(values), item_bytes(dtype))
    if rest:
        raise ValueError(f"{len(values)} bytes are not a multiple of the element size, {item_bytes(dtype)} bytes")
    head = _DOMAIN + struct.pack("<IQ", int(dtype), length)
    return hashlib.sha256(head + values).digest()


def vector_message(values: npt.NDArray[np.float32]) -> tensor_pb2.Vector:
    """Return the message that carries a vector, float32 [hidden], with its digest."""
    data = np.ascontiguousarray(values, dtype=numpy_dtype(tensor_pb2.DATA_TYPE_FLOAT32)).tobytes()
    digest = digest_of_bytes(tensor_pb2.DATA_TYPE_FLOAT32, data)
    return tensor_pb2.Vector(digest=digest, dtype=tensor_pb2.DATA_TYPE_FLOAT32, values=data)
