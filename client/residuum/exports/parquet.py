"""Parquet, as Hugging Face's datasets have it: a row of the file for each captured row.

Ordered by sequence, site, layer and position, so that the statistics of row groups let a reader of one layer skip the
others. Rows that are missing are not in the file; its metadata has the manifest, which tells which.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from residuum.exports.formats import Advance
from residuum.exports.parts import Selection, portable, selections, slices
from residuum.exports.safetensors import FORMAT

if TYPE_CHECKING:
    from residuum.values.activations import Activations

_KEYS = ("capture_id", "sequence", "site", "layer", "position", "token_id")


def write(acts: Activations, path: Path, advance: Advance) -> None:
    """Write the columns capture_id, sequence, site, layer, position, token_id and activation."""
    import pyarrow as pa
    from pyarrow import parquet

    dtype = portable(acts.dtype)
    schema = pa.schema(
        [
            pa.field("capture_id", pa.string()),
            pa.field("sequence", pa.int32()),
            pa.field("site", pa.string()),
            pa.field("layer", pa.int32()),
            pa.field("position", pa.int32()),
            pa.field("token_id", pa.int64()),  # null where it is not known
            pa.field("activation", pa.list_(pa.from_numpy_dtype(dtype), acts.width)),
        ],
        metadata={"residuum.format": FORMAT, "residuum.manifest": acts.manifest.to_json()},
    )
    with parquet.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=["capture_id", "site"],
        write_statistics=list(_KEYS),
        # Each of an element's bytes in a stream of its own: signs and exponents are alike, and what was bfloat16 has
        # two streams of zeros, which take no room.
        use_byte_stream_split=["activation.list.element"],
    ) as file:
        for selection in selections(acts):
            tokens = selection.acts.token_ids
            for index in range(len(acts.layers)):
                for part in slices(len(tokens), acts.width * dtype.itemsize):
                    batch = _batch(selection, index, part, tokens[part], schema)
                    if batch.num_rows:
                        file.write_batch(batch)
                    advance(int(len(tokens[part]) * selection.kept_bytes))


def _batch(selection: Selection, index: int, part: slice, token_ids: npt.NDArray[np.int64], schema: Any) -> Any:
    import pyarrow as pa

    acts, there = selection.acts, selection.block.present[index, part]
    rows = selection.rows(index, part)
    if not there.all():
        rows = rows[there]
    count, tokens = len(rows), token_ids[there]
    columns = {
        "capture_id": [acts.manifest.capture_id] * count,
        "sequence": np.full(count, acts.sequence, np.int32),
        "site": [acts.site] * count,
        "layer": np.full(count, acts.layers[index], np.int32),
        "position": acts.positions[part][there].astype(np.int32),
        "token_id": pa.array(tokens, mask=tokens < 0),
        "activation": pa.FixedSizeListArray.from_arrays(
            pa.array(rows.astype(portable(rows.dtype), copy=False).reshape(-1)), acts.width
        ),
    }
    return pa.record_batch([_column(columns[field.name], field) for field in schema], schema=schema)


def _column(values: Any, field: Any) -> Any:
    import pyarrow as pa

    return values if isinstance(values, pa.Array) else pa.array(values, type=field.type)
