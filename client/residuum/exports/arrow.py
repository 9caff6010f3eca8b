"""Captured rows as Arrow record batches: one Arrow row for each captured row. Needs pyarrow (extra "parquet").

Parquet exports and `residuum.ray` have these columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest, NoTokenTexts
from residuum.exports.parts import Selection, portable, selections, slices

if TYPE_CHECKING:
    from residuum.values.captures.activations import Activations
    from residuum.values.captures.manifest import Manifest

KEYS = ("capture_id", "sequence", "site", "layer", "position", "token_id")
"""The columns that say which row it is. Parquet files have statistics of them, by which readers skip row groups."""


def schema_of(dtype: np.dtype[Any], width: int, metadata: Mapping[str, str] | None = None) -> Any:
    """Return the schema of rows: capture_id, sequence, site, layer, position, token_id, token, activation.

    Args:
        dtype: The rows' element type. Readers without bfloat16 get float32.
        width: The elements of a row.
        metadata: The schema's metadata.
    """
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("capture_id", pa.string()),
            pa.field("sequence", pa.int32()),
            pa.field("site", pa.string()),
            pa.field("layer", pa.int32()),
            pa.field("position", pa.int32()),
            pa.field("token_id", pa.int64()),  # null if unknown
            pa.field("token", pa.string()),  # null if unknown
            pa.field("activation", pa.list_(pa.from_numpy_dtype(portable(dtype)), width)),
        ],
        metadata=metadata,
    )


def check_width(acts: Activations) -> None:
    """Check that the rows of all sites have one width.

    Raises:
        InvalidRequest: They have different ones.
    """
    widths = {site: acts.select(site=site).width for site in acts.sites}
    if len(set(widths.values())) > 1:
        found = ", ".join(f"{site} {width}" for site, width in widths.items())
        raise InvalidRequest(
            f"A table has rows of one width, and the sites have different ones: {found}. Take the sites of one width "
            "at a time; choose them with sites=.",
            reason="INVALID_FIELD",
        )


def batches_of(acts: Activations, schema: Any) -> Iterator[tuple[Any, int]]:
    """Yield the present rows in batches, by sequence, site, layer and position, each with the bytes that it is from."""
    for selection in selections(acts):
        chosen = selection.acts
        token_ids, tokens = chosen.token_ids, token_texts(acts.manifest, chosen.sequence)
        for index, layer in enumerate(chosen.layers):
            for part in slices(len(chosen.positions), acts.width * portable(acts.dtype).itemsize):
                rows, present = _rows(selection, index, part)
                positions = chosen.positions[part][present]
                batch = row_batch(
                    schema, acts.manifest.capture_id, chosen.sequence, chosen.site, layer,
                    positions, token_ids[part][present], tokens, rows,
                )  # fmt: skip
                yield batch, int(len(present) * selection.kept_bytes)


def row_batch(
    schema: Any,
    capture_id: str,
    sequence: int,
    site: str,
    layer: int,
    positions: npt.NDArray[np.int64],
    token_ids: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.object_],
    rows: npt.NDArray[Any],
) -> Any:
    """Return rows of one layer as a batch.

    Args:
        schema: What `schema_of` returns.
        capture_id: The capture.
        sequence: The sequence.
        site: The site.
        layer: The layer.
        positions: The position of each row; [rows].
        token_ids: The token ID of each row, -1 if unknown; [rows].
        tokens: What `token_texts` returns.
        rows: The rows; [rows, width].
    """
    import pyarrow as pa

    count, unknown = len(rows), token_ids < 0
    texts = np.full(count, None, dtype=np.object_)
    has_text = positions < len(tokens)
    texts[has_text] = tokens[positions[has_text]]
    flat = np.ascontiguousarray(rows, portable(rows.dtype)).reshape(-1)
    columns = {
        "capture_id": [capture_id] * count,
        "sequence": np.full(count, sequence, np.int32),
        "site": [site] * count,
        "layer": np.full(count, layer, np.int32),
        "position": positions.astype(np.int32),
        "token_id": pa.array(token_ids, mask=unknown),
        "token": pa.array(texts, type=pa.string(), mask=unknown),
        "activation": pa.FixedSizeListArray.from_arrays(pa.array(flat), rows.shape[1]),
    }
    return pa.record_batch([_column(columns[name], schema.field(name)) for name in columns], schema=schema)


def token_texts(manifest: Manifest, sequence: int) -> npt.NDArray[np.object_]:
    """Return the text of the token at each position of a sequence; nothing if the texts are not known."""
    try:
        return np.array(manifest.tokens(sequence), dtype=np.object_)
    except NoTokenTexts:
        return np.empty(0, dtype=np.object_)


def _rows(selection: Selection, index: int, part: slice) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return the present rows of a layer at a slice of positions, and which are present."""
    present = selection.block.present[index, part]
    rows = selection.rows(index, part)
    return (rows if present.all() else rows[present]), present


def _column(values: Any, field: Any) -> Any:
    import pyarrow as pa

    return values if isinstance(values, pa.Array) else pa.array(values, type=field.type)
