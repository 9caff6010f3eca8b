# ruff: noqa: ANN001, ANN201, ANN202, N803 - a Triton kernel is written without annotations, its constants in capitals
"""The kernel of a tap that runs on its own after a layer: it steers rows in place, and captures them.

A row waits for memory most of the time, so the kernel is faster if a multiprocessor holds more rows, and it holds more
if each needs fewer registers. That is why a row is in registers only once: the original is loaded again where it is
needed. So is a steered row that is captured, before or after its steering. If the first operation has a gate, its
vector takes the registers of the gate's vector.

With many rows, the number of instructions is a bound, too. Most rows are moved by one operation that only adds its
vector. Such a row is written with fewer instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inference_svc.taps.gpu.kernels.parts import (
    ENTRY_FIELDS,
    LINE_FIELDS,
    ROW_FIELDS,
    SCORE_COLUMNS,
    VECTOR,
    bounded,
    load_gate,
    number,
    written,
)
from inference_svc.taps.gpu.kernels.resident_rows import (
    AGAIN,
    added,
    after,
    before,
    keep,
    keep_from_memory,
    load,
    load_if,
    load_sum,
    store,
    zeros,
)
from inference_svc.taps.gpu.kernels.resident_steering import first_vector, steer


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _write_back(  # type: ignore[no-untyped-def]
    x,
    x_tail,
    is_far,
    is_added,
    factor,
    v,
    v_tail,
    h_at,
    r_at,
    max_abs,
    DTYPE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Write what steering changed back into the hidden row: factor * v, x, or the difference of x from the sum."""
    # The stored numbers must have no other use. Only then does the compiler round two of them with one instruction.
    if is_added:  # the usual case, in few instructions
        h, h_tail = load(h_at, WIDTH, HEAD, TAIL, AGAIN)
        h = h.to(tl.float32) + factor * v
        h_tail = h_tail.to(tl.float32) + factor * v_tail
        store(h_at, h.to(DTYPE), h_tail.to(DTYPE), WIDTH, HEAD, TAIL)
    else:
        if is_far:  # its loads are its own, so that the others need fewer registers
            _, _, original, original_tail = load_sum(h_at, r_at, HAS_RESIDUAL, WIDTH, HEAD, TAIL)
            x = bounded(x, original, max_abs)
            x_tail = bounded(x_tail, original_tail, max_abs)
        if HAS_RESIDUAL:
            y, y_tail, original, original_tail = load_sum(h_at, r_at, True, WIDTH, HEAD, TAIL)
            x = written(y + (x - original), DTYPE)
            x_tail = written(y_tail + (x_tail - original_tail), DTYPE)
        store(h_at, x.to(DTYPE), x_tail.to(DTYPE), WIDTH, HEAD, TAIL)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def tap_kernel(  # type: ignore[no-untyped-def]
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
    HAS_RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Steer and capture rows; see `resident.tap`."""
    row = tl.program_id(0)
    row_line = row_table + row * ROW_FIELDS
    program = tl.load(row_line)
    if program < 0:
        return
    # A row is loaded before anything is known of it, so that its loads overlap with those of its line and its vectors.
    # Only rows of busy programs are loaded ahead, before the line says whether this point has work for them.
    dtype: tl.constexpr = hidden.dtype.element_ty
    is_busy = tl.load(row_line + 3) != 0
    h_at = hidden + row.to(tl.int64) * hidden_stride
    r_at = residual + row.to(tl.int64) * residual_stride
    h, h_tail = zeros(dtype, HEAD, TAIL)
    h, h_tail = load_if(is_busy, h_at, h, h_tail, WIDTH, HEAD, TAIL)
    r, r_tail = zeros(residual.dtype.element_ty, HEAD, TAIL)
    if HAS_RESIDUAL:
        r, r_tail = load_if(is_busy, r_at, r, r_tail, WIDTH, HEAD, TAIL)
    line = lines + (program * num_points + point) * LINE_FIELDS
    first = tl.load(line)
    count = tl.load(line + 1)
    first_destination = tl.load(line + 2)
    second_destination = tl.load(line + 3)
    code, gate = tl.load(line + 4), tl.load(line + 7)
    scale_or_low, high = number(line + 5), number(line + 6)
    is_kept = (first_destination >= 0) | (second_destination >= 0)
    if count == 0:
        if is_kept:
            h, h_tail = load_if(is_busy == 0, h_at, h, h_tail, WIDTH, HEAD, TAIL)
            if HAS_RESIDUAL:
                r, r_tail = load_if(is_busy == 0, r_at, r, r_tail, WIDTH, HEAD, TAIL)
            x, x_tail = added(h, h_tail, r, r_tail, HAS_RESIDUAL)
            keep(x, x_tail, first_destination, row_line, pool, dtype, WIDTH, HEAD, TAIL)
            keep(x, x_tail, second_destination, row_line, pool, dtype, WIDTH, HEAD, TAIL)
        return
    if is_kept:
        # Before the vectors are loaded, because all of them together would need more registers.
        keep_from_memory(before(first_destination), h_at, r_at, row_line, pool, dtype, HAS_RESIDUAL, WIDTH, HEAD, TAIL)
        keep_from_memory(before(second_destination), h_at, r_at, row_line, pool, dtype, HAS_RESIDUAL, WIDTH, HEAD, TAIL)
        tl.debug_barrier()  # if rows are not aligned, one thread may load an element here that another stores later
    inverse = tl.load(inverse_norms + (code & VECTOR))
    v, v_tail = load(bank + first_vector(code, gate).to(tl.int64) * WIDTH, WIDTH, HEAD, TAIL)
    threshold, sharpness, gate_factor = load_gate(code, gate, entries + (first + count) * ENTRY_FIELDS, inverse_norms)
    h, h_tail = load_if(is_busy == 0, h_at, h, h_tail, WIDTH, HEAD, TAIL)
    if HAS_RESIDUAL:
        r, r_tail = load_if(is_busy == 0, r_at, r, r_tail, WIDTH, HEAD, TAIL)
    x, x_tail = added(h, h_tail, r, r_tail, HAS_RESIDUAL)
    x, x_tail, is_moved, is_far, is_added, factor, v, v_tail = steer(
        x, x_tail, v, v_tail, v, v_tail, code, scale_or_low, high, gate, threshold, sharpness, gate_factor, inverse,
        first, count, entries, bank, inverse_norms, max_abs, scores + row * SCORE_COLUMNS, True, WIDTH, HEAD, TAIL,
    )  # fmt: skip
    if is_moved:  # a row that no operation moves keeps its bits, even negative zeros and infinities
        _write_back(
            x, x_tail, is_far, is_added, factor, v, v_tail, h_at, r_at, max_abs, dtype, HAS_RESIDUAL, WIDTH, HEAD, TAIL
        )
    if is_kept:
        tl.debug_barrier()  # for the same reason
        keep_from_memory(after(first_destination), h_at, r_at, row_line, pool, dtype, HAS_RESIDUAL, WIDTH, HEAD, TAIL)
        keep_from_memory(after(second_destination), h_at, r_at, row_line, pool, dtype, HAS_RESIDUAL, WIDTH, HEAD, TAIL)
