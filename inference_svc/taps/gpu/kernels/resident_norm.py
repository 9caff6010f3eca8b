# ruff: noqa: ANN001, ANN201, ANN202, N803 - a Triton kernel is written without annotations, its constants in capitals
"""The kernel of a tap that replaces the add and the RMS norm after a layer.

With it the model runs as many kernels as without taps, so idle taps cost almost nothing.
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
)
from inference_svc.taps.gpu.kernels.resident_rows import (
    added,
    after,
    before,
    dot,
    keep,
    keep_from_memory,
    load,
    load_if,
    load_sum,
    row_of,
    store,
    zeros,
)
from inference_svc.taps.gpu.kernels.resident_steering import load_gate_vector, steer


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _plus(w, ONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a weight in float32, plus ONE, which is 0 or 1."""
    scale = w.to(tl.float32)
    if ONE != 0.0:
        scale += ONE
    return scale


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def tap_norm_kernel(  # type: ignore[no-untyped-def]
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
    epsilon,
    PLUS_ONE: tl.constexpr,
    MULTIPROCESSORS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Steer and norm rows; see `resident.tap_norm`."""
    row = row_of(tl.program_id(0), tl.num_programs(0), MULTIPROCESSORS)
    dtype: tl.constexpr = hidden.dtype.element_ty
    row_line = row_table + row * ROW_FIELDS
    program = tl.load(row_line)
    h_at = hidden + row.to(tl.int64) * hidden_stride
    r_at = residual + row.to(tl.int64) * residual_stride
    h, h_tail = load(h_at, WIDTH, HEAD, TAIL)
    r, r_tail = load(r_at, WIDTH, HEAD, TAIL)
    # All loads that a row with one operation needs are issued before the row itself is used.
    is_tapped = program >= 0
    line = lines + (tl.maximum(program, 0) * num_points + point) * LINE_FIELDS
    first = tl.load(line, mask=is_tapped, other=0)
    count = tl.load(line + 1, mask=is_tapped, other=0)
    first_destination = tl.load(line + 2, mask=is_tapped, other=-1)
    second_destination = tl.load(line + 3, mask=is_tapped, other=-1)
    code = tl.load(line + 4, mask=is_tapped, other=0)
    scale_or_low = tl.load(line + 5, mask=is_tapped, other=0).to(tl.float32, bitcast=True)
    high = tl.load(line + 6, mask=is_tapped, other=0).to(tl.float32, bitcast=True)
    gate = tl.load(line + 7, mask=is_tapped, other=0)
    is_steered = count > 0
    is_kept = (first_destination >= 0) | (second_destination >= 0)
    if is_steered & is_kept:
        # Before the vectors are loaded, because all of them together would need more registers.
        keep_from_memory(before(first_destination), h_at, r_at, row_line, pool, dtype, True, WIDTH, HEAD, TAIL)
        keep_from_memory(before(second_destination), h_at, r_at, row_line, pool, dtype, True, WIDTH, HEAD, TAIL)
    inverse = tl.load(inverse_norms + (code & VECTOR), mask=is_steered, other=0.0)
    v, v_tail = zeros(tl.float32, HEAD, TAIL)
    v, v_tail = load_if(is_steered, bank + (code & VECTOR).to(tl.int64) * WIDTH, v, v_tail, WIDTH, HEAD, TAIL)
    g, g_tail = load_gate_vector(code, gate, bank, WIDTH, HEAD, TAIL)
    threshold, sharpness, gate_factor = load_gate(code, gate, entries + (first + count) * ENTRY_FIELDS, inverse_norms)
    x, x_tail = added(h, h_tail, r, r_tail, True)
    if is_steered:
        x, x_tail, _, is_far, _, _, _, _ = steer(
            x, x_tail, v, v_tail, g, g_tail, code, scale_or_low, high, gate, threshold, sharpness, gate_factor, inverse,
            first, count, entries, bank, inverse_norms, max_abs, scores + row * SCORE_COLUMNS, False, WIDTH, HEAD, TAIL,
        )  # fmt: skip
        if is_far:
            _, _, original, original_tail = load_sum(h_at, r_at, True, WIDTH, HEAD, TAIL)
            x = bounded(x, original, max_abs)
            x_tail = bounded(x_tail, original_tail, max_abs)
    if is_kept:
        first_destination = tl.where(is_steered, after(first_destination), first_destination)
        second_destination = tl.where(is_steered, after(second_destination), second_destination)
        keep(x, x_tail, first_destination, row_line, pool, dtype, WIDTH, HEAD, TAIL)
        keep(x, x_tail, second_destination, row_line, pool, dtype, WIDTH, HEAD, TAIL)
    store(summed + row.to(tl.int64) * WIDTH, x.to(dtype), x_tail.to(dtype), WIDTH, HEAD, TAIL)
    w, w_tail = load(weight, WIDTH, HEAD, TAIL)
    # The norm is that of vLLM's fused_add_rms_norm: of the sum before rounding. It is rounded once, at the end. vLLM's
    # definition also rounds before it multiplies by the weight, but compiled models do not.
    rescaled = tl.rsqrt(dot(x, x_tail, x, x_tail, TAIL) / WIDTH + epsilon)
    y = (x * rescaled * _plus(w, PLUS_ONE)).to(dtype)
    y_tail = (x_tail * rescaled * _plus(w_tail, PLUS_ONE)).to(dtype)
    store(normed + row.to(tl.int64) * WIDTH, y, y_tail, WIDTH, HEAD, TAIL)
