"""Steering vectors, identified by the digest of their content; and one for each layer."""

from __future__ import annotations

import functools
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from residuum.exceptions import BadVector, InvalidRequest
from residuum.v1 import tensor_pb2
from residuum.values.selections.layers_and_positions import layer_list
from residuum.values.selections.points import BESIDE_THE_STREAM
from residuum.values.tensors.files import read_safetensors
from residuum.values.tensors.numbers import without_torch
from residuum.wire.digests import vector_message

FloatArray = npt.NDArray[np.float32]


class Vector:
    """A direction in the residual stream: float32 [hidden], finite and immutable, identified by its digest.

    A server keeps vectors by digest. So the client sends a vector once, however many requests use it.

    Args:
        array: As for `from_array`, which does the same.

    Example:
        >>> joy = residuum.Vector.from_array(happy.mean(axis=0) - sad.mean(axis=0))
        >>> joy
        Vector(576 elements, norm 3.21, digest 5c0ffee0…)
    """

    __slots__ = ("__dict__", "_values")

    def __init__(self, array: npt.ArrayLike) -> None:
        self._values = _checked(as_float32(array))
        self._values.setflags(write=False)  # this is a copy, so the caller's array stays writable

    @classmethod
    def from_array(cls, array: npt.ArrayLike) -> Vector:
        """Create a vector from a one-dimensional array of real numbers.

        Args:
            array: Anything that numpy or torch treats as an array, of shape [hidden]. It is copied and converted to
                float32. A torch tensor may be on any device.

        Raises:
            BadVector: The array is not one-dimensional, is empty, or has elements that are not real and finite.

        Example:
            >>> Vector.from_array([0.0, 1.0, 0.0]).digest.hex()[:8]
            '…'
        """
        return cls(array)

    @functools.cached_property
    def message(self) -> tensor_pb2.Vector:
        """The vector's message, with its digest."""
        return vector_message(self._values)

    @property
    def digest(self) -> bytes:
        """The SHA-256 that identifies the vector, 32 bytes; tensor.proto defines it."""
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
        """The Euclidean norm."""
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


_T = TypeVar("_T")


