"""Cutting rows out of a frame."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from residuum.v1 import capture_pb2
from residuum.wire.dtypes import item_bytes
from residuum.wire.frames import ChunkView, checksum, chunk_prefix
from store_svc.ledger import Cells
from store_svc.positions import Positions


def cells_of(header: capture_pb2.ChunkHeader) -> Cells:
    """Return the cells of a chunk."""
    return Cells(header.sequence, header.site, tuple(header.layers), Positions.of(list(header.positions)))


def slice_chunk(view: ChunkView, layers: Sequence[int], positions: Sequence[int]) -> bytes:
    """Return a Chunk with only some of the rows of another.

    Args:
        view: The chunk to cut from; it must have been verified, for the slice gets a checksum of its own.
        layers: The indices of the wanted layers in the chunk's list of layers, ascending.
        positions: The indices of the wanted positions in its list of positions, ascending.
    """
    header = capture_pb2.ChunkHeader()
    header.CopyFrom(view.header)
    del header.layers[:]
    del header.positions[:]
    header.layers.extend(view.header.layers[at] for at in layers)
    header.positions.extend(view.header.positions[at] for at in positions)
    row_bytes = view.header.width * item_bytes(view.header.dtype)
    rows = np.frombuffer(view.payload, dtype=np.uint8).reshape(
        len(view.header.layers), len(view.header.positions), row_bytes
    )
    payload = rows[np.ix_(layers, positions)].tobytes()
    return chunk_prefix(header, checksum(payload), len(payload)) + payload
