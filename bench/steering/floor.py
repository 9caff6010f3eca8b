# ruff: noqa: ANN001, ANN202, N803 - a Triton kernel is written without annotations, its constants in capitals
"""The lower limit for a tap: a kernel that only moves the bytes that a tap must move."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 4096
_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _move_kernel(a, b, first, second, elements, TWO: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = offsets < elements
    x = tl.load(a + offsets, mask=mask).to(tl.float32)
    y = tl.load(b + offsets, mask=mask).to(tl.float32)
    tl.store(first + offsets, (x + y).to(first.dtype.element_ty), mask=mask)
    if TWO:
        tl.store(second + offsets, (x - y).to(second.dtype.element_ty), mask=mask)


def move(a: Tensor, b: Tensor, first: Tensor, second: Tensor | None = None) -> None:
    """Read two tensors; write their sum to `first`, and their difference to `second` if given. A tap moves the same."""
    elements = a.numel()
    _move_kernel[(triton.cdiv(elements, _CHUNK),)](
        a, b, first, first if second is None else second, elements,
        TWO=second is not None, CHUNK=_CHUNK, num_warps=_WARPS,
    )  # fmt: skip
