"""Parquet, laid out as in Hugging Face datasets: one file row for each captured row.

Rows are ordered by sequence, site, layer and position, so that a reader of one layer can skip the others by the row
groups' statistics. Missing rows are left out of the file; the manifest in its metadata lists them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from residuum.exports.arrow import KEYS, batches_of, check_width, schema_of
from residuum.exports.formats import Advance
from residuum.exports.parts import portable
from residuum.exports.writers.safetensors import FORMAT

if TYPE_CHECKING:
    from residuum.values.captures.activations import Activations


def write(acts: Activations, path: Path, advance: Advance) -> None:
    """Write the columns capture_id, sequence, site, layer, position, token_id, token and activation."""
    from pyarrow import parquet

    check_width(acts)
    metadata = {"residuum.format": FORMAT, "residuum.manifest": acts.manifest.to_json()}
    schema = schema_of(acts.dtype, acts.width, metadata)
    with parquet.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=["capture_id", "site", "token"],
        write_statistics=list(KEYS),
        # Byte-stream split stores each byte of an element in its own stream. Signs and exponents are similar, so they
        # compress well; former bfloat16 elements have two streams of zeros, which take almost no space. Not of float16:
        # some readers, such as DuckDB, cannot read these.
        use_byte_stream_split=["activation.list.element"] if portable(acts.dtype) == np.float32 else False,
    ) as file:
        for batch, num_bytes in batches_of(acts, schema):
            if batch.num_rows:
                file.write_batch(batch)
            advance(num_bytes)
