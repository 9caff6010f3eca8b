# ruff: noqa: ANN001, ANN202, N803 - a Triton kernel is written without annotations, its constants in capitals
"""The tap on a GPU: one Triton kernel a layer does everything for a row, in one pass.

A row's program says what is done to it (tables.py); rows without one, and padding, leave at once. The arithmetic is
that of operations.py, in float32, with the projection summed in the order that the reduction takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from inference_svc.taps.plan import Kind
from inference_svc.taps.tables import WANT_AFTER

if TYPE_CHECKING:
    from torch import Tensor

    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import BlockPool
    from inference_svc.taps.tables import ProgramTable

_ADD = tl.constexpr(int(Kind.ADD))
_ABLATE = tl.constexpr(int(Kind.ABLATE))
_WANT_AFTER = tl.constexpr(WANT_AFTER)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tap_kernel(  # type: ignore[no-untyped-def]
    hidden,
    residual,
    row_programs,
    row_places,
    wants,
    spans,
    kinds,
    vectors,
    numbers,
    bank,
    inverse_norms,
    pool,
    layer,
    num_layers,
    hidden_stride,
    residual_stride,
    width,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    program = tl.load(row_programs + row)
    if program < 0:
        return
    want = tl.load(wants + program * num_layers + layer)
    span = spans + (program * num_layers + layer) * 2
    count = tl.load(span + 1)
    if (count == 0) & (want == 0):
        return
    columns = tl.arange(0, WIDTH)
    mask = columns < width
    h = tl.load(hidden + row.to(tl.int64) * hidden_stride + columns, mask=mask, other=0.0)
    r = tl.zeros([WIDTH], dtype=tl.float32)
    if HAS_RESIDUAL:
        r = tl.load(residual + row.to(tl.int64) * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
    stored = (h.to(tl.float32) + r).to(hidden.dtype.element_ty)
    if count > 0:
        before = h.to(tl.float32) + r
        x = before
        first = tl.load(span)
        for entry in range(first, first + count):
            kind = tl.load(kinds + entry)
            vector = tl.load(vectors + entry)
            scale = tl.load(numbers + entry * 3)
            low = tl.load(numbers + entry * 3 + 1)
            high = tl.load(numbers + entry * 3 + 2)
            inverse = tl.load(inverse_norms + vector)
            v = tl.load(bank + vector.to(tl.int64) * width + columns, mask=mask, other=0.0)
            factor = scale
            if kind != _ADD:
                projection = tl.sum(x * v, axis=0) * inverse
                clamped = tl.maximum(tl.minimum(projection, high), low)
                along = tl.where(kind == _ABLATE, -scale * projection, clamped - projection)
                factor = along * inverse
            x += factor * v
        # Only the difference is written back: a row that no operation moves stays as it is to the bit.
        changed = (h.to(tl.float32) + (x - before)).to(hidden.dtype.element_ty)
        tl.store(hidden + row.to(tl.int64) * hidden_stride + columns, changed, mask=mask)
        if want == _WANT_AFTER:
            stored = (changed.to(tl.float32) + r).to(hidden.dtype.element_ty)
    if want > 0:
        place = tl.load(row_places + row)
        if place >= 0:
            block = place // BLOCK_TOKENS
            offset = place % BLOCK_TOKENS
            target = ((block.to(tl.int64) * num_layers + layer) * BLOCK_TOKENS + offset) * width
            tl.store(pool + target + columns, stored, mask=mask)


def launch(
    hidden: Tensor,
    residual: Tensor | None,
    layer: int,
    row_table: Tensor,
    table: ProgramTable,
    bank: VectorBank,
    pool: BlockPool | None,
) -> None:
    """Run the kernel over every row of a layer's output.

    Args:
        hidden: [rows, hidden], changed in place.
        residual: [rows, hidden], or None.
        layer: Which of this stage's layers.
        row_table: Each row's program and place (block * 32 + offset), int32 [2, rows or more]; -1: none.
        table: The programs.
        bank: The vectors.
        pool: The capture blocks; None on a rank that only steers.
    """
    rows, width = hidden.shape
    if not rows:
        return
    memory = pool.memory if pool is not None else hidden
    block_tokens = pool.memory.shape[2] if pool is not None else 1
    padded = triton.next_power_of_2(width)
    _tap_kernel[(rows,)](
        hidden,
        residual if residual is not None else hidden,
        row_table[0],
        row_table[1],
        table.wants,
        table.spans,
        table.kinds,
        table.vectors,
        table.numbers,
        bank.vectors,
        bank.inverse_norms,
        memory,
        layer,
        table.wants.shape[1],
        hidden.stride(0),
        residual.stride(0) if residual is not None else 0,
        width,
        HAS_RESIDUAL=residual is not None,
        BLOCK_TOKENS=block_tokens,
        WIDTH=padded,
        num_warps=_warps(padded),
    )


def _warps(width: int) -> int:
    # 8 elements a thread keep loads at 16 bytes; more warps than 16 only wait for each other in the reduction.
    return max(1, min(16, width // (32 * 8)))
