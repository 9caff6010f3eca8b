"""Cuts rows out of a frame."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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
    payload = np.empty(view.format.payload_bytes(len(layers), len(positions)), dtype=np.uint8)
    cut_into(payload, view, layers, positions)
    prefix = chunk_prefix(slice_header(view, layers, positions), checksum(payload.data), len(payload))
    return b"".join((prefix, payload.data))


def slice_header(view: ChunkView, layers: Sequence[int], positions: Sequence[int]) -> capture_pb2.ChunkHeader:
    """Return the header of a slice; the arguments are those of `slice_chunk`."""
    header = capture_pb2.ChunkHeader()
    header.CopyFrom(view.header)
    header.layers[:] = [view.header.layers[at] for at in layers]
    if len(positions) < len(view.header.positions):
        header.positions[:] = [view.header.positions[at] for at in positions]
    return header


def cut_into(payload: npt.NDArray[np.uint8], view: ChunkView, layers: Sequence[int], positions: Sequence[int]) -> None:
    """Write the payload of a slice, uint8 [bytes]. Each kept layer keeps the prefix before its rows."""
    form, count = view.format, len(view.header.positions)
    data = np.frombuffer(view.payload, dtype=np.uint8).reshape(len(view.header.layers), -1)
    cut = payload.reshape(len(layers), -1)
    if len(positions) == count:
        for at, layer in enumerate(layers):
            cut[at] = data[layer]
        return
    run = slice(positions[0], positions[-1] + 1)
    is_run = run.stop - run.start == len(positions)
    for at, layer in enumerate(layers):
        cut[at, : form.prefix_bytes] = data[layer, : form.prefix_bytes]
        rows = data[layer, form.prefix_bytes :].reshape(count, form.row_bytes)
        cut[at, form.prefix_bytes :] = (rows[run] if is_run else rows[positions]).reshape(-1)
