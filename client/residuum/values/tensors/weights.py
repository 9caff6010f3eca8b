"""Arrays of weights that users give, checked: of numpy, torch or anything that numpy reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.v1 import tensor_pb2
from residuum.values.tensors.numbers import without_torch

WEIGHT_DTYPES = {
    np.dtype(np.float32): tensor_pb2.DATA_TYPE_FLOAT32,
    np.dtype(np.float16): tensor_pb2.DATA_TYPE_FLOAT16,
    np.dtype(ml_dtypes.bfloat16): tensor_pb2.DATA_TYPE_BFLOAT16,
}
"""The dtypes of weights."""

Refuse = Callable[[str], InvalidRequest]
"""Returns the error of a message."""


def weight_matrix(
    name: str, values: npt.ArrayLike, refuse: Refuse, *, shape: str, dtype: np.dtype[Any] | None = None
) -> npt.NDArray[Any]:
    """Return a read-only copy of a matrix, of a dtype of `WEIGHT_DTYPES`; others become float32.

    Args:
        name: What errors call it.
        values: The matrix.
        refuse: Makes the error.
        shape: The shape that it must have, for the error.
        dtype: The dtype of the copy. None: that of the matrix.

    Raises:
        InvalidRequest: It is no matrix of finite real numbers.
    """
    array = _array(name, values, refuse)
    if dtype is None:
        dtype = array.dtype if array.dtype in WEIGHT_DTYPES else np.dtype(np.float32)
    if array.ndim != 2 or not array.size:  # noqa: PLR2004 - a matrix
        raise refuse(f"The {name} must be {shape}, but it is {list(array.shape)}.")
    return _checked(name, array, dtype, refuse)


def float_numbers(name: str, values: npt.ArrayLike | None, length: int, refuse: Refuse) -> npt.NDArray[np.float32]:
    """Return a read-only copy of numbers, float32 [length]. None is zeros, and a single number stands for all.

    Raises:
        InvalidRequest: They are not as many, or not finite real numbers.
    """
    array = np.zeros(length, np.float32) if values is None else _array(name, values, refuse)
    if array.ndim == 0:
        array = np.full(length, array)
    if array.shape != (length,):
        raise refuse(f"{name} must have {length} elements, but it is {list(array.shape)}.")
    return cast("npt.NDArray[np.float32]", _checked(name, array, np.dtype(np.float32), refuse))


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Make an array read-only, and return it."""
    array.setflags(write=False)
    return array


def _array(name: str, values: Any, refuse: Refuse) -> npt.NDArray[Any]:
    if hasattr(values, "detach"):  # a torch tensor; numpy has no bfloat16 of torch
        tensor = values.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            values = tensor.float().numpy().astype(ml_dtypes.bfloat16)
        else:
            values = without_torch(tensor) if tensor.element_size() == 1 else tensor.numpy()  # 1: float8
    array = np.asarray(values)
    is_number = array.dtype in WEIGHT_DTYPES or array.dtype.kind in "fiu"
    if not is_number:
        raise refuse(f"The {name} is not an array of real numbers, but of {array.dtype}.")
    return array


def _checked(name: str, array: npt.NDArray[Any], dtype: np.dtype[Any], refuse: Refuse) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):  # overflow gives infinity, which is refused
        copy = np.array(array, dtype=dtype, order="C")
    if not np.isfinite(copy).all():
        raise refuse(
            f"The {name} has elements that are NaN, infinite, or beyond {dtype}. Every element must be finite."
        )
    return read_only(copy)
