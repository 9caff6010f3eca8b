"""The vector bank: the active steering vectors on the device. The inference service decides which row holds which."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


_STAGED_VECTORS = 64
"""How many vectors one upload to the device takes."""


_LARGEST = float(np.finfo(np.float32).max)


class VectorBank:
    """A table of steering vectors, float32 [rows, width], and of their inverse norms, float32 [rows].

    Both stay at fixed addresses: CUDA graphs hold these.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.vectors: Tensor = torch.zeros(rows, width, dtype=torch.float32, device=device)
        self.inverse_norms: Tensor = torch.zeros(rows, dtype=torch.float32, device=device)
        on_gpu = device.type == "cuda"
        # A stream of its own: vectors arrive while a step runs. The upload must not wait for it or delay the next one.
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        staged = min(rows, _STAGED_VECTORS)
        self._vectors = torch.zeros(staged, width, dtype=torch.float32, pin_memory=on_gpu)
        self._inverse_norms = torch.zeros(staged, dtype=torch.float32, pin_memory=on_gpu)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return int(self.vectors.nbytes + self.inverse_norms.nbytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(self.vectors.shape[1] * self.vectors.element_size())

    def load(self, rows: Iterable[tuple[int, bytes]]) -> None:
        """Write vectors into rows, and return when the device has them.

        Args:
            rows: Pairs of a row and the vector's values, float32 little-endian. No running request may use these
                rows. Vectors of another width than the table's are for other tables, and are left out.
        """
        pending = ((row, values) for row, values in rows if len(values) == self.row_bytes)
        while batch := list(islice(pending, len(self._vectors))):
            self._stage(values for _, values in batch)
            with torch.cuda.stream(self._stream):  # does nothing without a stream
                for index, (row, _) in enumerate(batch):
                    self.vectors[row].copy_(self._vectors[index], non_blocking=True)
                    self.inverse_norms[row].copy_(self._inverse_norms[index], non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()

    def _stage(self, vectors: Iterable[bytes]) -> None:
        staged, inverse_norms = self._vectors.numpy(), self._inverse_norms.numpy()
        for index, values in enumerate(vectors):
            staged[index] = np.frombuffer(values, dtype="<f4")
            norm = float(np.linalg.norm(staged[index].astype(np.float64)))
            inverse_norms[index] = min(1.0 / norm, _LARGEST) if norm else 0.0
