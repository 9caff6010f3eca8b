# ruff: noqa: ANN001, ANN202, N803 - a Triton kernel is written without annotations, its constants in capitals
"""The tap on a GPU: one Triton kernel a point does everything for a row, in one pass.

A row's program says what is done to it (tables.py); rows without one, and padding, are left alone. The arithmetic is
that of operations.py, in float32, with the projection summed in the order that the reduction takes.

There are two kernels. One stands by itself after a layer. The other takes the place of the add and the RMS norm that
follow a layer in most models: the model then runs as many kernels as without taps, and idle taps cost next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from inference_svc.taps.plan import Kind
from inference_svc.taps.tables import KEEP_NORM

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import BlockPool
    from inference_svc.taps.tables import ProgramTable

_ADD = tl.constexpr(int(Kind.ADD))
_ABLATE = tl.constexpr(int(Kind.ABLATE))

_KIND = tl.constexpr(KEEP_NORM - 1)
_KEEP_NORM = tl.constexpr(KEEP_NORM)

ROW_FIELDS = 4
"""Numbers in a line of the row table: program, place, stride, and one that fills 16 bytes."""

_COPY_BLOCKS = 4
_COPY_WARPS = 4
_COPY_CHUNK = 4096
"""Elements that a block of the copying kernel moves at once."""

_ROW_FIELDS = tl.constexpr(ROW_FIELDS)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _steer(x, columns, mask, width, first, count, kinds, vectors, numbers, bank, inverse_norms):  # type: ignore[no-untyped-def]
    """Return a row, float32 [WIDTH], after `count` operations from entry `first` on."""
    for entry in range(first, first + count):
        kind_and_flags = tl.load(kinds + entry)
        kind = kind_and_flags & _KIND
        vector = tl.load(vectors + entry)
        scale = tl.load(numbers + entry * 3)
        low = tl.load(numbers + entry * 3 + 1)
        high = tl.load(numbers + entry * 3 + 2)
        inverse = tl.load(inverse_norms + vector)
        v = tl.load(bank + vector.to(tl.int64) * width + columns, mask=mask, other=0.0)
        factor = scale
        if kind != _ADD:
            projection = tl.sum(x * v, axis=0) * inverse
            # Not clamp(projection) - projection: the compiler may fuse the product above into the difference, which is
            # not zero then where nothing is cut off.
            over = tl.where(projection > high, high - projection, tl.where(projection < low, low - projection, 0.0))
            along = tl.where(kind == _ABLATE, -scale * projection, over)
            factor = along * inverse
        moved = x + factor * v
        if kind_and_flags & _KEEP_NORM:
            before = tl.sum(x * x, axis=0)
            after = tl.sum(moved * moved, axis=0)
            # A row that became zero stays zero, and one that was not moved stays as it is to the bit.
            moved *= tl.where((after > 0.0) & (factor != 0.0), tl.sqrt(before / after), 1.0)
        x = moved
    return x


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keep(destination, before, after, columns, mask, width, row_line, pool):  # type: ignore[no-untyped-def]
    """Store a row, before or after steering, into its block, if the destination says so."""
    if destination >= 0:
        place = tl.load(row_line + 1).to(tl.int64)
        stride = tl.load(row_line + 2).to(tl.int64)
        target = pool + (place + (destination >> 1).to(tl.int64) * stride) * width
        if destination & 1:
            tl.store(target + columns, before, mask=mask)
        else:
            tl.store(target + columns, after, mask=mask)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tap_kernel(  # type: ignore[no-untyped-def]
    hidden,
    residual,
    row_table,
    lines,
    kinds,
    vectors,
    numbers,
    bank,
    inverse_norms,
    pool,
    point,
    num_points,
    hidden_stride,
    residual_stride,
    width,
    HAS_RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    row_line = row_table + row * _ROW_FIELDS
    program = tl.load(row_line)
    if program < 0:
        return
    line = lines + (program * num_points + point) * 4
    first = tl.load(line)
    count = tl.load(line + 1)
    here = tl.load(line + 2)
    next_here = tl.load(line + 3)
    if (count == 0) & (here < 0) & (next_here < 0):
        return
    columns = tl.arange(0, WIDTH)
    mask = columns < width
    h = tl.load(hidden + row.to(tl.int64) * hidden_stride + columns, mask=mask, other=0.0)
    r = tl.zeros([WIDTH], dtype=tl.float32)
    if HAS_RESIDUAL:
        r = tl.load(residual + row.to(tl.int64) * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
    x = h.to(tl.float32) + r
    before = x.to(hidden.dtype.element_ty)
    after = before
    if count > 0:
        steered = _steer(x, columns, mask, width, first, count, kinds, vectors, numbers, bank, inverse_norms)
        # Only the difference is written back, and only where there is one: what no operation moves stays as it is to
        # the bit, a negative zero and an infinity, too.
        changed = tl.where(steered == x, h, (h.to(tl.float32) + (steered - x)).to(hidden.dtype.element_ty))
        tl.store(hidden + row.to(tl.int64) * hidden_stride + columns, changed, mask=mask)
        after = (changed.to(tl.float32) + r).to(hidden.dtype.element_ty)
    _keep(here, before, after, columns, mask, width, row_line, pool)
    _keep(next_here, before, after, columns, mask, width, row_line, pool)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tap_norm_kernel(  # type: ignore[no-untyped-def]
    hidden,
    residual,
    weight,
    normed,
    summed,
    row_table,
    lines,
    kinds,
    vectors,
    numbers,
    bank,
    inverse_norms,
    pool,
    point,
    num_points,
    hidden_stride,
    residual_stride,
    width,
    epsilon,
    PLUS_ONE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    row_line = row_table + row * _ROW_FIELDS
    program = tl.load(row_line)
    columns = tl.arange(0, WIDTH)
    mask = columns < width
    h = tl.load(hidden + row.to(tl.int64) * hidden_stride + columns, mask=mask, other=0.0)
    r = tl.load(residual + row.to(tl.int64) * residual_stride + columns, mask=mask, other=0.0)
    w = tl.load(weight + columns, mask=mask, other=0.0)
    x = h.to(tl.float32) + r.to(tl.float32)
    if program >= 0:
        line = lines + (program * num_points + point) * 4
        first = tl.load(line)
        count = tl.load(line + 1)
        before = x.to(hidden.dtype.element_ty)
        if count > 0:
            steered = _steer(x, columns, mask, width, first, count, kinds, vectors, numbers, bank, inverse_norms)
            x = tl.where(steered == x, x, steered)  # a negative zero that no operation moves stays one
        after = x.to(hidden.dtype.element_ty)
        _keep(tl.load(line + 2), before, after, columns, mask, width, row_line, pool)
        _keep(tl.load(line + 3), before, after, columns, mask, width, row_line, pool)
    tl.store(summed + row.to(tl.int64) * width + columns, x.to(hidden.dtype.element_ty), mask=mask)
    # As vLLM's fused_add_rms_norm defines it: from the sum before it is rounded.
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + epsilon)
    factor = w.to(tl.float32)
    if PLUS_ONE:
        factor += 1.0
    y = y * factor  # rounded once, as the compiler does it where the definition rounds before it multiplies
    tl.store(normed + row.to(tl.int64) * width + columns, y.to(hidden.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy_kernel(source, target, units, unit_elements, unit_stride, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    chunks = tl.cdiv(unit_elements, CHUNK)
    for index in range(tl.program_id(0), units * chunks, tl.num_programs(0)):
        unit = (index // chunks).to(tl.int64)
        offsets = (index % chunks) * CHUNK + tl.arange(0, CHUNK)
        mask = offsets < unit_elements
        values = tl.load(source + unit * unit_stride + offsets, mask=mask)
        tl.store(target + unit * unit_elements + offsets, values, mask=mask)


class KernelTables(NamedTuple):
    """What the kernels read beside the rows; all of it at fixed addresses."""

    rows: Tensor
    """Each row's program (-1: none), place and stride, int32 [rows or more, ROW_FIELDS]."""
    programs: ProgramTable
    bank: VectorBank
    pool: BlockPool | None
    """The capture blocks; None on a rank that only steers."""

    def arguments(self, hidden: Tensor, point: int) -> tuple[object, ...]:
        """Return the arguments that both kernels take in the same order."""
        programs, bank = self.programs, self.bank
        return (
            self.rows,
            programs.lines,
            programs.kinds,
            programs.vectors,
            programs.numbers,
            bank.vectors,
            bank.inverse_norms,
            self.pool.memory if self.pool is not None else hidden,
            point,
            programs.lines.shape[1],
        )


