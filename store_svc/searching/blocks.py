"""Collects rows of frames as float32 in a block that fits the processor's cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from residuum.wire.rows.encodings import RowFormat
from residuum.wire.rows.frames import ChunkView

_BLOCK_BYTES = 512 << 10
"""Bytes of a block, unless a single row has more. With it and what it is made from, a cache of 1 MiB is enough."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class RowBlock:
    """Rows in float32, and where they are from."""

    def __init__(self, width: int) -> None:
        """Make an empty block for rows of this width."""
        self._bits = np.empty((max(_BLOCK_BYTES // (4 * width), 1), width), dtype=np.uint32)
        self._rows = self._bits.view(np.float32)
        self._filled = 0
        self._starts: list[int] = []
        self._origins: list[tuple[bytes, int, Sequence[int]]] = []

    @property
    def rows(self) -> npt.NDArray[np.float32]:
        """The rows, [rows, width]."""
        return self._rows[: self._filled]

    @property
    def is_full(self) -> bool:
        """Whether no row fits."""
        return self._filled == len(self._rows)

    def origin(self, row: int) -> tuple[bytes, int, int]:
        """Return the frame's key, the sequence and the position of a row."""
        at = bisect_right(self._starts, row) - 1
        key, sequence, positions = self._origins[at]
        return key, sequence, positions[row - self._starts[at]]

    def clear(self) -> None:
        """Remove all rows."""
        self._filled = 0
        self._starts.clear()
        self._origins.clear()

    def fill(self, key: bytes, rows: LayerRows) -> Iterator[None]:
        """Copy rows into the block. Yield whenever it is full; the caller then clears it.

        Args:
            key: The key of their frame.
            rows: The rows.

        Raises:
            EncodingError: The rows cannot be decoded.
        """
        done, total = 0, len(rows.positions)
        while done < total:
            count = min(len(self._rows) - self._filled, total - done)
            self._starts.append(self._filled)
            self._origins.append((key, rows.sequence, rows.positions[done : done + count]))
            self._decode(rows, done, count)
            self._filled += count
            done += count
            if self.is_full:
                yield

    def _decode(self, rows: LayerRows, first: int, count: int) -> None:
        """Decode rows into the block. Bits are shifted, because casts of bfloat16 would not let other threads run."""
        target = slice(self._filled, self._filled + count)
        encoded = rows.rows[first : first + count]
        if rows.form.decoded_dtype == _BFLOAT16:
            np.left_shift(encoded["x"].view(np.uint16), 16, out=self._bits[target], dtype=np.uint32, casting="unsafe")
        else:
            self._rows[target] = rows.form.decode(encoded, rows.prefix)


class LayerRows(NamedTuple):
    """The wanted rows of one layer of a frame, encoded."""

    form: RowFormat
    """How they are encoded."""
    rows: npt.NDArray[np.void]
    """The rows, [positions]."""
    prefix: npt.NDArray[np.void] | None
    """The prefix before them, if the format has any."""
    sequence: int
    """Their sequence."""
    positions: Sequence[int]
    """Their positions."""


def rows_of_full_frame(
    form: RowFormat, payload: memoryview, layers: int, layer: int, sequence: int, positions: range
) -> LayerRows | None:
    """Return all rows of a layer of a frame, without parsing its head; None if it must be parsed.

    Its key gives the range of its layers and positions. If its payload is as large as if it had all of them, it has.

    Args:
        form: How its rows are encoded.
        payload: Its payload.
        layers: How many captured layers there are from its first to its last one.
        layer: The index of the wanted one among them.
        sequence: Its sequence.
        positions: The positions from its first to its last one.
    """
    size = len(positions) * form.row_bytes
    if form.prefix_bytes or len(payload) != layers * size:
        return None
    rows = np.frombuffer(payload, form.row_dtype, len(positions), layer * size)
    return LayerRows(form, rows, None, sequence, positions)


def rows_of_chunk(chunk: ChunkView, layer: int, wanted: Sequence[int]) -> LayerRows:
    """Return rows of a chunk.

    Args:
        chunk: The chunk.
        layer: The index of the layer in its list of layers.
        wanted: The indices of the wanted positions in its list of positions.
    """
    prefixes, encoded = chunk.split()
    rows, positions = encoded[layer], list(chunk.header.positions)
    if len(wanted) < len(positions):
        rows, positions = rows[wanted], [positions[at] for at in wanted]
    prefix = None if prefixes is None else prefixes[layer]
    return LayerRows(chunk.format, rows, prefix, chunk.header.sequence, positions)
