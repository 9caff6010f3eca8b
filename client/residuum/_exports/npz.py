"""numpy's own `.npz`, for numpy alone: rows of bfloat16, which it does not know, become float32."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from residuum._exports.formats import Advance
from residuum._exports.parts import portable, selections, slices, small_arrays

if TYPE_CHECKING:
    from residuum.activations import Activations


_npy: Any = np.lib.format  # public, and without types


def write(acts: Activations, path: Path, advance: Advance) -> None:
    """Write `SITE.LAYER` [positions, hidden], `SITE.positions`, `SITE.token_ids`, `SITE.present` and `manifest`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _write_small(archive, "manifest", np.array(acts.manifest.to_json()))
        for name, selected in selections(acts):
            for item, array in small_arrays(selected).items():
                _write_small(archive, f"{name}.{item}", array)
            for layer in selected.layers:
                _write_rows(archive, f"{name}.{layer}", selected.raw(layer), advance)


def _write_small(archive: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    with archive.open(f"{name}.npy", "w") as file:
        _npy.write_array(file, array, allow_pickle=False)


def _write_rows(archive: zipfile.ZipFile, name: str, rows: npt.NDArray[Any], advance: Advance) -> None:
    dtype = portable(rows.dtype)
    header = {"descr": _npy.dtype_to_descr(dtype), "fortran_order": False, "shape": rows.shape}
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        _npy.write_array_header_1_0(file, header)
        for part in slices(len(rows), rows.shape[1] * dtype.itemsize):
            file.write(rows[part].astype(dtype, copy=False).tobytes())
            advance(rows[part].nbytes)
