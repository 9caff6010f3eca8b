"""The signs of random projections on the device, kept while they are of use."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from residuum.wire.projection import projection_signs

CACHE_BYTES = 256 << 20
"""What the matrices that are kept take at most; one always is."""


class SignCache:
    """The matrices that were used last. Not safe for threads.

    They are made when the first block needs them, by whoever sends blocks: on a GPU that is a thread and a stream of
    their own, so no step waits for it.
    """

    def __init__(self, width: int, device: torch.device, max_bytes: int = CACHE_BYTES) -> None:
        """Keep matrices for rows of `width` elements, of no more than so many bytes."""
        self._width = width
        self._device = device
        self._max_bytes = max_bytes
        self._matrices: OrderedDict[tuple[int, int, torch.dtype], Tensor] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all that are kept."""
        return sum(matrix.nbytes for matrix in self._matrices.values())

    def get(self, seed: int, dimensions: int, dtype: torch.dtype) -> Tensor:
        """Return the signs of a projection, 1 and -1, [width, dimensions]."""
        key = (seed, dimensions, dtype)
        if key not in self._matrices:
            needed = self._width * dimensions * dtype.itemsize
            while self._matrices and self.nbytes + needed > self._max_bytes:
                self._matrices.popitem(last=False)
            signs = torch.from_numpy(projection_signs(seed, self._width, dimensions))
            self._matrices[key] = signs.to(self._device).to(dtype)
        self._matrices.move_to_end(key)
        return self._matrices[key]