class LayerVectors(Mapping[int, _T]):
    """An immutable map from layer to vector, with ascending layers."""

    def __init__(self, vectors: Mapping[int, _T], kinds: tuple[type, ...] = (Vector,)) -> None:
        """Copy a map from layer to vector.

        Args:
            vectors: The map.
            kinds: The classes that count as vectors.

        Raises:
            TypeError: A key is not a layer number, or a value is not a vector.
            InvalidRequest: The map is empty; UnknownLayer if a layer is negative.
        """
        for layer, vector in vectors.items():
            if not isinstance(vector, kinds) or isinstance(layer, bool) or not hasattr(layer, "__index__"):
                raise TypeError(
                    f"Vectors for layers must be {{layer number: residuum.Vector}}, not "
                    f"{{{layer!r}: {type(vector).__name__}}}."
                )
        if not vectors:
            raise InvalidRequest("Vectors for layers: name at least one layer.", reason="INVALID_FIELD")
        self._vectors = {int(layer): vectors[layer] for layer in sorted(vectors)}
        layer_list(self._vectors)

    def __getitem__(self, layer: int) -> _T:
        return self._vectors[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    def __hash__(self) -> int:
        return hash(tuple(self._vectors.items()))

    def __repr__(self) -> str:
        return repr(self._vectors)


def by_steered_layer(vectors: Mapping[int, _T], site: str | None) -> tuple[Mapping[int, _T], str | None]:
    """Return vectors by the layer at which they apply, and their site.

    Args:
        vectors: {layer: vector}, or `Directions`. Those of resid_pre apply after the layer before.
        site: The site that the user chose. None: the default, which for `Directions` depends on their rows.
    """
    placed = getattr(vectors, "placed", None)
    if placed is None or site not in {None, "resid_post"}:
        return vectors, site
    return {place: vector for _, place, vector in placed()}, site or vectors.steering_site  # type: ignore[attr-defined]


def rows_site(vectors: object, site: str | None = None, *, advice: str = "") -> str:
    """Return the site of the rows that are compared with vectors.

    Args:
        vectors: Anything. Only `Directions` have a site of their own.
        site: The site of the rows. None: that of `Directions`, otherwise "resid_post".
        advice: What to do about rows of another kind; by default, to choose the directions' site.

    Raises:
        InvalidRequest: Rows of this site are of another kind than those of the directions.
    """
    own = vectors.origin.site if hasattr(vectors, "placed") and hasattr(vectors, "origin") else None
    if site is None:
        return own or "resid_post"
    if own not in {None, site} and BESIDE_THE_STREAM & {site, own}:
        raise InvalidRequest(
            f"The directions are for the site {own}. Rows of {site} are of another kind, even if they are as wide. "
            f"{advice or f'Choose the site {own}.'}",
            reason="INVALID_FIELD",
        )
    return site


def load_vectors(path: str | os.PathLike[str]) -> dict[str, Vector]:
    """Read the vectors of a .npy or .safetensors file.

    Args:
        path: A .npy file with [hidden] or [count, hidden], or a .safetensors file whose tensors are [hidden].

    Returns:
        The vectors by name. In a .safetensors file that is the tensor's name. In a .npy file it is the file's name
        without its suffix, followed by a dot and the row's number if the file has several.

    Raises:
        BadVector: The file is not of this kind, or one of its vectors cannot be used; the message names it.
        FileNotFoundError: The file does not exist.
    """
    file = Path(path)
    readers = {".npy": _read_npy, ".safetensors": _read_safetensors}
    if file.suffix not in readers:
        message = f"Cannot read vectors from {file.name}: the file must be .npy or .safetensors."
        raise BadVector(message, reason="INVALID_FIELD")
    arrays = readers[file.suffix](file)
    return {name: _named(name, array) for name, array in arrays.items()}


def _read_npy(file: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        loaded = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:  # numpy's own words speak of pickles
        raise _no_array(file) from error
    if not isinstance(loaded, np.ndarray):  # a .npz file by another name
        loaded.close()
        raise _no_array(file)
    if loaded.dtype.kind == "V":
        raise BadVector(
            f"{file.name} has elements of an unknown type: .npy files forget bfloat16 and float8. Convert the array to "
            "float32 before numpy.save.",
            reason="WRONG_DTYPE",
        )
    if loaded.ndim != 2:  # noqa: PLR2004 - [count, hidden]
        return {file.stem: loaded}
    return {f"{file.stem}.{number}": row for number, row in enumerate(loaded)}


def _no_array(file: Path) -> BadVector:
    return BadVector(
        f"{file.name} is not a .npy file of numbers. Write it with numpy.save, from an array of numbers.",
        reason="INVALID_FIELD",
    )


def _read_safetensors(file: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        return read_safetensors(file)[0]
    except InvalidRequest as error:
        raise BadVector(str(error), reason=error.reason) from None


def _named(name: str, array: npt.ArrayLike) -> Vector:
    try:
        return Vector.from_array(array)
    except BadVector as error:
        raise BadVector(f"{name}: {error}", reason=error.reason) from None


def _checked(values: FloatArray) -> FloatArray:
    if values.ndim != 1 or not values.size:
        raise BadVector(
            f"A vector must have the shape [hidden], but this array has {list(values.shape)}. "
            "Take one row, or the mean over the others.",
            reason="WRONG_LENGTH",
        )
    bad = int(np.count_nonzero(~np.isfinite(values)))
    if bad:
        raise BadVector(
            f"{bad} of {values.size} elements are NaN, infinite or beyond float32. Every element must be finite.",
            reason="BAD_VALUES",
        )
    return values


def as_float32(array: npt.ArrayLike) -> FloatArray:
    """Return a copy of an array or a tensor as float32. Numbers beyond float32 become infinite.

    Raises:
        BadVector: It is not an array of real numbers.
    """
    array = without_torch(array)
    try:
        _check_real(array)
        with np.errstate(over="ignore"):  # overflow gives infinity, which _checked refuses
            return np.array(array, dtype="<f4", order="C")
    except BadVector:
        raise
    except (TypeError, ValueError) as error:
        raise BadVector(f"The vector is not an array of numbers: {error}", reason="WRONG_DTYPE") from None


def _check_real(array: npt.ArrayLike) -> None:
    if np.iscomplexobj(array):
        raise BadVector(
            "A vector must be real, but these numbers are complex. Take their real part or their absolute value.",
            reason="WRONG_DTYPE",
        )
