"""Tables on the device that are written on the host: rows that changed are uploaded, and nobody waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class StagedTable:
    """A table on the device, and its twin on the host, which is pinned if the device is a GPU.

    An upload goes in the order of the current stream, behind the steps that still read the old rows. Until it has been
    done the rows that it takes must not be written again on the host.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allot both, all zeros."""
        self.table: Tensor = torch.zeros(*shape, dtype=dtype, device=device)
        self._memory = torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.view = self._memory.numpy()
        """The twin; write here."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device; the host has as many."""
        return int(self.table.nbytes)

    def upload(self, first: int, count: int) -> None:
        """Upload `count` rows from `first` on."""
        rows = slice(first, first + count)
        self.table[rows].copy_(self._memory[rows], non_blocking=True)
