"""Cuts rows out of a frame."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from residuum.v1 import capture_pb2
from residuum.wire.frames import ChunkView, checksum, chunk_prefix
from store_svc.captures.ledger import Cells
from store_svc.captures.positions import Positions


def cells_of(header: capture_pb2.ChunkHeader) -> Cells:
    """Return the cells of a chunk."""
    return Cells(header.sequence, header.site, tuple(header.layers), Positions.of(list(header.positions)))


def slice_chunk(view: ChunkView, layers: Sequence[int], positions: Sequence[int]) -> bytes:
    """Return a serialised Chunk with some of another chunk's rows, in the same encoding.

    Args:
        view: The chunk to cut from. The caller must have verified it, because the slice gets a new checksum.
        layers: Indices of the wanted layers in the chunk's list of layers, ascending.
        positions: Indices of the wanted positions in the chunk's list of positions, ascending.
    """
    header = capture_pb2.ChunkHeader()
    header.CopyFrom(view.header)
    del header.layers[:]
    del header.positions[:]
    header.layers.extend(view.header.layers[at] for at in layers)
    header.positions.extend(view.header.positions[at] for at in positions)
    payload = _cut(view, layers, positions)
    return chunk_prefix(header, checksum(payload), len(payload)) + payload


def _cut(view: ChunkView, layers: Sequence[int], positions: Sequence[int]) -> bytes:
    """Return the payload of a slice. Each kept layer keeps the prefix before its rows."""
    form, shape = view.format, (len(view.header.layers), len(view.header.positions))
    data = np.frombuffer(view.payload, dtype=np.uint8).reshape(shape[0], -1)
    rows = data[:, form.prefix_bytes :].reshape(*shape, form.row_bytes)
    if not form.prefix_bytes:
        return rows[np.ix_(layers, positions)].tobytes()
    cut = np.empty((len(layers), form.prefix_bytes + len(positions) * form.row_bytes), dtype=np.uint8)
    cut[:, : form.prefix_bytes] = data[layers, : form.prefix_bytes]
    cut[:, form.prefix_bytes :] = rows[np.ix_(layers, positions)].reshape(len(layers), -1)
    return cut.tobytes()
