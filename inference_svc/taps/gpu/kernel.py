# ruff: noqa: ANN001, ANN202, N803 - a Triton kernel is written without annotations, its constants in capitals
"""The kernels of the tap on a GPU. At each point, one Triton kernel steers and captures every row in one pass.

A row's program says what is done to it (tables.py). Rows without a program, and padding, stay unchanged. The arithmetic
is that of operations.py, in float32; only the order in which a projection is summed differs.

There are two kernels. `tap` runs on its own after a layer. `tap_norm` replaces the add and the RMS norm that follow a
layer in most models. With it the model runs as many kernels as without taps, so idle taps cost almost nothing. Both
hold a whole row in registers; chunked_kernels.py has those for wider rows, and one that only captures.

A row is loaded as a head and a tail, because Triton's blocks are powers of two (see `_split`). Without a tail (TAIL is
0), the tail variables are copies of the head and are ignored.

A row waits for memory most of the time, so the kernel is faster if a multiprocessor holds more rows, and it holds more
if each needs fewer registers. That is why a row is in registers only once: its copy from before steering is stored
first, and the original is loaded again where it is needed. So is a steered row that `tap` captures.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import triton
import triton.language as tl

from inference_svc.taps.gpu.kernel_parts import (
    ADD,
    CLAMP,
    COSINE,
    ENTRY_FIELDS,
    GATED,
    KEEP_NORM,
    KIND_SHIFT,
    LINE_FIELDS,
    ROW_FIELDS,
    SCORE,
    SCORE_COLUMNS,
    VECTOR,
    bounded,
    factor_of,
    gated,
    is_direct,
    is_far_moved,
    load_gate,
    moved_by,
    number,
    opened,
    place_of,
    rescaling,
)
from inference_svc.taps.gpu.launching import Launcher
from inference_svc.taps.operations import reach

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import BlockPool
    from inference_svc.taps.gpu.tables import ProgramTable

COPY_PROGRAMS = 4
"""Programs of the kernels that copy to the host, see `copy_out`."""
COPY_WARPS = 4
_COPY_CHUNK = 4096
"""How many elements one Triton program of the copying kernel moves at once."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _load(  # type: ignore[no-untyped-def]
    at,
    limit,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    POLICY: tl.constexpr = tl.constexpr(""),  # noqa: B008 - Triton 3.6 takes no plain text
):
    """Load the elements of a row below index `limit`, and zeros beyond, as a head and a tail."""
    columns = tl.arange(0, HEAD)
    head = tl.load(at + columns, mask=columns < limit, other=0.0, eviction_policy=POLICY)
    tail = head
    if TAIL:
        rest = HEAD + tl.arange(0, TAIL)
        tail = tl.load(at + rest, mask=rest < limit, other=0.0, eviction_policy=POLICY)
    return head, tail


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _load_if_not(ahead, at, limit, head, tail, HEAD: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the elements of a row that were not loaded ahead; return the others as they are."""
    columns = tl.arange(0, HEAD)
    head = tl.load(at + columns, mask=(columns >= ahead) & (columns < limit), other=head)
    if TAIL:
        rest = HEAD + tl.arange(0, TAIL)
        tail = tl.load(at + rest, mask=(rest >= ahead) & (rest < limit), other=tail)
    return head, tail


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _load_again(at, limit, HEAD: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a row a second time. With the same policy, the compiler would merge both and keep the row in registers."""
    return _load(at, limit, HEAD, TAIL, "evict_first")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _store(at, head, tail, limit, HEAD: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the elements of a row below index `limit`."""
    columns = tl.arange(0, HEAD)
    tl.store(at + columns, head, mask=columns < limit)
    if TAIL:
        rest = HEAD + tl.arange(0, TAIL)
        tl.store(at + rest, tail, mask=rest < limit)


@triton.constexpr_function  # type: ignore[untyped-decorator, unused-ignore]
def _warps(head, tail):  # type: ignore[no-untyped-def]
    # Few warps with many elements each, because a reduction makes warps wait for each other. The numbers come from
    # measurements with widths from 1536 to 4096. With more than 1280 elements, a warp would spill registers.
    warps = min(32, max(1, min(4, head // 256), head // 1024))
    return warps if head + tail <= 1280 * warps else 2 * warps


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _in_threads(x, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up the elements that each thread holds, until there is one for each of THREADS."""
    # Triton gives each thread up to 8 neighbours (16 bytes of a row), and then the same again further on. So elements
    # first meet their neighbours, then those of the other half: no element leaves its thread.
    for _ in tl.static_range(3):
        if x.shape[0] > THREADS:
            even, odd = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
            x = even + odd
    for _ in tl.static_range(4):
        if x.shape[0] > THREADS:
            first, second = tl.split(tl.trans(tl.reshape(x, (2, x.shape[0] // 2))))
            x = first + second
    return x


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _dot(a, a_tail, b, b_tail, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the inner product of two rows."""
    products = a * b
    if TAIL:
        # One sum across threads instead of two, because threads wait for each other in each.
        threads: tl.constexpr = 32 * _warps(a.shape[0], TAIL)
        if threads <= TAIL:
            products = _in_threads(products, threads) + _in_threads(a_tail * b_tail, threads)
            return tl.sum(products, axis=0)
        return tl.sum(products, axis=0) + tl.sum(a_tail * b_tail, axis=0)
    return tl.sum(products, axis=0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _opening(  # type: ignore[no-untyped-def]
    x, x_tail, g, g_tail, gate, threshold, sharpness, factor, TAIL: tl.constexpr
):
    """Return how far a gate with the vector g is open for a row, from 0 to 1."""
    measured = _dot(x, x_tail, g, g_tail, TAIL) * factor
    if (gate >> KIND_SHIFT) == COSINE:
        measured /= tl.sqrt(_dot(x, x_tail, x, x_tail, TAIL))
    return opened(gate, measured, threshold, sharpness)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _apply(  # type: ignore[no-untyped-def]
    x, x_tail, v, v_tail, code, scale_or_low, high, gate, inverse, max_abs, opening, scores, TAIL: tl.constexpr
):
    """Apply one operation along v to a row, in float32, as far as its gate is open.

    Returns the row (head and tail), whether the operation moved it, and whether it moved it far. In that case its
    elements must be `bounded`.
    """
    kind = code >> KIND_SHIFT
    factor = tl.where(is_direct(kind), 1.0, scale_or_low)
    if (kind != ADD) & (kind != CLAMP) & (is_direct(kind) == 0):
        product = _dot(x, x_tail, v, v_tail, TAIL)
        if kind == SCORE:
            tl.store(scores + gate, product)
        factor = factor_of(kind, product * inverse, scale_or_low, high, inverse)
    factor = gated(kind, factor, opening, scale_or_low, high)
    before = 0.0
    if code & KEEP_NORM:
        before = _dot(x, x_tail, x, x_tail, TAIL)
    x, x_tail = moved_by(kind, x, v, factor), moved_by(kind, x_tail, v_tail, factor)
    if code & KEEP_NORM:
        rescaled = rescaling(before, _dot(x, x_tail, x, x_tail, TAIL), factor)
        x *= rescaled
        x_tail *= rescaled
    return x, x_tail, factor != 0.0, is_far_moved(kind, factor, inverse, max_abs)


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
    max_abs,
    scores,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Apply the second and all later of `count` operations from entry `first` on; return as `_apply` does."""
    for index in range(first + 1, first + count):
        entry = entries + index * ENTRY_FIELDS
        code, gate = tl.load(entry), tl.load(entry + 3)
        vector = code & VECTOR
        scale_or_low, high = number(entry + 1), number(entry + 2)
        opening = 1.0
        if code & GATED:
            g, g_tail = _load(bank + (gate & VECTOR).to(tl.int64) * width, width, HEAD, TAIL)
            threshold, sharpness, factor = load_gate(code, gate, entry + count * ENTRY_FIELDS, inverse_norms)
            opening = _opening(x, x_tail, g, g_tail, gate, threshold, sharpness, factor, TAIL)
        inverse = tl.load(inverse_norms + vector)
        v, v_tail = _load(bank + vector.to(tl.int64) * width, width, HEAD, TAIL)
        x, x_tail, moves, strays = _apply(
            x, x_tail, v, v_tail, code, scale_or_low, high, gate, inverse, max_abs, opening, scores, TAIL
        )
        is_moved = is_moved | moves
        is_far = is_far | strays
    return x, x_tail, is_moved, is_far


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _steer(  # type: ignore[no-untyped-def]
    x,
    x_tail,
    v,
    v_tail,
    g,
    g_tail,
    code,
    scale_or_low,
    high,
    gate,
    threshold,
    sharpness,
    gate_factor,
    inverse,
    width,
    first,
    count,
    entries,
    bank,
    inverse_norms,
    max_abs,
    scores,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Apply all operations to a row, in float32; return as `_apply` does. What the first needs is loaded already."""
    opening = 1.0
    if code & GATED:
        opening = _opening(x, x_tail, g, g_tail, gate, threshold, sharpness, gate_factor, TAIL)
    x, x_tail, is_moved, is_far = _apply(
        x, x_tail, v, v_tail, code, scale_or_low, high, gate, inverse, max_abs, opening, scores, TAIL
    )
    return _apply_rest(
        x, x_tail, is_moved, is_far, width, first, count, entries, bank, inverse_norms, max_abs, scores, HEAD, TAIL
    )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _before(destination, count):  # type: ignore[no-untyped-def]
    """Return a destination. If the row is not steered, mark it as one before steering: its rows are in registers."""
    return tl.where((count == 0) & (destination >= 0), destination | 1, destination)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keep(  # type: ignore[no-untyped-def]
    x,
    x_tail,
    destination,
    BEFORE: tl.constexpr,
    width,
    row_line,
    pool,
    DTYPE: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Store a row into its block if the destination is one for rows before steering (BEFORE is 1), or after it (0)."""
    if (destination >= 0) & ((destination & 1) == BEFORE):  # NOT_KEPT is negative
        _store(place_of(destination, width, row_line, pool), x.to(DTYPE), x_tail.to(DTYPE), width, HEAD, TAIL)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _write_back(  # type: ignore[no-untyped-def]
    x,
    x_tail,
    is_moved,
    is_far,
    h_at,
    r_at,
    width,
    max_abs,
    DTYPE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Write what steering changed back into the hidden row."""
    h, h_tail = _load_again(h_at, width, HEAD, TAIL)
    original, original_tail = h.to(tl.float32), h_tail.to(tl.float32)
    if HAS_RESIDUAL:
        r, r_tail = _load_again(r_at, width, HEAD, TAIL)
        original += r.to(tl.float32)
        original_tail += r_tail.to(tl.float32)
    if is_moved:  # a row that no operation moves keeps its bits, even negative zeros and infinities
        if is_far:
            x = bounded(x, original, max_abs)
            x_tail = bounded(x_tail, original_tail, max_abs)
        after = h.to(tl.float32) + (x - original)  # only the difference is written back
        after_tail = h_tail.to(tl.float32) + (x_tail - original_tail)
        # They must have no other use. Only then does the compiler round two of them with one instruction.
        _store(h_at, after.to(DTYPE), after_tail.to(DTYPE), width, HEAD, TAIL)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keep_written(  # type: ignore[no-untyped-def]
    destination,
    count,
    h_at,
    r_at,
    width,
    row_line,
    pool,
    DTYPE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Store a steered row into its block, as the model will compute it, if the destination is one for such rows."""
    if (destination >= 0) & ((destination & 1) == 0) & (count > 0):
        tl.debug_barrier()  # if rows are not aligned, Triton may store and load an element in different threads
        h, h_tail = _load(h_at, width, HEAD, TAIL)
        x, x_tail = h.to(tl.float32), h_tail.to(tl.float32)
        if HAS_RESIDUAL:
            r, r_tail = _load(r_at, width, HEAD, TAIL)
            x += r.to(tl.float32)
            x_tail += r_tail.to(tl.float32)
        _store(place_of(destination, width, row_line, pool), x.to(DTYPE), x_tail.to(DTYPE), width, HEAD, TAIL)


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
    scores,
    point,
    num_points,
    max_abs,
    hidden_stride,
    residual_stride,
    width,
    HAS_RESIDUAL: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    row = tl.program_id(0)
    row_line = row_table + row * ROW_FIELDS
    program = tl.load(row_line)
    if program < 0:
        return
    # All loads that a row with one operation needs are issued before any result is used, to overlap their latency. Only
    # rows of busy programs are loaded ahead, before the line says whether this point has work for them.
    ahead = tl.where(tl.load(row_line + 3) != 0, width, 0)  # how many columns are loaded ahead: all or none
    h_at = hidden + row.to(tl.int64) * hidden_stride
    r_at = residual + row.to(tl.int64) * residual_stride
    h, h_tail = _load(h_at, ahead, HEAD, TAIL)
    r, r_tail = h, h_tail
    if HAS_RESIDUAL:
        r, r_tail = _load(r_at, ahead, HEAD, TAIL)
    line = lines + (program * num_points + point) * LINE_FIELDS
    first = tl.load(line)
    count = tl.load(line + 1)
    first_destination = tl.load(line + 2)
    second_destination = tl.load(line + 3)
    code = tl.load(line + 4)
    if (count == 0) & (first_destination < 0) & (second_destination < 0):
        return
    scale_or_low, high, gate = number(line + 5), number(line + 6), tl.load(line + 7)
    inverse = tl.load(inverse_norms + (code & VECTOR))
    v, v_tail = _load(bank + (code & VECTOR).to(tl.int64) * width, tl.where(count > 0, width, 0), HEAD, TAIL)
    is_gated = (code & GATED) != 0  # otherwise nothing is read
    g, g_tail = _load(bank + (gate & VECTOR).to(tl.int64) * width, tl.where(is_gated, width, 0), HEAD, TAIL)
    threshold, sharpness, gate_factor = load_gate(code, gate, entries + (first + count) * ENTRY_FIELDS, inverse_norms)
    h, h_tail = _load_if_not(ahead, h_at, width, h, h_tail, HEAD, TAIL)
    x, x_tail = h.to(tl.float32), h_tail.to(tl.float32)
    if HAS_RESIDUAL:
        r, r_tail = _load_if_not(ahead, r_at, width, r, r_tail, HEAD, TAIL)
        x += r.to(tl.float32)
        x_tail += r_tail.to(tl.float32)
    dtype: tl.constexpr = hidden.dtype.element_ty
    _keep(x, x_tail, _before(first_destination, count), 1, width, row_line, pool, dtype, HEAD, TAIL)
    _keep(x, x_tail, _before(second_destination, count), 1, width, row_line, pool, dtype, HEAD, TAIL)
    if count > 0:
        x, x_tail, is_moved, is_far = _steer(
            x, x_tail, v, v_tail, g, g_tail, code, scale_or_low, high, gate, threshold, sharpness, gate_factor, inverse,
            width, first, count, entries, bank, inverse_norms, max_abs, scores + row * SCORE_COLUMNS, HEAD, TAIL,
        )  # fmt: skip
        _write_back(x, x_tail, is_moved, is_far, h_at, r_at, width, max_abs, dtype, HAS_RESIDUAL, HEAD, TAIL)
    _keep_written(first_destination, count, h_at, r_at, width, row_line, pool, dtype, HAS_RESIDUAL, HEAD, TAIL)
    _keep_written(second_destination, count, h_at, r_at, width, row_line, pool, dtype, HAS_RESIDUAL, HEAD, TAIL)


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
    scores,
    point,
    num_points,
    max_abs,
    hidden_stride,
    residual_stride,
    width,
    epsilon,
    PLUS_ONE: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    row = tl.program_id(0)
    row_line = row_table + row * ROW_FIELDS
    program = tl.load(row_line)
    h, h_tail = _load(hidden + row.to(tl.int64) * hidden_stride, width, HEAD, TAIL)
    r, r_tail = _load(residual + row.to(tl.int64) * residual_stride, width, HEAD, TAIL)
    # No branches: all loads that a row with one operation needs are issued before the row itself is used.
    is_tapped = program >= 0
    line = lines + (tl.maximum(program, 0) * num_points + point) * LINE_FIELDS
    first = tl.load(line, mask=is_tapped, other=0)
    count = tl.load(line + 1, mask=is_tapped, other=0)
    first_destination = tl.load(line + 2, mask=is_tapped, other=-1)
    second_destination = tl.load(line + 3, mask=is_tapped, other=-1)
    is_steered = count > 0
    code = tl.load(line + 4, mask=is_steered, other=0)
    scale_or_low = tl.load(line + 5, mask=is_steered, other=0).to(tl.float32, bitcast=True)
    high = tl.load(line + 6, mask=is_steered, other=0).to(tl.float32, bitcast=True)
    gate = tl.load(line + 7, mask=is_steered, other=0)
    inverse = tl.load(inverse_norms + (code & VECTOR), mask=is_steered, other=0.0)
    v, v_tail = _load(bank + (code & VECTOR).to(tl.int64) * width, tl.where(is_steered, width, 0), HEAD, TAIL)
    is_gated = (code & GATED) != 0  # otherwise nothing is read
    g, g_tail = _load(bank + (gate & VECTOR).to(tl.int64) * width, tl.where(is_gated, width, 0), HEAD, TAIL)
    threshold, sharpness, gate_factor = load_gate(code, gate, entries + (first + count) * ENTRY_FIELDS, inverse_norms)
    x = h.to(tl.float32) + r.to(tl.float32)
    x_tail = h_tail.to(tl.float32) + r_tail.to(tl.float32)
    dtype: tl.constexpr = hidden.dtype.element_ty
    _keep(x, x_tail, first_destination, 1, width, row_line, pool, dtype, HEAD, TAIL)
    _keep(x, x_tail, second_destination, 1, width, row_line, pool, dtype, HEAD, TAIL)
    if is_steered:
        x, x_tail, is_moved, is_far = _steer(
            x, x_tail, v, v_tail, g, g_tail, code, scale_or_low, high, gate, threshold, sharpness, gate_factor, inverse,
            width, first, count, entries, bank, inverse_norms, max_abs, scores + row * SCORE_COLUMNS, HEAD, TAIL,
        )  # fmt: skip
        if is_far | (is_moved == 0):
            h, h_tail = _load_again(hidden + row.to(tl.int64) * hidden_stride, width, HEAD, TAIL)
            r, r_tail = _load_again(residual + row.to(tl.int64) * residual_stride, width, HEAD, TAIL)
            original = h.to(tl.float32) + r.to(tl.float32)
            original_tail = h_tail.to(tl.float32) + r_tail.to(tl.float32)
            # A row that no operation moves keeps its bits: steering turns negative zeros into positive ones.
            x = tl.where(is_moved, bounded(x, original, max_abs), original)
            x_tail = tl.where(is_moved, bounded(x_tail, original_tail, max_abs), original_tail)
    _keep(x, x_tail, first_destination, 0, width, row_line, pool, dtype, HEAD, TAIL)
    _keep(x, x_tail, second_destination, 0, width, row_line, pool, dtype, HEAD, TAIL)
    after, after_tail = x.to(dtype), x_tail.to(dtype)
    _store(summed + row.to(tl.int64) * width, after, after_tail, width, HEAD, TAIL)
    w, w_tail = _load(weight, width, HEAD, TAIL)
    # The norm is that of vLLM's fused_add_rms_norm: of the sum before rounding. It is rounded once, at the end. vLLM's
    # definition also rounds before it multiplies by the weight, but compiled models do not.
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


_launch_tap, _launch_tap_norm = Launcher(_tap_kernel), Launcher(_tap_norm_kernel)


class KernelTables(NamedTuple):
    """The tables that the kernels read, all at fixed addresses."""

    rows: Tensor
    """Program (-1: none), place, stride and busy flag of each row, int32 [at least rows, `tables.ROW_FIELDS`]."""
    programs: ProgramTable
    bank: VectorBank
    pool: BlockPool | None
    """The capture blocks; None on a rank that only steers."""
    scratch: Tensor | None = None
    """Memory for `chunked_kernels.tap`, float32 [programs, width]; None if rows fit the registers."""
    scores: Tensor | None = None
    """Receives the scores of rows, float32 [rows, MAX_PROBE_OUTPUTS]; None if no row is scored."""

    def destination(self, hidden: Tensor) -> Tensor:
        """Return the memory of the capture blocks; without them any tensor, which is not written."""
        return self.pool.memory if self.pool is not None else hidden

    def arguments(self, hidden: Tensor, point: int) -> tuple[object, ...]:
        """Return the arguments that both kernels share, in their order."""
        programs, bank = self.programs, self.bank
        return (
            self.rows,
            programs.lines,
            programs.entries,
            bank.vectors,
            bank.inverse_norms,
            self.destination(hidden),
            self.scores if self.scores is not None else bank.inverse_norms,  # not written without operations that score
            point,
            programs.lines.shape[1],
            reach(hidden.dtype),
        )


def tap(hidden: Tensor, residual: Tensor | None, point: int, tables: KernelTables) -> None:
    """Steer and capture the sums `hidden` + `residual`, each [rows, hidden]. Changes `hidden` in place."""
    rows, width = hidden.shape
    if not rows:
        return
    head, tail = _split(width)
    _launch_tap(
        (rows, 1, 1),
        (
            hidden,
            residual if residual is not None else hidden,
            *tables.arguments(hidden, point),
            hidden.stride(0),
            residual.stride(0) if residual is not None else 0,
            width,
        ),
        {"HAS_RESIDUAL": residual is not None, "HEAD": head, "TAIL": tail},
        **_options(width, hidden.device, has_norm=False),
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
    """Steer and capture the sums `hidden` + `residual`, and compute their RMS norm. Changes neither input.

    Args:
        hidden: [rows, hidden].
        residual: [rows, hidden].
        weight: The weight of the norm, [hidden].
        epsilon: The epsilon of the norm.
        point: The tap point.
        tables: The tables.
        plus_one: Whether the norm multiplies by weight + 1 (Gemma) instead of weight.

    Returns:
        The norm of the steered sum, and the steered sum, each [rows, hidden] in the dtype of `hidden`.
    """
    rows, width = hidden.shape
    normed, summed = hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)
    if rows:
        head, tail = _split(width)
        _launch_tap_norm(
            (rows, 1, 1),
            (
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
            ),
            {"PLUS_ONE": 1.0 if plus_one else 0.0, "HEAD": head, "TAIL": tail},
            **_options(width, hidden.device, has_norm=True),
        )
    return normed, summed


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


@cache
def _split(width: int) -> tuple[int, int]:
    """Return the lengths of a row's head and tail, which are powers of two; 0 is no tail.

    Triton's blocks are powers of two. A row of 2560 elements in a block of 4096 would leave three eighths of the
    threads idle.
    """
    head = 1 << (width.bit_length() - 1)
    tail = triton.next_power_of_2(width - head) if width > head else 0
    return (head, tail) if tail < head else (2 * head, 0)


_REGISTERS: dict[tuple[int, int], dict[object, dict[int, int]]] = {
    (9, 0): {_tap_kernel: {2560: 96}, _tap_norm_kernel: {1536: 80, 2560: 96, 4096: 128}},
    (10, 0): {_tap_kernel: {1536: 96}, _tap_norm_kernel: {2560: 104, 4096: 128}},
}
"""The most registers of a thread, by the GPU's capability, the kernel and the width of a row.

On an H100, a multiprocessor then holds one more row of 2560 or 4096 elements than with the compiler's own choice. In
the other entries, that choice makes threads spill registers with Triton 3.7 or 3.9. No limit may make them spill with
3.9. With 3.6 and 3.7, of vLLM 0.24 and 0.32, only `_tap_norm_kernel` spills, one or two registers at 4096: a test
compiles all entries, and has the numbers of each version. Rows were right in all tests on an H100.
"""


class _Options(TypedDict):
    num_warps: int
    maxnreg: int | None


def _registers(kernel: object, width: int, capability: tuple[int, int]) -> int | None:
    """Return the most registers that a thread may have; None leaves it to the compiler."""
    return _REGISTERS.get(capability, {}).get(kernel, {}).get(width)


@cache
def _options(width: int, device: torch.device, *, has_norm: bool) -> _Options:
    """Return with how many warps and registers a kernel is launched. To find that out takes as long as the launch."""
    kernel = _tap_norm_kernel if has_norm else _tap_kernel
    return {"num_warps": _warps(*_split(width)), "maxnreg": _registers(kernel, width, _capability(device))}


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; (0, 0) for a CPU, where Triton's interpreter runs the kernels."""
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
