"""Tables on the device that the host writes. Only changed rows are uploaded, asynchronously."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class StagedTable:
    """A table on the device and its copy on the host, which is pinned memory for a GPU.

    An upload runs on the current stream, after the steps that still read the old rows. Until it is done, the host must
    not write to its rows again.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate both, filled with zeros."""
        self.table: Tensor = torch.zeros(*shape, dtype=dtype, device=device)
        self._memory = torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.view = self._memory.numpy()
        """The copy on the host, as a numpy array to write to."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device. The host copy has the same size."""
        return int(self.table.nbytes)

    def upload(self, first: int, count: int) -> None:
        """Start to upload `count` rows from `first` on."""
        rows = slice(first, first + count)
        self.table[rows].copy_(self._memory[rows], non_blocking=True)
