"""Writes an extraction as an Arrow table: a Hugging Face dataset on disk, or Parquet files. Needs pyarrow.

If the job was packed, the table has one row for each window, in the layout of SAELens' cached activations: a column
[context, width] for each point. Otherwise it has one row for each token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.exports.parts import portable
from residuum.values.selections.points import transformer_lens_name

if TYPE_CHECKING:
    from residuum.extraction.results.reader import Extracted

_PIECE_BYTES = 32 << 20
"""The approximate rows that are in memory at once."""
_FILE_BYTES = 1 << 30
"""The approximate size of a file."""
_JSON = "utf8"
"""The type of a text that is JSON, by another name than that of a plain text."""
_NUMBERS = {"token_ids": "int32", "positions": "int32", "documents": "int64"}
FIXED_COLUMNS = frozenset({*_NUMBERS, "prompt"})
"""The names of columns that a table has beside its points and the kept columns."""


def write_datasets(rows: Extracted, folder: Path) -> None:
    """Write what `datasets.load_from_disk` reads."""
    folder.mkdir()
    table = Table(rows)
    _write_state(table, folder, _write_files(table, folder, "arrow"))


def write_parquet(rows: Extracted, folder: Path) -> None:
    """Write Parquet files.

    Raises:
        InvalidRequest: A kept column has the name of another column.
    """
    folder.mkdir()
    _write_files(Table(rows), folder, "parquet")


def column_exists(name: str) -> InvalidRequest:
    """Return the error of a kept column that has the name of another column."""
    return InvalidRequest(
        f"The kept column {name!r} has the name of another column of the table. Rename it in the input.",
        reason="INVALID_FIELD",
    )


@dataclass(frozen=True)
class Layout:
    """What decides the columns of a table. All its parts have the same."""

    context: int | None
    """The rows of each window; None if the table has a row for each token."""
    label_types: Mapping[str, str]
    """The type of each kept column."""
    has_sequences: bool = False
    """Whether a prompt has more than one reply."""

    @property
    def numbers(self) -> Mapping[str, str]:
        """The columns that say which row it is, and their types."""
        return {**_NUMBERS, **({"sequences": "int32"} if self.has_sequences else {})}

    @classmethod
    def of(cls, rows: Extracted) -> Layout:
        """Return the layout of an extraction."""
        counts = {line["rows"] for line in rows.prompts if line["rows"]}
        has_one_sequence = not any(rows.shard(number).sequences.any() for number in range(rows.num_shards))
        is_even = len(counts) == 1 and has_one_sequence  # replies have many lengths
        types = {name: _label_type(rows.document_labels(name)) for name in rows.spec["keep"]}
        return cls(counts.pop() if rows.spec.get("pack") and is_even else None, types, not has_one_sequence)


class Table:
    """The columns of an extraction, a piece at a time."""

    def __init__(self, rows: Extracted, layout: Layout | None = None) -> None:
        self.rows = rows
        self.layout = layout or Layout.of(rows)
        self.context = self.layout.context
        self.points = {transformer_lens_name(point): point for point in rows.points}
        self.features: dict[str, Any] = {}
        self.fields: list[Any] = []
        self._describe()

    def __len__(self) -> int:
        return len(self.rows) // (self.context or 1)

    @property
    def row_bytes(self) -> int:
        """The bytes of the activations of a row of the table."""
        kinds = [self.rows.at(point) for point in self.points.values()]
        return (self.context or 1) * sum(kind.shape[1] * portable(kind.dtype).itemsize for kind in kinds)

    def _describe(self) -> None:
        import pyarrow as pa

        for name, point in self.points.items():
            values = self.rows.at(point)
            dtype = portable(values.dtype).name
            kind = pa.from_numpy_dtype(dtype)
            if self.context is None:
                self._add(name, pa.list_(kind, values.shape[1]), _sequence(dtype, values.shape[1]))
                continue
            shape = [self.context, values.shape[1]]
            of_datasets = {
                "ARROW:extension:name": "datasets.features.features.Array2DExtensionType",
                "ARROW:extension:metadata": json.dumps([shape, dtype]),
            }
            feature = {"shape": shape, "dtype": dtype, "_type": "Array2D"}
            self._add(name, pa.list_(pa.list_(kind)), feature, of_datasets)
        for name, dtype in self.layout.numbers.items():
            self._add_by_token(name, dtype, pa.from_numpy_dtype(dtype))
        self._add("prompt", pa.int64(), {"dtype": "int64", "_type": "Value"})
        for name, dtype in self.layout.label_types.items():
            self._add_by_token(name, "string" if dtype == _JSON else dtype, pa.type_for_alias(dtype))

    def _add_by_token(self, name: str, dtype: str, kind: Any) -> None:
        import pyarrow as pa

        if self.context is None:
            self._add(name, kind, {"dtype": dtype, "_type": "Value"})
        else:
            self._add(name, pa.list_(kind, self.context), _sequence(dtype, self.context))

    def _add(self, name: str, kind: Any, feature: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
        import pyarrow as pa

        if name in self.features:
            raise column_exists(name)
        self.features[name] = dict(feature)
        self.fields.append(pa.field(name, kind, metadata=metadata))

    def schema(self) -> Any:
        """Return the schema, with the features that `datasets` reads."""
        import pyarrow as pa

        return pa.schema(self.fields, metadata={"huggingface": json.dumps({"info": {"features": self.features}})})

    def batches(self, shards: Iterable[int] | None = None) -> Iterator[Any]:
        """Yield the table, or the part of some shards, in pieces. Windows are never in two shards."""
        step = max(1, _PIECE_BYTES // self.row_bytes)
        for number in range(self.rows.num_shards) if shards is None else shards:
            part = self.rows.shard(number)
            labels = {name: _with_type(part.labels(name), dtype) for name, dtype in self.layout.label_types.items()}
            for first in range(0, len(part) // (self.context or 1), step):
                yield self._batch(part, labels, first, first + step)

    def _batch(self, rows: Extracted, labels: Mapping[str, list[Any]], first: int, last: int) -> Any:
        import pyarrow as pa

        context = self.context or 1
        part = slice(first * context, last * context)
        columns: list[Any] = []
        for point in self.points.values():
            values = rows.at(point)
            columns.append(self._nested(np.ascontiguousarray(values[part], portable(values.dtype))))
        for name, dtype in self.layout.numbers.items():
            columns.append(self._by_token(pa.array(getattr(rows, name)[part].astype(dtype))))
        columns.append(pa.array(rows.prompt[part][::context]))
        for name, dtype in self.layout.label_types.items():
            columns.append(self._by_token(pa.array(labels[name][part], pa.type_for_alias(dtype))))
        return pa.record_batch(columns, schema=self.schema())

    def _nested(self, values: npt.NDArray[Any]) -> Any:
        import pyarrow as pa

        flat, width = pa.array(values.reshape(-1)), values.shape[1]
        if self.context is None:
            return pa.FixedSizeListArray.from_arrays(flat, width)
        starts = pa.array(np.arange(len(values) + 1, dtype=np.int32) * np.int32(width))
        windows = pa.array(np.arange(0, len(values) + 1, self.context, dtype=np.int32))
        return pa.ListArray.from_arrays(windows, pa.ListArray.from_arrays(starts, flat))

    def _by_token(self, values: Any) -> Any:
        import pyarrow as pa

        return values if self.context is None else pa.FixedSizeListArray.from_arrays(values, self.context)


def _write_files(table: Table, folder: Path, suffix: str) -> list[str]:
    """Write the files of a table, and return their names."""
    import pyarrow as pa
    from pyarrow import parquet

    names: list[str] = []
    writer, size = None, 0
    schema = table.schema()
    for batch in table.batches():
        if writer is None or size >= _FILE_BYTES:
            if writer is not None:
                writer.close()
            names.append(f"data-{len(names):05}.{suffix}")
            file, size = str(folder / names[-1]), 0
            writer = pa.ipc.new_stream(file, schema) if suffix == "arrow" else parquet.ParquetWriter(file, schema)
        writer.write_batch(batch)
        size += batch.nbytes
    if writer is not None:
        writer.close()
    return names


def _write_state(table: Table, folder: Path, files: list[str]) -> None:
    """Write the two documents by which `datasets.load_from_disk` finds the files."""
    info = {"features": table.features, "description": "", "citation": "", "homepage": "", "license": ""}
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=1))
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": table.rows.fingerprint,
        "_format_columns": None, "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False,
        "_split": None,
    }  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state, indent=1))


def _sequence(dtype: str, length: int) -> dict[str, Any]:
    return {"feature": {"dtype": dtype, "_type": "Value"}, "length": length, "_type": "Sequence"}


def _label_type(values: Sequence[Any]) -> str:
    """Return the type of a label. Values of different kinds, nested ones, and what Arrow cannot hold become JSON."""
    kinds = {type(value) for value in values if value is not None}
    for kind, dtype in ((bool, "bool"), (int, "int64"), (float, "float64"), (str, "string")):
        if kinds <= {kind} or (kind is float and kinds <= {int, float}):
            return dtype if _holds(dtype, values) else _JSON
    return _JSON


def _holds(dtype: str, values: Sequence[Any]) -> bool:
    """Tell whether a type holds values of its kind: not large numbers, nor half of a character."""
    import pyarrow as pa

    try:
        pa.array(values, pa.type_for_alias(dtype))
    except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError):
        return False
    return True


def _with_type(values: list[Any], dtype: str) -> list[Any]:
    if dtype != _JSON:
        return values
    return [value if value is None else json.dumps(value) for value in values]
