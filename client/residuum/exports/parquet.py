"""Parquet, laid out as in Hugging Face datasets: one file row for each captured row.

Rows are ordered by sequence, site, layer and position, so that a reader of one layer can skip the others by the row
groups' statistics. Missing rows are left out of the file; the manifest in its metadata lists them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest, NoTokenTexts
from residuum.exports.formats import Advance
from residuum.exports.parts import Selection, portable, selections, slices
from residuum.exports.safetensors import FORMAT

if TYPE_CHECKING:
    from residuum.values.activations import Activations

_KEYS = ("capture_id", "sequence", "site", "layer", "position", "token_id")
"""The columns with statistics, by which readers skip row groups."""


def write(acts: Activations, path: Path, advance: Advance) -> None:
    """Write the columns capture_id, sequence, site, layer, position, token_id, token and activation."""
    import pyarrow as pa
    from pyarrow import parquet

    widths = {site: acts.select(site=site).width for site in acts.sites}
    if len(set(widths.values())) > 1:
        found = ", ".join(f"{site} {width}" for site, width in widths.items())
        raise InvalidRequest(
            f"A Parquet file has rows of one width, and the sites have different ones: {found}. Export the sites of "
            "one width at a time; choose them with sites=.",
            reason="INVALID_FIELD",
        )
    dtype = portable(acts.dtype)
    schema = pa.schema(
        [
            pa.field("capture_id", pa.string()),
            pa.field("sequence", pa.int32()),
            pa.field("site", pa.string()),
            pa.field("layer", pa.int32()),
            pa.field("position", pa.int32()),
            pa.field("token_id", pa.int64()),  # null if unknown
            pa.field("token", pa.string()),  # null if unknown
            pa.field("activation", pa.list_(pa.from_numpy_dtype(dtype), acts.width)),
        ],
        metadata={"residuum.format": FORMAT, "residuum.manifest": acts.manifest.to_json()},
    )
    with parquet.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=["capture_id", "site", "token"],
        write_statistics=list(_KEYS),
        # Byte-stream split stores each byte of an element in its own stream. Signs and exponents are similar, so they
        # compress well; former bfloat16 elements have two streams of zeros, which take almost no space.
        use_byte_stream_split=["activation.list.element"],
    ) as file:
        for selection in selections(acts):
            token_ids, tokens = selection.acts.token_ids, _tokens(selection.acts)
            for index in range(len(selection.acts.layers)):
                for part in slices(len(tokens), acts.width * dtype.itemsize):
                    batch = _batch(selection, index, part, token_ids[part], tokens[part], schema)
                    if batch.num_rows:
                        file.write_batch(batch)
                    advance(int(len(tokens[part]) * selection.kept_bytes))


def _tokens(acts: Activations) -> npt.NDArray[np.object_]:
    """Return the text of each position's token; None if they are not known."""
    try:
        return np.array(acts.tokens, dtype=np.object_)
    except NoTokenTexts:
        return np.full(len(acts.positions), None, dtype=np.object_)


def _batch(
    selection: Selection,
    index: int,
    part: slice,
    token_ids: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.object_],
    schema: Any,
) -> Any:
    import pyarrow as pa

    acts, present = selection.acts, selection.block.present[index, part]
    rows = selection.rows(index, part)
    if not present.all():
        rows = rows[present]
    count, token_ids = len(rows), token_ids[present]
    columns = {
        "capture_id": [acts.manifest.capture_id] * count,
        "sequence": np.full(count, acts.sequence, np.int32),
        "site": [acts.site] * count,
        "layer": np.full(count, acts.layers[index], np.int32),
        "position": acts.positions[part][present].astype(np.int32),
        "token_id": pa.array(token_ids, mask=token_ids < 0),
        "token": pa.array(tokens[present], type=pa.string(), mask=token_ids < 0),
        "activation": pa.FixedSizeListArray.from_arrays(
            pa.array(rows.astype(portable(rows.dtype), copy=False).reshape(-1)), acts.width
        ),
    }
    return pa.record_batch([_column(columns[field.name], field) for field in schema], schema=schema)


def _column(values: Any, field: Any) -> Any:
    import pyarrow as pa

    return values if isinstance(values, pa.Array) else pa.array(values, type=field.type)
