"""Reads a state dict from a file that torch.save wrote, without torch and without running code of the file."""

from __future__ import annotations

import collections
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest

_STORAGES = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}
"""The element types of the storages that may occur."""

_PICKLE = "data.pkl"
"""The part of the file that describes its tensors."""


class _Storage(NamedTuple):
    """A class of torch's storages; the file names it for each tensor."""

    dtype: np.dtype[Any]


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, npt.NDArray[Any]]:
    """Read the floating-point tensors of a state dict.

    Raises:
        FileNotFoundError: The file does not exist.
        InvalidRequest: It is not such a file, or holds anything else than a state dict.
    """
    try:
        with zipfile.ZipFile(Path(path)) as file:
            found = _load(file)
    except FileNotFoundError:
        raise
    except zipfile.BadZipFile:
        raise _refusal(path, "it is not a zip file, which torch.save writes since torch 1.6") from None
    except Exception as error:  # noqa: BLE001 - a broken pickle may raise anything
        raise _refusal(path, f"{error}") from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(array, np.ndarray) for name, array in found.items()
    ):
        raise _refusal(path, "it holds no state dict")
    return dict(found)


def _load(file: zipfile.ZipFile) -> Any:
    names = file.namelist()
    pickles = [name for name in names if name.rpartition("/")[2] == _PICKLE]
    if len(pickles) != 1:
        raise pickle.UnpicklingError(f"it has no {_PICKLE}")
    root = pickles[0].removesuffix(_PICKLE)
    if f"{root}byteorder" in names and file.read(f"{root}byteorder") != b"little":
        raise pickle.UnpicklingError("it was written on a big-endian machine")
    with file.open(pickles[0]) as data:
        return _Unpickler(data, file, root).load()


class _Unpickler(pickle.Unpickler):
    """Builds numpy arrays. It knows the few names that a state dict needs, and refuses all others."""

    def __init__(self, data: Any, file: zipfile.ZipFile, root: str) -> None:
        super().__init__(data)
        self._file = file
        self._root = root

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
        }
        if module == "torch" and name in _STORAGES:
            return _Storage(_STORAGES[name])
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a state dict of floats")
        return known[module, name]

    def persistent_load(self, pid: Any) -> npt.NDArray[Any]:
        kind, storage, key, *_ = pid
        if kind != "storage" or not isinstance(storage, _Storage) or not str(key).isalnum():
            raise pickle.UnpicklingError("it names a storage of another kind")
        return np.frombuffer(self._file.read(f"{self._root}data/{key}"), storage.dtype)


def _rebuilt(storage: npt.NDArray[Any], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Any:
    """Return the array of a tensor: a view of its storage."""
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if min(offset, *stride, *size, 0) < 0 or (0 not in size and last >= len(storage)):
        raise pickle.UnpicklingError("a tensor is larger than its storage")
    if 0 in size:
        return np.empty(size, storage.dtype)
    steps = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps, writeable=False)


def _refusal(path: str | os.PathLike[str], why: str) -> InvalidRequest:
    return InvalidRequest(f"{os.fspath(path)} cannot be read: {why}.", reason="INVALID_FIELD")
