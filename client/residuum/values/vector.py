"""Steering vectors, named by their content."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import BadVector
from residuum.v1 import tensor_pb2
from residuum.wire.digests import vector_message

FloatArray = npt.NDArray[np.float32]


class Vector:
    """A direction of the residual stream: float32 [hidden], finite, immutable, named by its digest.

    A server keeps vectors by digest, so the same vector is sent once, however many requests use it.

    Args:
        array: As for `from_array`, which is the same under a longer name.

    Example:
        >>> joy = residuum.Vector.from_array(happy.mean(axis=0) - sad.mean(axis=0))
        >>> joy
        Vector(576 elements, norm 3.21, digest 5c0ffee0…)
    """

    __slots__ = ("__dict__", "_values")

    def __init__(self, array: npt.ArrayLike) -> None:
        self._values = _checked(_as_float32(array))
        self._values.setflags(write=False)  # a copy, so the caller's own array stays as it was

    @classmethod
    def from_array(cls, array: npt.ArrayLike) -> Vector:
        """Make a vector from anything that numpy or torch calls a one-dimensional array of real numbers.

        Args:
            array: Shape [hidden]; copied and converted to float32. A torch tensor may lie on any device.

        Raises:
            BadVector: It has another number of dimensions, is empty, or holds something that is not real and finite.

        Example:
            >>> Vector.from_array([0.0, 1.0, 0.0]).digest.hex()[:8]
            '…'
        """
        return cls(array)

    @functools.cached_property
    def message(self) -> tensor_pb2.Vector:
        """The vector as it travels."""
        return vector_message(self._values)

    @property
    def digest(self) -> bytes:
        """The SHA-256 that names the vector, 32 bytes; tensor.proto has the rule."""
        return self.message.digest

    @property
    def hexdigest(self) -> str:
        """The digest in hexadecimal, 64 characters."""
        return self.digest.hex()

    @property
    def values(self) -> FloatArray:
        """The elements: float32 [hidden], read-only."""
        return self._values

    @property
    def norm(self) -> float:
        """The Euclidean length."""
        return float(np.linalg.norm(self._values.astype(np.float64)))

    def __len__(self) -> int:
        return int(self._values.size)

    def __array__(
        self,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,  # noqa: FBT001 - numpy's protocol
    ) -> npt.NDArray[np.generic]:
        return np.array(self._values, dtype=dtype) if copy else np.asarray(self._values, dtype=dtype)

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Vector) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Vector({len(self)} elements, norm {self.norm:.4g}, digest {self.hexdigest[:8]}…)"


def load_vectors(path: str | os.PathLike[str]) -> dict[str, Vector]:
    """Read the vectors of a .npy or .safetensors file.

    Args:
        path: A .npy file with [hidden] or [count, hidden], or a .safetensors file whose tensors are [hidden].

    Returns:
        The vectors by name: the tensor's, or the file's with a number behind it.

    Raises:
        BadVector: The file holds something else, or one of its vectors cannot be used; the message names it.
        FileNotFoundError: There is no such file.
    """
    file = Path(path)
    readers = {".npy": _read_npy, ".safetensors": _read_safetensors}
    if file.suffix not in readers:
        raise BadVector(f"{file.name}: vectors are read from .npy and .safetensors files.", reason="INVALID_FIELD")
    arrays = readers[file.suffix](file)
    return {name: _named(name, array) for name, array in arrays.items()}


def _read_npy(file: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        loaded = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise BadVector(f"{file.name} is not a .npy file of numbers: {error}", reason="INVALID_FIELD") from None
    if loaded.ndim != 2:  # noqa: PLR2004 - [count, hidden]
        return {file.stem: loaded}
    return {f"{file.stem}.{number}": row for number, row in enumerate(loaded)}


def _read_safetensors(file: Path) -> dict[str, npt.NDArray[Any]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(file))
    except SafetensorError as error:
        raise BadVector(f"{file.name} is not a safetensors file: {error}", reason="INVALID_FIELD") from None


def _named(name: str, array: npt.ArrayLike) -> Vector:
    try:
        return Vector.from_array(array)
    except BadVector as error:
        raise BadVector(f"{name}: {error}", reason=error.reason) from None


def _checked(values: FloatArray) -> FloatArray:
    if values.ndim != 1 or not values.size:
        raise BadVector(
            f"A vector has the shape [hidden], but this array has {list(values.shape)}. "
            "Take one row, or average over the others.",
            reason="WRONG_LENGTH",
        )
    bad = int(np.count_nonzero(~np.isfinite(values)))
    if bad:
        raise BadVector(
            f"{bad} of {values.size} elements are NaN, infinite or beyond float32; every element must be finite.",
            reason="BAD_VALUES",
        )
    return values


def _as_float32(array: npt.ArrayLike) -> FloatArray:
    if hasattr(array, "detach"):  # a torch tensor, without importing torch: numpy knows neither CUDA nor bfloat16
        tensor = array.detach().cpu()
        array = tensor.numpy() if tensor.is_complex() else tensor.float().numpy()
    try:
        _check_real(array)
        with np.errstate(over="ignore"):  # what overflows becomes infinite and is refused by name
            return np.array(array, dtype="<f4", order="C")
    except BadVector:
        raise
    except (TypeError, ValueError) as error:
        raise BadVector(f"This is not an array of numbers: {error}", reason="WRONG_DTYPE") from None


def _check_real(array: npt.ArrayLike) -> None:
    if np.iscomplexobj(array):
        raise BadVector(
            "A vector is real, and these numbers are complex; take their real part or their absolute value.",
            reason="WRONG_DTYPE",
        )
