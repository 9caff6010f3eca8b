"""Reads safetensors files."""

from __future__ import annotations

import os
from typing import Any

import numpy.typing as npt

from residuum.exceptions import InvalidRequest

Arrays = dict[str, npt.NDArray[Any]]


def read_safetensors(path: str | os.PathLike[str]) -> tuple[Arrays, dict[str, str]]:
    """Read a file's arrays and its metadata.

    Raises:
        FileNotFoundError: The file does not exist.
        InvalidRequest: It is not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return arrays, file.metadata() or {}
    except SafetensorError as error:
        raise InvalidRequest(f"{path} is not a safetensors file: {error}", reason="INVALID_FIELD") from None
    except AttributeError:  # safetensors looks for numpy's type of this name
        raise InvalidRequest(
            f"{path} has tensors of float8 or another type that numpy lacks. Convert them to float32.",
            reason="WRONG_DTYPE",
        ) from None
