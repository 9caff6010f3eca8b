"""Parquet and Arrow files as inputs, also those of Hugging Face datasets on disk. Needs pyarrow (extra "parquet")."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from residuum.exceptions import InvalidRequest
from residuum.extraction.inputs.splits import files_of_folder, files_of_split
from residuum.rpc.extras import install_extra

_PIECE = 1024
"""The rows that are converted to Python values at once."""


class TableRows:
    """The rows of a table. Arrow files are mapped into memory; of Parquet files, the needed columns are loaded."""

    def __init__(self, table: Any, name: str) -> None:
        self._table = table
        self._name = name
        self._first, self._last = 0, -1
        self._piece: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, number: int) -> Mapping[str, Any]:
        """Return a row."""
        if not self._first <= number < self._first + len(self._piece):
            count = _PIECE if number == self._last + 1 else 1  # a random order would use one row of each piece
            self._first, self._piece = number, self._table.slice(number, count).to_pylist()
        self._last = number
        return self._piece[number - self._first]

    def content(self, number: int) -> Any:
        """Return a row: each can be read."""
        return self.row(number)

    def where(self, number: int) -> str:
        """Return where a row is."""
        return f"row {number} of {self._name}"

    def close(self) -> None:
        """Let go of the table."""
        self._piece = []


def open_table(path: Path, columns: Sequence[str]) -> TableRows:
    """Return the rows of a Parquet or Arrow file, of a dataset in a folder, or of a split (see `files_of_split`).

    Raises:
        InvalidRequest: It is not a table, lacks a column, or has several splits or two versions of one.
        FileNotFoundError: There is no such file, folder or split.
        ImportError: pyarrow is not installed.
    """
    files = _files(path)
    try:
        import pyarrow as pa
    except ImportError:
        raise ImportError(f"Inputs in Parquet or Arrow need the package pyarrow: {install_extra('parquet')}.") from None
    try:
        if files[0].suffix == ".parquet":
            table = _parquet(files, columns)
        else:
            table = pa.concat_tables([_arrow(file) for file in files])
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InvalidRequest(f"{path} cannot be read as a table: {error}", reason="INVALID_FIELD") from None
    _check_columns(path, table.column_names, columns)
    return TableRows(_indexed(path, table).select(list(dict.fromkeys(columns))), path.name)


def _files(path: Path) -> list[Path]:
    """Return a table's files. A folder of `datasets` lists its own in state.json."""
    if not path.is_dir():
        found = [path] if path.exists() else files_of_split(path)
        if not found:
            raise FileNotFoundError(f"The input {path} does not exist.")
        return found
    state = path / "state.json"
    if state.is_file():
        return [path / item["filename"] for item in json.loads(state.read_text())["_data_files"]]
    found = files_of_folder(path)
    if found:
        return found
    inner = sorted(item.parent.name for item in path.glob("*/state.json"))
    advice = (
        f"It has the splits {', '.join(inner)}: name one, such as {path / inner[0]}."
        if inner
        else ("Give a folder with Parquet files, or one that Dataset.save_to_disk has written.")
    )
    raise InvalidRequest(f"{path} is a folder without a table. {advice}", reason="INVALID_FIELD")


def _parquet(files: Sequence[Path], columns: Sequence[str]) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    for file in files:
        _check_columns(file, parquet.read_schema(file).names, columns)
    return pa.concat_tables([parquet.read_table(file, columns=list(dict.fromkeys(columns))) for file in files])


def _arrow(file: Path) -> Any:
    """Return a table that is mapped into memory. `datasets` writes streams, pyarrow's own files have an index."""
    import pyarrow as pa

    mapped = pa.memory_map(str(file))
    try:
        return pa.ipc.open_stream(mapped).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_file(mapped).read_all()


def _indexed(path: Path, table: Any) -> Any:
    """Return the rows that a dataset selects. After `shuffle` or `select`, it has a file with their numbers."""
    state = path / "state.json"
    files = json.loads(state.read_text()).get("_indices_files") if path.is_dir() and state.is_file() else None
    if not files:
        return table
    import pyarrow as pa

    numbers = pa.concat_tables([_arrow(path / item["filename"]) for item in files]).column(0)
    return table.take(np.asarray(numbers))


def _check_columns(path: Path, present: Sequence[str], wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in present]
    if missing:
        raise InvalidRequest(
            f"{path} has no column {missing[0]!r}. It has {', '.join(map(repr, present))}. Name the column with the "
            "prompt with column=, and those to keep with keep=.",
            reason="INVALID_FIELD",
        )
