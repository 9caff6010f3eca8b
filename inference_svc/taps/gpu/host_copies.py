# ruff: noqa: ANN001, ANN202, N803 - a Triton kernel is written without annotations, its constants in capitals
"""Copies of rows from the device to the host by a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch
    from torch import Tensor

COPY_PROGRAMS = 4
"""Programs of the kernels that copy to the host, see `copy_out`."""
COPY_WARPS = 4
_COPY_CHUNK = 4096
"""How many elements one Triton program of the copying kernel moves at once."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy_kernel(source, target, units, unit_elements, unit_stride, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    chunks = tl.cdiv(unit_elements, CHUNK)
    for index in range(tl.program_id(0), units * chunks, tl.num_programs(0)):
        unit = (index // chunks).to(tl.int64)
        offsets = (index % chunks) * CHUNK + tl.arange(0, CHUNK)
        mask = offsets < unit_elements
        values = tl.load(source + unit * unit_stride + offsets, mask=mask)
        tl.store(target + unit * unit_elements + offsets, values, mask=mask)


class HostPointer:
    """Host memory that the device can reach, as a kernel argument. It has only what Triton needs of a tensor."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        """Point to elements of `dtype` at `address`."""
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


def copy_out(rows: Tensor, target: Tensor | HostPointer) -> None:
    """Copy rows to `target` without gaps.

    A kernel does this instead of the GPU's copy engine, which executes one copy after another. There, the model's own
    small copies, such as its sampled tokens, would wait behind tens of megabytes of rows, and delay the next step. A
    kernel of a few thread blocks reaches the same throughput over PCIe.

    Args:
        rows: [units, positions, hidden], contiguous except for gaps between units.
        target: Receives the elements, in its own dtype.
    """
    units, positions, hidden = rows.shape
    _copy_kernel[(COPY_PROGRAMS,)](
        rows, target, units, positions * hidden, rows.stride(0), CHUNK=_COPY_CHUNK, num_warps=COPY_WARPS
    )
