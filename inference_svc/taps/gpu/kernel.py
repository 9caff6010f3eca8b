# ruff: noqa: ANN001, ANN202, N803 - a Triton kernel is written without annotations, its constants in capitals
"""The tap on a GPU: one Triton kernel a point does everything for a row, in one pass.

A row's program says what is done to it (tables.py); rows without one, and padding, are left alone. The arithmetic is
that of operations.py, in float32, with the projection summed in the order that the reduction takes.

There are two kernels. One stands by itself after a layer. The other takes the place of the add and the RMS norm that
follow a layer in most models: the model then runs as many kernels as without taps, and idle taps cost next to nothing.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from inference_svc.taps.gpu.tables import ENTRY_FIELDS, KEEP_NORM, KIND_SHIFT, LINE_FIELDS, MAX_BANK_ROWS
from inference_svc.taps.operations import reach
from inference_svc.taps.plan import Kind

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import BlockPool
    from inference_svc.taps.gpu.tables import ProgramTable

_ADD = tl.constexpr(int(Kind.ADD))
_ABLATE = tl.constexpr(int(Kind.ABLATE))

_LINE_FIELDS = tl.constexpr(LINE_FIELDS)
_ENTRY_FIELDS = tl.constexpr(ENTRY_FIELDS)
_KIND_SHIFT = tl.constexpr(KIND_SHIFT)
_KEEP_NORM = tl.constexpr(KEEP_NORM)
_VECTOR = tl.constexpr(MAX_BANK_ROWS - 1)

ROW_FIELDS = 4
"""Numbers in a line of the row table: program, place, stride, and whether the program is busy at most points."""

_COPY_BLOCKS = 4
_COPY_WARPS = 4
_COPY_CHUNK = 4096
"""Elements that a block of the copying kernel moves at once."""

_ROW_FIELDS = tl.constexpr(ROW_FIELDS)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _load(at, limit, HEAD: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the elements of a row below `limit`, zeros beyond it, as a head and a tail."""
    columns = tl.arange(0, HEAD)
    head = tl.load(at + columns, mask=columns < limit, other=0.0)
    tail = head
    if TAIL:
        rest = HEAD + tl.arange(0, TAIL)
        tail = tl.load(at + rest, mask=rest < limit, other=0.0)
    return head, tail


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _load_if_not(ahead, at, limit, head, tail, HEAD: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a row, unless it was loaded ahead: then return what there is."""
    columns = tl.arange(0, HEAD)
    head = tl.load(at + columns, mask=(columns >= ahead) & (columns < limit), other=head)
    if TAIL:
        rest = HEAD + tl.arange(0, TAIL)
        tail = tl.load(at + rest, mask=(rest >= ahead) & (rest < limit), other=tail)
    return head, tail


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _store(at, head, tail, limit, HEAD: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the elements of a row below `limit`."""
    columns = tl.arange(0, HEAD)
    tl.store(at + columns, head, mask=columns < limit)
    if TAIL:
        rest = HEAD + tl.arange(0, TAIL)
        tl.store(at + rest, tail, mask=rest < limit)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _dot(a, a_tail, b, b_tail, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the inner product of two rows."""
    total = tl.sum(a * b, axis=0)
    if TAIL:
        total += tl.sum(a_tail * b_tail, axis=0)
    return total


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _apply(x, x_tail, v, v_tail, what, scale, low, high, inverse, most, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a row, in float32, after one operation along v; whether that moved it; and whether it moved it far.

    Far is further than a thousandth of `most`: then the row's elements must be looked at one by one.
    """
    kind = what >> _KIND_SHIFT
    factor = scale
    if kind != _ADD:
        projection = _dot(x, x_tail, v, v_tail, TAIL) * inverse
        # Not clamp(projection) - projection: the compiler may fuse the product above into the difference, which is not
        # zero then where nothing is cut off.
        over = tl.where(projection > high, high - projection, tl.where(projection < low, low - projection, 0.0))
        along = tl.where(kind == _ABLATE, -scale * projection, over)
        factor = along * inverse
    moved = x + factor * v
    moved_tail = x_tail + factor * v_tail
    if what & _KEEP_NORM:
        before = _dot(x, x_tail, x, x_tail, TAIL)
        after = _dot(moved, moved_tail, moved, moved_tail, TAIL)
        # A row that became zero stays zero, and one that was not moved stays as it is to the bit.
        rescaled = tl.where((after > 0.0) & (factor != 0.0), tl.sqrt(before / after), 1.0)
        moved *= rescaled
        moved_tail *= rescaled
    is_near = tl.abs(factor) <= most * 1e-3 * inverse  # of a factor that is no number this does not hold either
    return moved, moved_tail, factor != 0.0, is_near == 0


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _apply_rest(  # type: ignore[no-untyped-def]
    x,
    x_tail,
    is_moved,
    is_far,
    width,
    first,
    count,
    entries,
    bank,
    inverse_norms,
    most,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Return as `_apply` does after all of `count` operations from entry `first` on; the first one is done."""
    for index in range(first + 1, first + count):
        entry = entries + index * _ENTRY_FIELDS
        what = tl.load(entry)
        vector = what & _VECTOR
        scale, low, high = _number(entry + 1), _number(entry + 2), _number(entry + 3)
        inverse = tl.load(inverse_norms + vector)
        v, v_tail = _load(bank + vector.to(tl.int64) * width, width, HEAD, TAIL)
        x, x_tail, moves, strays = _apply(x, x_tail, v, v_tail, what, scale, low, high, inverse, most, TAIL)
        is_moved = is_moved | moves
        is_far = is_far | strays
    return x, x_tail, is_moved, is_far


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _bounded(steered, x, most):  # type: ignore[no-untyped-def]
    """Return steered elements, none larger than `most` unless it was before; see operations.py."""
    bounds = tl.maximum(tl.abs(x), most)
    is_number = steered == steered  # noqa: PLR0124 - NaN is not
    return tl.where(is_number, tl.minimum(tl.maximum(steered, -bounds), bounds), x)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _steer(  # type: ignore[no-untyped-def]
    x,
    x_tail,
    v,
    v_tail,
    what,
    scale,
    low,
    high,
    inverse,
    width,
    first,
    count,
    entries,
    bank,
    inverse_norms,
    most,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Return a row, in float32, after all its operations, and whether any of them moved it."""
    steered, steered_tail, is_moved, is_far = _apply(x, x_tail, v, v_tail, what, scale, low, high, inverse, most, TAIL)
    steered, steered_tail, is_moved, is_far = _apply_rest(
        steered, steered_tail, is_moved, is_far, width, first, count, entries, bank, inverse_norms, most, HEAD, TAIL
    )
    if is_far:
        steered = _bounded(steered, x, most)
        steered_tail = _bounded(steered_tail, x_tail, most)
    return steered, steered_tail, is_moved


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _number(pointer):  # type: ignore[no-untyped-def]
    """Load a float32 whose bits lie in an int32."""
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keep(  # type: ignore[no-untyped-def]
    destination, before, before_tail, after, after_tail, width, row_line, pool, HEAD: tl.constexpr, TAIL: tl.constexpr
):
    """Store a row, before or after steering, into its block, if the destination says so."""
    if destination >= 0:
        place = tl.load(row_line + 1).to(tl.int64)
        stride = tl.load(row_line + 2).to(tl.int64)
        target = pool + (place + (destination >> 1).to(tl.int64) * stride) * width
        if destination & 1:
            _store(target, before, before_tail, width, HEAD, TAIL)
        else:
            _store(target, after, after_tail, width, HEAD, TAIL)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tap_kernel(  # type: ignore[no-untyped-def]
    hidden,
    residual,
    row_table,
    lines,
    entries,
    bank,
    inverse_norms,
    pool,
    point,
    num_points,
    most,
    hidden_stride,
    residual_stride,
    width,
    HAS_RESIDUAL: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    row = tl.program_id(0)
    row_line = row_table + row * _ROW_FIELDS
    program = tl.load(row_line)
    if program < 0:
        return
    # All that a row with one operation needs is asked for before anything is waited for. Only a row that is busy at
    # most points is read before it is known whether it is here.
    ahead = tl.where(tl.load(row_line + 3) != 0, width, 0)  # columns that are read ahead: all or none
    h_at = hidden + row.to(tl.int64) * hidden_stride
    r_at = residual + row.to(tl.int64) * residual_stride
    h, h_tail = _load(h_at, ahead, HEAD, TAIL)
    r, r_tail = h, h_tail
    if HAS_RESIDUAL:
        r, r_tail = _load(r_at, ahead, HEAD, TAIL)
    line = lines + (program * num_points + point) * _LINE_FIELDS
    first = tl.load(line)
    count = tl.load(line + 1)
    here = tl.load(line + 2)
    next_here = tl.load(line + 3)
    what = tl.load(line + 4)
    if (count == 0) & (here < 0) & (next_here < 0):
        return
    scale, low, high = _number(line + 5), _number(line + 6), _number(line + 7)
    vector = what & _VECTOR
    inverse = tl.load(inverse_norms + vector)
    v, v_tail = _load(bank + vector.to(tl.int64) * width, tl.where(count > 0, width, 0), HEAD, TAIL)
    h, h_tail = _load_if_not(ahead, h_at, width, h, h_tail, HEAD, TAIL)
    x, x_tail = h.to(tl.float32), h_tail.to(tl.float32)
    if HAS_RESIDUAL:
        r, r_tail = _load_if_not(ahead, r_at, width, r, r_tail, HEAD, TAIL)
        x += r.to(tl.float32)
        x_tail += r_tail.to(tl.float32)
    dtype = hidden.dtype.element_ty
    before, before_tail = x.to(dtype), x_tail.to(dtype)
    after, after_tail = before, before_tail
    if count > 0:
        steered, steered_tail, is_moved = _steer(
            x, x_tail, v, v_tail, what, scale, low, high, inverse, width, first, count, entries, bank, inverse_norms,
            most, HEAD, TAIL,
        )  # fmt: skip
        if is_moved:  # a row that no operation moves stays as it is to the bit, a negative zero and an infinity, too
            after = (h.to(tl.float32) + (steered - x)).to(dtype)  # only the difference is written back
            after_tail = (h_tail.to(tl.float32) + (steered_tail - x_tail)).to(dtype)
            _store(h_at, after, after_tail, width, HEAD, TAIL)
            if HAS_RESIDUAL:
                after = (after.to(tl.float32) + r.to(tl.float32)).to(dtype)
                after_tail = (after_tail.to(tl.float32) + r_tail.to(tl.float32)).to(dtype)
    _keep(here, before, before_tail, after, after_tail, width, row_line, pool, HEAD, TAIL)
    _keep(next_here, before, before_tail, after, after_tail, width, row_line, pool, HEAD, TAIL)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tap_norm_kernel(  # type: ignore[no-untyped-def]
    hidden,
    residual,
    weight,
    normed,
    summed,
    row_table,
    lines,
    entries,
    bank,
    inverse_norms,
    pool,
    point,
    num_points,
    most,
    hidden_stride,
    residual_stride,
    width,
    epsilon,
    PLUS_ONE: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    row = tl.program_id(0)
    row_line = row_table + row * _ROW_FIELDS
    program = tl.load(row_line)
    h, h_tail = _load(hidden + row.to(tl.int64) * hidden_stride, width, HEAD, TAIL)
    r, r_tail = _load(residual + row.to(tl.int64) * residual_stride, width, HEAD, TAIL)
    w, w_tail = _load(weight, width, HEAD, TAIL)
    # Without branches: what a row with one operation needs is asked for before the row itself is waited for.
    is_tapped = program >= 0
    line = lines + (tl.maximum(program, 0) * num_points + point) * _LINE_FIELDS
    first = tl.load(line, mask=is_tapped, other=0)
    count = tl.load(line + 1, mask=is_tapped, other=0)
    here = tl.load(line + 2, mask=is_tapped, other=-1)
    next_here = tl.load(line + 3, mask=is_tapped, other=-1)
    is_steered = count > 0
    what = tl.load(line + 4, mask=is_steered, other=0)
    scale = tl.load(line + 5, mask=is_steered, other=0).to(tl.float32, bitcast=True)
    low = tl.load(line + 6, mask=is_steered, other=0).to(tl.float32, bitcast=True)
    high = tl.load(line + 7, mask=is_steered, other=0).to(tl.float32, bitcast=True)
    vector = what & _VECTOR
    inverse = tl.load(inverse_norms + vector, mask=is_steered, other=0.0)
    v, v_tail = _load(bank + vector.to(tl.int64) * width, tl.where(is_steered, width, 0), HEAD, TAIL)
    x = h.to(tl.float32) + r.to(tl.float32)
    x_tail = h_tail.to(tl.float32) + r_tail.to(tl.float32)
    dtype = hidden.dtype.element_ty
    before, before_tail = x.to(dtype), x_tail.to(dtype)
    if is_steered:
        steered, steered_tail, is_moved = _steer(
            x, x_tail, v, v_tail, what, scale, low, high, inverse, width, first, count, entries, bank, inverse_norms,
            most, HEAD, TAIL,
        )  # fmt: skip
        if is_moved:  # else a negative zero would become a positive one
            x = steered
            x_tail = steered_tail
    after, after_tail = x.to(dtype), x_tail.to(dtype)
    _keep(here, before, before_tail, after, after_tail, width, row_line, pool, HEAD, TAIL)
    _keep(next_here, before, before_tail, after, after_tail, width, row_line, pool, HEAD, TAIL)
    _store(summed + row.to(tl.int64) * width, after, after_tail, width, HEAD, TAIL)
    # As vLLM's fused_add_rms_norm defines it: from the sum before it is rounded. Rounded once, as the compiler does it
    # where the definition rounds before it multiplies.
    rescaled = tl.rsqrt(_dot(x, x_tail, x, x_tail, TAIL) / width + epsilon)
    y = (x * rescaled * (w.to(tl.float32) + PLUS_ONE)).to(dtype)
    y_tail = (x_tail * rescaled * (w_tail.to(tl.float32) + PLUS_ONE)).to(dtype)
    _store(normed + row.to(tl.int64) * width, y, y_tail, width, HEAD, TAIL)


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
    """Each row's program (-1: none), place, stride, and whether it is busy, int32 [rows or more, ROW_FIELDS]."""
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
            programs.entries,
            bank.vectors,
            bank.inverse_norms,
            self.pool.memory if self.pool is not None else hidden,
            point,
            programs.lines.shape[1],
            reach(hidden.dtype),
        )


def tap(hidden: Tensor, residual: Tensor | None, point: int, tables: KernelTables) -> None:
    """Steer and capture the rows of `hidden` + `residual`, each [rows, hidden]; `hidden` is changed in place."""
    rows, width = hidden.shape
    if not rows:
        return
    head, tail = _split(width)
    _tap_kernel[(rows,)](
        hidden,
        residual if residual is not None else hidden,
        *tables.arguments(hidden, point),
        hidden.stride(0),
        residual.stride(0) if residual is not None else 0,
        width,
        HAS_RESIDUAL=residual is not None,
        HEAD=head,
        TAIL=tail,
        num_warps=_warps(head),
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
        head, tail = _split(width)
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
            PLUS_ONE=1.0 if plus_one else 0.0,
            HEAD=head,
            TAIL=tail,
            num_warps=_warps(head),
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


@cache
def _split(width: int) -> tuple[int, int]:
    """Return the lengths, powers of two, of a row's head and tail; a tail of 0 is none.

    Triton's blocks are powers of two. A row of 2560 in one of 4096 would leave three threads of eight without work.
    """
    head = 1 << (width.bit_length() - 1)
    tail = triton.next_power_of_2(width - head) if width > head else 0
    return (head, tail) if tail < head else (2 * head, 0)


def _warps(head: int) -> int:
    # Few, with many elements each: where a row is reduced, warps wait for each other. Measured from 1536 to 4096.
    return max(1, min(4, head // 256), head // 1024)
