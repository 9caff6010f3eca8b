"""numpy's `.npz` format. numpy lacks bfloat16, so rows of bfloat16 become float32."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from residuum.exports.formats import Advance
from residuum.exports.parts import Stored, portable, selections, stored

if TYPE_CHECKING:
    from residuum.values.captures.activations import Activations


_npy: Any = np.lib.format  # a public module without type stubs


def write(acts: Activations, path: Path, advance: Advance) -> None:
    """Write the same arrays as a safetensors file has, and `manifest`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _write_small(archive, "manifest", np.array(acts.manifest.to_json()))
        for selection in selections(acts):
            for item, array in selection.small_arrays().items():
                _write_small(archive, f"{selection.name}.{item}", array)
            for part in stored(selection):
                _write_stored(archive, part, advance)


def _write_small(archive: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    with archive.open(f"{name}.npy", "w") as file:
        _npy.write_array(file, array, allow_pickle=False)


def _write_stored(archive: zipfile.ZipFile, item: Stored, advance: Advance) -> None:
    dtype = portable(item.values.dtype)
    header = {"descr": _npy.dtype_to_descr(dtype), "fortran_order": False, "shape": item.values.shape}
    with archive.open(f"{item.name}.npy", "w", force_zip64=True) as file:
        _npy.write_array_header_1_0(file, header)
        for values, count in item.slices():
            file.write(values.astype(dtype, copy=False).tobytes())
            advance(count)
