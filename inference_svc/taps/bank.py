"""The vectors that running requests use: a table at a fixed address, whose rows the inference service allots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class VectorBank:
    """A table of steering vectors, float32 [rows, hidden], with their inverse norms beside it."""

    def __init__(self, rows: int, hidden: int, device: torch.device) -> None:
        self.vectors: Tensor = torch.zeros(rows, hidden, dtype=torch.float32, device=device)
        self.inverse_norms: Tensor = torch.zeros(rows, dtype=torch.float32, device=device)

    def load(self, rows: Iterable[tuple[int, bytes]]) -> None:
        """Write vectors into rows.

        Args:
            rows: Pairs of a row and the vector's values, float32 little-endian [hidden]. The caller makes sure that
                no running request uses the row.
        """
        for row, values in rows:
            vector = np.frombuffer(values, dtype="<f4").copy()
            norm = float(np.linalg.norm(vector.astype(np.float64)))
            self.vectors[row].copy_(torch.from_numpy(vector))
            self.inverse_norms[row] = 1.0 / norm if norm else 0.0
