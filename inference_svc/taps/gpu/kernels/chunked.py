# ruff: noqa: ANN001, ANN202, N803 - a Triton kernel is written without annotations, its constants in capitals
"""The kernels of the tap that handle a row in chunks, so that rows of any width fit the registers.

`tap` is for rows wider than `tables.MAX_RESIDENT`. It does what `resident.tap` does, but adds every vector to the sum.
`tap_copy` captures rows that cannot be steered, and copies them in the same pass. `tap_experts` captures the experts
that a router chose.

A kernel that needs more registers than a GPU has spills them to memory. This is slow, and ptxas has computed wrong
addresses in such a kernel: a value that it computed again came from a register with new contents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from inference_svc.taps.gpu.kernels.launching import Launcher
from inference_svc.taps.gpu.kernels.parts import (
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
    summable,
    written,
)
from inference_svc.taps.gpu.tables import MAX_RESIDENT

if TYPE_CHECKING:
    from torch import Tensor

    from inference_svc.taps.gpu.kernels.resident import KernelTables

_CHUNK = 4096
"""How many elements of a row are in registers at a time."""
_WARPS = 8
_PROGRAMS = 264
"""Programs of `tap`: two for each multiprocessor of an H100 or H200. Each takes a row, then the next."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sum_of_products(row, other, width, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the inner product of two float32 rows in memory."""
    products = tl.zeros((CHUNK,), dtype=tl.float32)
    chunk = tl.arange(0, CHUNK)
    for start in range(0, width, CHUNK):
        inside = start + chunk < width
        x = tl.load(row + start + chunk, mask=inside, other=0.0)
        products += x * tl.load(other + start + chunk, mask=inside, other=0.0)
    return tl.sum(products, axis=0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _opening(row, width, code, entry, count, bank, inverse_norms, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return how far the gate of an operation is open for a row, as `resident_steering._opening` does."""
    opening = tl.full((), 1.0, dtype=tl.float32)
    if code & GATED:
        gate = tl.load(entry + 3)
        threshold, sharpness, factor = load_gate(code, gate, entry + count * ENTRY_FIELDS, inverse_norms)
        measured = _sum_of_products(row, bank + (gate & VECTOR).to(tl.int64) * width, width, CHUNK) * factor
        if (gate >> KIND_SHIFT) == COSINE:
            measured /= tl.sqrt(_sum_of_products(row, row, width, CHUNK))
        opening = opened(gate, measured, threshold, sharpness)
    return opening


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _apply_in_chunks(row, width, entry, count, bank, inverse_norms, max_abs, scores, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply one operation to a float32 row in memory; return whether it moved the row, and whether it moved it far."""
    code = tl.load(entry)
    scale_or_low, high = number(entry + 1), number(entry + 2)
    kind, vector = code >> KIND_SHIFT, code & VECTOR
    inverse = tl.load(inverse_norms + vector)
    along = bank + vector.to(tl.int64) * width
    chunk = tl.arange(0, CHUNK)
    opening = _opening(row, width, code, entry, count, bank, inverse_norms, CHUNK)
    factor = tl.where(is_direct(kind), 1.0, scale_or_low)
    if (kind != ADD) & (kind != CLAMP) & (is_direct(kind) == 0):
        product = _sum_of_products(row, along, width, CHUNK)
        if kind == SCORE:
            tl.store(scores + tl.load(entry + 3), product)
        factor = factor_of(kind, product * inverse, scale_or_low, high, inverse)
    factor = summable(code, gated(kind, factor, opening, scale_or_low, high), inverse)
    before, after = tl.zeros((CHUNK,), dtype=tl.float32), tl.zeros((CHUNK,), dtype=tl.float32)
    for start in range(0, width, CHUNK):
        inside = start + chunk < width
        x = tl.load(row + start + chunk, mask=inside, other=0.0)
        moved = moved_by(kind, x, tl.load(along + start + chunk, mask=inside, other=0.0), factor)
        before += x * x
        after += moved * moved
        tl.store(row + start + chunk, moved, mask=inside)
    tl.debug_barrier()  # other threads may read what this one wrote
    if code & KEEP_NORM:
        rescaled = rescaling(tl.sum(before, axis=0), tl.sum(after, axis=0), factor)
        for start in range(0, width, CHUNK):
            inside = start + chunk < width
            x = tl.load(row + start + chunk, mask=inside, other=0.0)
            tl.store(row + start + chunk, x * rescaled, mask=inside)
        tl.debug_barrier()
    return factor != 0.0, is_far_moved(code, factor, inverse, max_abs)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keep_chunk(destination, before, after, columns, width, row_line, pool):  # type: ignore[no-untyped-def]
    """Store a chunk of a row into its block, as `resident_rows.keep` stores a row."""
    if destination >= 0:
        kept = tl.where((destination & 1) != 0, before, after)
        tl.store(place_of(destination, width, row_line, pool) + columns, kept, mask=columns < width)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sum_chunk(h_at, r_at, columns, width, HAS_RESIDUAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a chunk of a row in float32: what the layer returned, the residual, and their sum."""
    h = tl.load(h_at + columns, mask=columns < width, other=0.0).to(tl.float32)
    r, x = h, h
    if HAS_RESIDUAL:
        r = tl.load(r_at + columns, mask=columns < width, other=0.0).to(tl.float32)
        x = h + r
    return h, r, x


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _steer_in_chunks(  # type: ignore[no-untyped-def]
    h_at, r_at, row, width, first, count, entries, bank, inverse_norms, max_abs, scores, HAS_RESIDUAL: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write a steered row in float32 to `row`; return whether it moved, and whether it moved far."""
    tl.debug_barrier()  # other threads may still read the row before
    for start in range(0, width, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        _, _, x = _sum_chunk(h_at, r_at, columns, width, HAS_RESIDUAL)
        tl.store(row + columns, x, mask=columns < width)
    tl.debug_barrier()
    moved, far = tl.zeros((), dtype=tl.int1), tl.zeros((), dtype=tl.int1)
    for index in range(first, first + count):
        entry = entries + index * ENTRY_FIELDS
        moves, strays = _apply_in_chunks(row, width, entry, count, bank, inverse_norms, max_abs, scores, CHUNK)
        moved = moved | moves
        far = far | strays
    return moved, far


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator, unused-ignore]
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
    scratch,
    rows,
    hidden_stride,
    residual_stride,
    width,
    HAS_RESIDUAL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    dtype: tl.constexpr = hidden.dtype.element_ty
    steered_row = scratch + tl.program_id(0).to(tl.int64) * width
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        row_line = row_table + row * ROW_FIELDS
        program = tl.load(row_line)
        line = lines + (tl.maximum(program, 0) * num_points + point) * LINE_FIELDS
        count = tl.load(line + 1, mask=program >= 0, other=0)
        first_destination = tl.load(line + 2, mask=program >= 0, other=-1)
        second_destination = tl.load(line + 3, mask=program >= 0, other=-1)
        h_at = hidden + tl.cast(row, tl.int64) * hidden_stride
        r_at = residual + tl.cast(row, tl.int64) * residual_stride
        moved, far = tl.zeros((), dtype=tl.int1), tl.zeros((), dtype=tl.int1)
        if count > 0:
            moved, far = _steer_in_chunks(
                h_at, r_at, steered_row, width, tl.load(line), count, entries, bank, inverse_norms, max_abs,
                scores + row * SCORE_COLUMNS, HAS_RESIDUAL, CHUNK,
            )  # fmt: skip
        # A row that no operation moves keeps its bits, even negative zeros and infinities.
        if moved | (first_destination >= 0) | (second_destination >= 0):
            for start in range(0, width, CHUNK):
                columns = start + tl.arange(0, CHUNK)
                h, r, x = _sum_chunk(h_at, r_at, columns, width, HAS_RESIDUAL)
                before = x.to(dtype)
                after = before
                if moved:
                    steered = tl.load(steered_row + columns, mask=columns < width, other=0.0)
                    if far:
                        steered = bounded(steered, x, max_abs)
                    if HAS_RESIDUAL:
                        steered = written(h + (steered - x), dtype)  # only the difference is written back
                    after = steered.to(dtype)
                    tl.store(h_at + columns, after, mask=columns < width)
                    if HAS_RESIDUAL:
                        after = (after.to(tl.float32) + r).to(dtype)
                _keep_chunk(first_destination, before, after, columns, width, row_line, pool)
                _keep_chunk(second_destination, before, after, columns, width, row_line, pool)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tap_copy_kernel(  # type: ignore[no-untyped-def]
    hidden, copy, row_table, lines, pool, point, num_points, hidden_stride, width, CHUNK: tl.constexpr
):
    row = tl.program_id(0)
    row_line = row_table + row * ROW_FIELDS
    program = tl.load(row_line)
    line = lines + (tl.maximum(program, 0) * num_points + point) * LINE_FIELDS
    first_destination = tl.load(line + 2, mask=program >= 0, other=-1)
    second_destination = tl.load(line + 3, mask=program >= 0, other=-1)
    for start in range(0, width, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        inside = columns < width
        h = tl.load(hidden + row.to(tl.int64) * hidden_stride + columns, mask=inside)
        tl.store(copy + row.to(tl.int64) * width + columns, h, mask=inside)
        _keep_chunk(first_destination, h, h, columns, width, row_line, pool)
        _keep_chunk(second_destination, h, h, columns, width, row_line, pool)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tap_experts_kernel(  # type: ignore[no-untyped-def]
    weights, experts, row_table, lines, pool, point, num_points, weights_stride, experts_stride, chosen, scale, width,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    row_line = row_table + row * ROW_FIELDS
    program = tl.load(row_line)
    line = lines + (tl.maximum(program, 0) * num_points + point) * LINE_FIELDS
    destination = tl.load(line + 2, mask=program >= 0, other=-1)
    if destination < 0:
        return
    for start in range(0, width, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        values = tl.zeros((CHUNK,), dtype=tl.float32)
        for index in range(chosen):
            expert = tl.load(experts + row.to(tl.int64) * experts_stride + index)
            weight = tl.load(weights + row.to(tl.int64) * weights_stride + index).to(tl.float32)
            values += tl.where(columns == expert, weight * scale, 0.0)
        _keep_chunk(destination, values, values, columns, width, row_line, pool)


_launch_tap, _launch_tap_copy, _launch_tap_experts = map(Launcher, (_tap_kernel, _tap_copy_kernel, _tap_experts_kernel))


def scratch_for(width: int, device: torch.device) -> Tensor | None:
    """Return the memory that `tap` needs for rows of this width; None if `resident.tap` takes them."""
    return torch.empty(_PROGRAMS, width, dtype=torch.float32, device=device) if width > MAX_RESIDENT else None


def tap(hidden: Tensor, residual: Tensor | None, point: int, tables: KernelTables) -> None:
    """Do what `resident.tap` does, with `tables.scratch`."""
    rows, width = hidden.shape
    if not rows:
        return
    assert tables.scratch is not None  # noqa: S101 - the caller has it for rows of this width
    _launch_tap(
        (min(rows, len(tables.scratch)), 1, 1),
        (
            hidden,
            residual if residual is not None else hidden,
            *tables.arguments(hidden, point),
            tables.scratch,
            rows,
            hidden.stride(0),
            residual.stride(0) if residual is not None else 0,
            width,
        ),
        {"HAS_RESIDUAL": residual is not None, "CHUNK": _CHUNK},
        num_warps=_WARPS,
    )


def tap_copy(hidden: Tensor, point: int, tables: KernelTables) -> Tensor:
    """Capture rows, [rows, width], at a point that cannot be steered. Return a contiguous copy of them."""
    rows, width = hidden.shape
    copy = hidden.new_empty(hidden.shape)
    if rows:
        chunk = min(triton.next_power_of_2(width), _CHUNK)
        lines = tables.programs.lines
        _launch_tap_copy(
            (rows, 1, 1),
            (
                hidden,
                copy,
                tables.rows,
                lines,
                tables.destination(hidden),
                point,
                lines.shape[1],
                hidden.stride(0),
                width,
            ),
            {"CHUNK": chunk},
            num_warps=max(1, min(_WARPS, chunk // 512)),
        )
    return copy


def tap_experts(
    weights: Tensor, experts: Tensor, num_experts: int, scale: float, point: int, tables: KernelTables
) -> None:
    """Capture the rows of `op.expert_rows`. Nothing is computed for rows that are not captured."""
    rows, chosen = weights.shape
    if rows:
        chunk = min(triton.next_power_of_2(num_experts), _CHUNK)
        lines = tables.programs.lines
        _launch_tap_experts(
            (rows, 1, 1),
            (
                weights,
                experts,
                tables.rows,
                lines,
                tables.destination(weights),
                point,
                lines.shape[1],
                weights.stride(0),
                experts.stride(0),
                chosen,
                scale,
                num_experts,
            ),
            {"CHUNK": chunk},
            num_warps=max(1, min(_WARPS, chunk // 512)),
        )
