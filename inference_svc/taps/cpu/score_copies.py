"""Copies of scores to the board, on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


class CpuScoreCopies:
    """See `ScoreCopies`."""

    def __init__(self, buffer: Tensor, board: npt.NDArray[np.float32]) -> None:
        """Copy from the taps' buffer, float32 [rows, MAX_PROBE_OUTPUTS], to the board, float32 [elements]."""
        self._buffer: npt.NDArray[np.float32] = buffer.numpy()
        self._board = board

    def copy(self, runs: npt.NDArray[np.int64]) -> None:
        """See `ScoreCopies.copy`."""
        for row, rows, column, columns, line, stride in runs.tolist():
            lines = self._board[line : line + rows * stride].reshape(rows, stride)
            lines[:, column : column + columns] = self._buffer[row : row + rows, column : column + columns]
