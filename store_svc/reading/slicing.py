"""Cuts rows out of a frame."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from residuum.v1 import capture_pb2
from residuum.wire.rows.checksums import combined
from residuum.wire.rows.frames import ChunkView, checksum, chunk_prefix
from store_svc.captures.ledger import Cells
from store_svc.captures.positions import Positions


def cells_of(header: capture_pb2.ChunkHeader) -> Cells:
    """Return the cells of a chunk."""
    return Cells(header.sequence, header.site, tuple(header.layers), Positions.of(list(header.positions)))


def slice_chunk(view: ChunkView, layers: Sequence[int], positions: Sequence[int]) -> tuple[bytes, memoryview]:
    """Return a serialised Chunk with some of another chunk's rows, in the same encoding, in two parts to be joined.

    Args:
        view: The chunk to cut from. The caller must have verified it, because the slice gets a new checksum.
        layers: Indices of the wanted layers in the chunk's list of layers, ascending.
        positions: Indices of the wanted positions in the chunk's list of positions, ascending.

    Returns:
        The bytes before the payload, and the payload: a view of the other chunk's if it is one piece of that.
    """
    if len(positions) == len(view.header.positions) and layers[-1] - layers[0] + 1 == len(layers):
        layer_bytes = view.format.payload_bytes(1, len(positions))
        payload = view.payload[layers[0] * layer_bytes : (layers[-1] + 1) * layer_bytes]
    else:
        cut = np.empty(view.format.payload_bytes(len(layers), len(positions)), dtype=np.uint8)
        cut_into(cut, view, layers, positions)
        payload = cut.data
    crc32c = checksum_of_layers(view, layers, positions)
    crc32c = checksum(payload) if crc32c is None else crc32c
    return chunk_prefix(slice_header(view, layers, positions), crc32c, len(payload)), payload


def checksum_of_layers(view: ChunkView, layers: Sequence[int], positions: Sequence[int]) -> int | None:
    """Return the checksum of a slice's payload from those of its layers; None if they do not tell it.

    The arguments are those of `slice_chunk`.
    """
    if not view.layer_crc32c or len(positions) < len(view.header.positions):
        return None
    return combined([view.layer_crc32c[layer] for layer in layers], view.format.payload_bytes(1, len(positions)))


def slice_header(view: ChunkView, layers: Sequence[int], positions: Sequence[int]) -> capture_pb2.ChunkHeader:
    """Return the header of a slice; the arguments are those of `slice_chunk`."""
    header = capture_pb2.ChunkHeader()
    header.CopyFrom(view.header)
    header.layers[:] = [view.header.layers[at] for at in layers]
    if len(positions) < len(view.header.positions):
        header.positions[:] = sliced_positions(view, positions)
    return header


def sliced_positions(view: ChunkView, positions: Sequence[int]) -> Sequence[int]:
    """Return the positions of a slice, given their indices."""
    all_positions = view.header.positions
    return all_positions if len(positions) == len(all_positions) else [all_positions[at] for at in positions]


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
