"""Exports of an extraction, from the arguments to the folder."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from residuum.exceptions import InvalidRequest
from residuum.exports.target import workplace
from residuum.extraction.results.tables_out import FIXED_COLUMNS, column_exists
from residuum.rpc.extras import install_extra

if TYPE_CHECKING:
    from residuum.extraction.results.reader import Extracted

RowsFormat = Literal["datasets", "parquet", "zarr", "tar"]


@dataclass(frozen=True)
class _Format:
    module: str
    """The module with its function."""
    write: str
    """The function, which writes a new folder."""
    package: str | None = None
    """The package that it needs."""
    extra: str = ""
    """The extra that installs the package."""


FORMATS: dict[RowsFormat, _Format] = {
    "datasets": _Format("tables_out", "write_datasets", "pyarrow", "parquet"),
    "parquet": _Format("tables_out", "write_parquet", "pyarrow", "parquet"),
    "zarr": _Format("tensors_out", "write_zarr", "zarr", "zarr"),
    "tar": _Format("tensors_out", "write_tar"),
}
"""The formats by name."""


def check_export(folder: str | os.PathLike[str], name: RowsFormat, columns: Iterable[str]) -> Path:
    """Check what is known before there are rows, so that a long job does not fail at its end. Return the folder.

    Args:
        folder: The folder to write.
        name: The format.
        columns: The names of the kept columns.

    Raises:
        FileExistsError: The folder exists.
        InvalidRequest: There is no such format, or a kept column has the name of a column that every table has.
        ImportError: A package is not installed.
    """
    if name not in FORMATS:
        raise InvalidRequest(f"format={name!r} does not exist. Choose among {', '.join(FORMATS)}.")
    chosen = FORMATS[name]
    if chosen.package is not None:
        try:
            importlib.import_module(chosen.package)
        except ImportError:
            raise ImportError(
                f"Exports to {name} need the package {chosen.package}: {install_extra(chosen.extra)}."
            ) from None
    target = Path(folder)
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists already. Delete it, or choose another folder.")
    taken = sorted(FIXED_COLUMNS.intersection(columns))
    if taken and chosen.module == "tables_out":
        raise column_exists(taken[0])
    return target


def export_rows(rows: Extracted, folder: str | os.PathLike[str], name: RowsFormat, *, allow_partial: bool) -> Path:
    """Write a folder; see `Extracted.export`."""
    target = check_export(folder, name, rows.spec["keep"])
    rows.check_complete(allow_partial=allow_partial)
    if not len(rows):
        raise InvalidRequest(f"{rows.folder} has no rows to export.", reason="INVALID_FIELD")
    chosen = FORMATS[name]
    write: Callable[[Extracted, Path], None] = getattr(
        importlib.import_module(f"residuum.extraction.results.{chosen.module}"), chosen.write
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    with workplace(target, overwrite=False) as place:
        write(rows, place.result)
    return target