def tap(hidden: Tensor, residual: Tensor | None, point: int, tables: KernelTables) -> None:
    """Steer and capture the rows of `hidden` + `residual`, each [rows, hidden]; `hidden` is changed in place."""
    rows, width = hidden.shape
    if not rows:
        return
    padded = triton.next_power_of_2(width)
    _tap_kernel[(rows,)](
        hidden,
        residual if residual is not None else hidden,
        *tables.arguments(hidden, point),
        hidden.stride(0),
        residual.stride(0) if residual is not None else 0,
        width,
        HAS_RESIDUAL=residual is not None,
        WIDTH=padded,
        num_warps=_warps(padded),
    )


def tap_norm(
    hidden: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    point: int,
    tables: KernelTables,
    *,
    plus_one: bool,
) -> tuple[Tensor, Tensor]:
    """Steer and capture as `tap`, and go on with the RMS norm of the sum.

    Args:
        hidden: [rows, hidden].
        residual: [rows, hidden].
        weight: The norm's, [hidden].
        epsilon: The norm's.
        point: The tap point.
        tables: What the kernel reads.
        plus_one: The norm multiplies by weight + 1 (Gemma) rather than by weight.

    Returns:
        The norm of the steered sum, and the sum, each [rows, hidden].
    """
    rows, width = hidden.shape
    normed, summed = hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)
    if rows:
        padded = triton.next_power_of_2(width)
        _tap_norm_kernel[(rows,)](
            hidden,
            residual,
            weight,
            normed,
            summed,
            *tables.arguments(hidden, point),
            hidden.stride(0),
            residual.stride(0),
            width,
            epsilon,
            PLUS_ONE=plus_one,
            WIDTH=padded,
            num_warps=_warps(padded),
        )
    return normed, summed


class HostPointer:
    """Host memory that the device reaches by its address, for a kernel: what Triton asks of a tensor, no more."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        """Point to `address`, where elements of `dtype` lie."""
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


def copy_out(rows: Tensor, target: Tensor | HostPointer) -> None:
    """Copy rows, [units, positions, hidden] and contiguous but for gaps between units, to `target`, without the gaps.

    A kernel of a few blocks moves as much over PCIe as the copy engine does. The copy engine works off one copy after
    the other: behind tens of megabytes of rows the model's own few bytes would wait, its sampled tokens among them,
    and with them the next step.
    """
    units, positions, hidden = rows.shape
    _copy_kernel[(_COPY_BLOCKS,)](
        rows, target, units, positions * hidden, rows.stride(0), CHUNK=_COPY_CHUNK, num_warps=_COPY_WARPS
    )


def _warps(width: int) -> int:
    # 8 elements a thread keep loads at 16 bytes; more warps than 16 only wait for each other in the reduction.
    return max(1, min(16, width // (32 * 8)))
