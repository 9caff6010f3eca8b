# ruff: noqa: ANN001, ANN202, N803 - a Triton kernel is written without annotations, its constants in capitals
"""Copying of whole blocks to the ring as they are, many blocks with one kernel.

The launch of a kernel costs the host as much as all else that a block needs. So the kernel finds the blocks in a table
in the host's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from inference_svc.taps.gpu.host_copies import COPY_PROGRAMS, COPY_WARPS, HostPointer
from inference_svc.taps.gpu.kernels.launching import Launcher

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

MAX_TOGETHER = 256
"""Most blocks of one kernel."""

_TABLES = 2
"""While a kernel reads one table, the next one is filled."""
_FIELDS = tl.constexpr(5)
_WORD_BYTES = 4
_ALIGNMENT = tl.constexpr(4)
"""Words that a thread copies at once. Rows and places in the ring are multiples of them."""
_CHUNK = 2048
"""Words that a program copies at once."""


class BlockCopies:
    """Collects blocks and copies them with one kernel."""

    def __init__(self, pool_memory: Tensor, ring_address: int) -> None:
        """Copy from a pool to a ring.

        Args:
            pool_memory: The memory of the block pool, [rows, hidden].
            ring_address: The address at which the device reaches the ring.
        """
        self._row_words, odd = divmod(pool_memory.shape[1] * pool_memory.itemsize, _WORD_BYTES)
        self.is_possible = not (odd or self._row_words % _ALIGNMENT.value)
        """Whether rows have a size that the kernel can copy."""
        self._pool = pool_memory.view(torch.int32) if self.is_possible else pool_memory
        self._ring = HostPointer(ring_address, torch.int32)
        self._tables = [
            torch.zeros(MAX_TOGETHER, _FIELDS.value, dtype=torch.int64, pin_memory=pool_memory.is_cuda)
            for _ in range(_TABLES)
        ]
        self._views: list[npt.NDArray[np.int64]] = [table.numpy() for table in self._tables]
        self._turn = self._count = 0

    def add(self, first_row: int, units: int, positions: int, capacity: int, offset: int) -> None:
        """Have the next `start` copy the filled rows of a block. It copies at most MAX_TOGETHER blocks.

        Args:
            first_row: The pool row for the first unit of the block's first position.
            units: The units of its capture.
            positions: How many positions it holds.
            capacity: How many positions fit.
            offset: The start of its extent in the ring, in bytes.
        """
        words = self._row_words
        self._views[self._turn][self._count] = (
            first_row * words,
            offset // _WORD_BYTES,
            units,
            positions * words,
            capacity * words,
        )
        self._count += 1

    def start(self) -> None:
        """Start to copy the blocks on the current stream. All copies before the last ones must be done."""
        if self._count:
            table = self._tables[self._turn]
            _launch_copy(
                (COPY_PROGRAMS, 1, 1),
                (self._pool, self._ring, table, self._count),
                {"CHUNK": _CHUNK},
                num_warps=COPY_WARPS,
            )
            self._turn, self._count = (self._turn + 1) % _TABLES, 0


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator, unused-ignore]
def _copy_blocks(source, target, table, count, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    for index in range(count):
        entry = table + index * _FIELDS
        first = tl.multiple_of(tl.load(entry), _ALIGNMENT)
        to = tl.multiple_of(tl.load(entry + 1), _ALIGNMENT)
        units = tl.load(entry + 2)
        words = tl.multiple_of(tl.load(entry + 3), _ALIGNMENT)
        stride = tl.multiple_of(tl.load(entry + 4), _ALIGNMENT)
        chunks = tl.cdiv(words, CHUNK)
        for part in range(tl.program_id(0), units * chunks, tl.num_programs(0)):
            unit = part // chunks
            offsets = (part % chunks) * CHUNK + tl.arange(0, CHUNK)
            mask = offsets < words
            values = tl.load(source + first + unit * stride + offsets, mask=mask)
            tl.store(target + to + unit * words + offsets, values, mask=mask)


_launch_copy = Launcher(_copy_blocks)
