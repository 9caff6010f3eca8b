"""Zarr format 3: an array [layers, positions, width] for each sequence and site, in chunks of one block's positions.

Chunks are grouped into shards. So a capture takes only a few files, and a reader of some positions of one layer fetches
just their chunks. Codecs and dtypes are those of the core specification. It lacks bfloat16, so bfloat16 becomes
float32, whose lower half is zeros that compress away.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residuum.exports.formats import Advance
from residuum.exports.parts import Selection, portable, selections, slices
from residuum.exports.writers.safetensors import FORMAT

if TYPE_CHECKING:
    from residuum.values.captures.activations import Activations

CHUNK_POSITIONS = 32
"""Positions in a Zarr chunk: as many as a block has."""


def write(acts: Activations, path: Path, advance: Advance) -> None:
    """Write a group with a group `SITE` or `sequenceN/SITE` for each sequence and site."""
    import zarr

    manifest: Any = json.loads(acts.manifest.to_json())
    root = zarr.open_group(str(path), mode="w", zarr_format=3, attributes={"format": FORMAT, "manifest": manifest})
    for selection in selections(acts):
        layers = list(selection.acts.layers)
        attributes = {"layers": layers, "encoding": acts.encoding, "dtype": acts.manifest.dtype}
        group = root.create_group(selection.name, attributes=attributes)
        for item, array in selection.small_arrays().items():
            dimensions = ("layer", "position") if item == "present" else ("position",)
            group.create_array(item, data=array, dimension_names=dimensions)
        _write_rows(group, selection, advance)


def _write_rows(group: Any, selection: Selection, advance: Advance) -> None:
    from zarr.codecs import BloscCodec

    layers, count = selection.block.present.shape
    dtype, width = portable(selection.block.dtype), selection.block.width
    shard = _shard_positions(count, width * dtype.itemsize)
    array = group.create_array(
        "activations",
        shape=(layers, count, width),
        dtype=dtype,
        chunks=(1, CHUNK_POSITIONS, width),
        shards=(1, shard, width),
        compressors=BloscCodec(cname="lz4", clevel=5, shuffle="shuffle", typesize=dtype.itemsize),
        fill_value=float("nan"),
        dimension_names=("layer", "position", "width"),
    )
    for index in range(layers):
        for start in range(0, count, shard):  # write whole shards: zarr rewrites a shard to add to it
            part = slice(start, min(start + shard, count))
            array[index, part] = selection.rows(index, part).astype(dtype, copy=False)
            advance(int((part.stop - start) * selection.kept_bytes))


def _shard_positions(count: int, row_bytes: int) -> int:
    """Return a shard's number of positions: about SLICE_BYTES or all of `count`, rounded up to whole chunks."""
    first: int = next(slices(max(count, 1), row_bytes, multiple=CHUNK_POSITIONS)).stop
    return -(-first // CHUNK_POSITIONS) * CHUNK_POSITIONS
