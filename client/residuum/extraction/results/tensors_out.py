"""Writes an extraction as a Zarr group, or as tar files of samples as WebDataset reads them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from residuum.exports.parts import portable

if TYPE_CHECKING:
    from residuum.extraction.results.reader import Extracted

_CHUNK_ROWS = 1024
"""Rows in a chunk of Zarr. A shard, which is one file, has many chunks."""

_SHARD_ROWS = 64 * _CHUNK_ROWS

_TAR_BYTES = 1 << 30
"""The approximate size of a tar file."""

_COLUMNS = {"token_ids": np.int32, "positions": np.int32, "sequences": np.int32, "prompt": np.int64}
"""The columns that say which row it is, and their types."""


def write_zarr(rows: Extracted, folder: Path) -> None:
    """Write a group with an array [rows, width] for each point, and an array [rows] for each column.

    The group's attribute `spec` has the job. The file prompts.jsonl has the prompts with their labels; `prompt` is the
    number of a line. bfloat16 becomes float32.
    """
    import zarr

    root: Any = zarr.open_group(str(folder), mode="w", zarr_format=3, attributes={"spec": dict(rows.spec)})
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in rows.prompts)
    for name, dtype in _COLUMNS.items():
        root.create_array(name, data=getattr(rows, name).astype(dtype), dimension_names=("row",))
    for point in rows.points:
        values = rows.at(point)
        array = root.create_array(
            point, shape=values.shape, dtype=portable(values.dtype), chunks=(_CHUNK_ROWS, values.shape[1]),
            shards=(_SHARD_ROWS, values.shape[1]), dimension_names=("row", "width"),
        )  # fmt: skip
        for first in range(0, len(values), _SHARD_ROWS):  # whole shards: zarr rewrites a shard to add to it
            part = slice(first, min(first + _SHARD_ROWS, len(values)))
            array[part] = values[part].astype(portable(values.dtype), copy=False)


def write_tar(rows: Extracted, folder: Path) -> None:
    """Write tar files with a sample for each prompt that has rows.

    A sample is KEY.POINT.npy for each point, KEY.token_ids.npy and the other columns, and KEY.json with the prompt's
    line. KEY is the prompt's place in the job, with nine digits. bfloat16 becomes float32.
    """
    folder.mkdir()
    archive: tarfile.TarFile | None = None
    number = 0
    try:
        for shard in map(rows.shard, range(rows.num_shards)):
            columns = {name: getattr(shard, name) for name in _COLUMNS if name != "prompt"}
            first = 0
            for line in shard.prompts:
                part = slice(first, first + line["rows"])
                first = part.stop
                if not line["rows"]:
                    continue
                if archive is None or archive.offset >= _TAR_BYTES:
                    if archive is not None:
                        archive.close()
                    archive = tarfile.open(folder / f"data-{number:05}.tar", "w")  # noqa: SIM115 - several, in turn
                    number += 1
                _add_sample(archive, shard, line, part, columns)
    finally:
        if archive is not None:
            archive.close()


def _add_sample(
    archive: tarfile.TarFile,
    shard: Extracted,
    line: Mapping[str, Any],
    part: slice,
    columns: Mapping[str, npt.NDArray[Any]],
) -> None:
    key = f"{line['index']:09}"
    for point in shard.points:
        values = shard.at(point)
        _add(archive, f"{key}.{point}.npy", _npy(values[part].astype(portable(values.dtype), copy=False)))
    for name, column in columns.items():
        _add(archive, f"{key}.{name}.npy", _npy(column[part].astype(_COLUMNS[name])))
    _add(archive, f"{key}.json", json.dumps(line, default=str).encode())


def _npy(values: npt.NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return file.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
