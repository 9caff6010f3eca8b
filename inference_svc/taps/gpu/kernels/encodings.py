# ruff: noqa: ANN001, ANN202, N803 - a Triton kernel is written without annotations, its constants in capitals
"""The encodings on a GPU: Triton kernels that read rows in a block and write encoded rows without gaps.

capture.proto defines every bit of the results. Divisions and roundings are those of IEEE 754, as in numpy. Numbers are
written byte by byte, because an encoded row may start at any address. Triton does not specialise the kernels on sizes
that change from block to block: the startup check compiles all variants that later requests use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from inference_svc.taps.gpu.kernels.launching import Launcher

if TYPE_CHECKING:
    from torch import Tensor

_COLUMNS = 128
"""How many dimensions one Triton program quantises in `quantize_columns`."""

_TILE_ROWS, _TILE_VECTORS, _TILE_WIDTH = 32, 16, 64
"""In `inner_products`, how many rows and vectors one Triton program multiplies, and how much of the width at a time."""

_CHUNK = 4096
"""How many elements of a row one Triton program has in registers at a time. It reads longer rows again in each pass: a
row of 16384 elements does not fit the registers, and kernels that spill them are unsafe (see `chunked`)."""

_LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
_ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it rounds a float32 to an integer, ties to even."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _write(at, bits, mask, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write integers as BYTES bytes each, little-endian."""
    for byte in tl.static_range(BYTES):
        tl.store(at + byte, ((bits >> (8 * byte)) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scale_of(low, high, is_finite):  # type: ignore[no-untyped-def]
    """Return scale and zero for numbers from `low` to `high`, and whether both are finite. If not, both are NaN."""
    scale = tl.div_rn(high - low, 255.0)
    is_finite = is_finite & (scale <= _LARGEST_FLOAT)
    nan = float("nan")
    return tl.where(is_finite, scale, nan), tl.where(is_finite, low, nan), is_finite


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _quantized(x, scale, zero, is_finite):  # type: ignore[no-untyped-def]
    """Return the quantised numbers, integers from 0 to 255."""
    is_spread = is_finite & (scale > 0)
    steps = tl.div_rn(tl.where(is_spread, x - zero, 0.0), tl.where(is_spread, scale, 1.0))
    rounded = (tl.minimum(steps, 255.0) + _ROUNDER) - _ROUNDER
    return rounded.to(tl.int32)


@triton.jit(do_not_specialize=["positions", "capacity"])  # type: ignore[untyped-decorator, unused-ignore]
def _quantize_rows_kernel(  # type: ignore[no-untyped-def]
    source, target, positions, capacity, width, factor, CHUNK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    source += ((row // positions) * capacity + row % positions) * width
    chunk = tl.arange(0, CHUNK)
    lows = tl.full((CHUNK,), _LARGEST_FLOAT, dtype=tl.float32)
    highs = tl.full((CHUNK,), -_LARGEST_FLOAT, dtype=tl.float32)
    finite = tl.zeros((CHUNK,), dtype=tl.int32)
    for first in range(0, width, CHUNK):
        mask = first + chunk < width
        x = tl.load(source + first + chunk, mask=mask, other=0.0).to(tl.float32) * factor
        lows = tl.where(mask, tl.minimum(lows, x), lows)
        highs = tl.where(mask, tl.maximum(highs, x), highs)
        finite += (mask & (tl.abs(x) <= _LARGEST_FLOAT)).to(tl.int32)
    is_finite = tl.sum(finite, axis=0) == width
    scale, zero, is_finite = _scale_of(tl.min(lows, axis=0), tl.max(highs, axis=0), is_finite)
    encoded = target + row * (8 + width)
    _write(encoded, scale.to(tl.int32, bitcast=True), True, 4)
    _write(encoded + 4, zero.to(tl.int32, bitcast=True), True, 4)
    for first in range(0, width, CHUNK):
        mask = first + chunk < width
        x = tl.load(source + first + chunk, mask=mask, other=0.0).to(tl.float32) * factor
        tl.store(encoded + 8 + first + chunk, _quantized(x, scale, zero, is_finite).to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["positions", "capacity", "unit_bytes"])  # type: ignore[untyped-decorator, unused-ignore]
def _quantize_columns_kernel(  # type: ignore[no-untyped-def]
    source, target, positions, capacity, unit_bytes, width, COLUMNS: tl.constexpr
):
    unit = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < width
    first = source + unit * capacity * width + columns
    x = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    low, high, is_finite = x, x, tl.abs(x) <= _LARGEST_FLOAT
    for position in range(1, positions):
        x = tl.load(first + position * width, mask=mask, other=0.0).to(tl.float32)
        low, high = tl.minimum(low, x), tl.maximum(high, x)
        is_finite = is_finite & (tl.abs(x) <= _LARGEST_FLOAT)
    scale, zero, is_finite = _scale_of(low, high, is_finite)
    encoded = target + unit * unit_bytes
    _write(encoded + 4 * columns, scale.to(tl.int32, bitcast=True), mask, 4)
    _write(encoded + 4 * width + 4 * columns, zero.to(tl.int32, bitcast=True), mask, 4)
    for position in range(positions):
        x = tl.load(first + position * width, mask=mask, other=0.0).to(tl.float32)
        q = _quantized(x, scale, zero, is_finite).to(tl.uint8)
        tl.store(encoded + (8 + position) * width + columns, q, mask=mask)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _magnitude(bits, columns, width, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bits of a row's elements, and their magnitudes as integers in the same order; -1 beyond the row."""
    own = tl.load(bits + columns, mask=columns < width, other=0).to(tl.int32)
    return own, tl.where(columns < width, own & ((1 << (BITS - 1)) - 1), -1)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _is_kept(magnitude, threshold, room):  # type: ignore[no-untyped-def]
    """Return which elements of a chunk are kept, and how many more of those that equal the threshold may be kept."""
    equal = (magnitude == threshold).to(tl.int32)
    kept = (magnitude > threshold) | ((equal != 0) & (tl.cumsum(equal, axis=0) <= room))
    return kept, room - tl.sum(equal, axis=0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _range_of_kept(  # type: ignore[no-untyped-def]
    source, bits, width, threshold, room, count, BITS: tl.constexpr, CHUNK: tl.constexpr
):
    """Return the smallest and the largest kept element, and whether all are finite."""
    lows = tl.full((CHUNK,), _LARGEST_FLOAT, dtype=tl.float32)
    highs = tl.full((CHUNK,), -_LARGEST_FLOAT, dtype=tl.float32)
    finite = tl.zeros((CHUNK,), dtype=tl.int32)
    for first in range(0, width, CHUNK):
        columns = first + tl.arange(0, CHUNK)
        _, magnitude = _magnitude(bits, columns, width, BITS)
        kept, room = _is_kept(magnitude, threshold, room)
        x = tl.load(source + columns, mask=columns < width, other=0.0).to(tl.float32)
        lows = tl.where(kept, tl.minimum(lows, x), lows)
        highs = tl.where(kept, tl.maximum(highs, x), highs)
        finite += (kept & (tl.abs(x) <= _LARGEST_FLOAT)).to(tl.int32)
    return tl.min(lows, axis=0), tl.max(highs, axis=0), tl.sum(finite, axis=0) == count


@triton.jit(do_not_specialize=["positions", "capacity", "count"])  # type: ignore[untyped-decorator, unused-ignore]
def _keep_largest_kernel(  # type: ignore[no-untyped-def]
    source, bits, target, positions, capacity, width, count, BITS: tl.constexpr, QUANTIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = ((row // positions) * capacity + row % positions) * width
    source += at
    bits += at
    chunk = tl.arange(0, CHUNK)
    # The smallest kept magnitude: the largest threshold that at least `count` elements reach. It is built bit by bit.
    threshold = tl.zeros((), dtype=tl.int32)
    for index in range(BITS - 1):
        candidate = threshold | (1 << (BITS - 2 - index))
        reached = tl.zeros((CHUNK,), dtype=tl.int32)
        for first in range(0, width, CHUNK):
            _, magnitude = _magnitude(bits, first + chunk, width, BITS)
            reached += (magnitude >= candidate).to(tl.int32)
        threshold = tl.where(tl.sum(reached, axis=0) >= count, candidate, threshold)
    above = tl.zeros((CHUNK,), dtype=tl.int32)
    for first in range(0, width, CHUNK):
        _, magnitude = _magnitude(bits, first + chunk, width, BITS)
        above += (magnitude > threshold).to(tl.int32)
    room = count - tl.sum(above, axis=0)

    if QUANTIZE:
        low, high, is_finite = _range_of_kept(source, bits, width, threshold, room, count, BITS, CHUNK)
        scale, zero, is_finite = _scale_of(low, high, is_finite)
        encoded = target + row * (8 + 3 * count)
        _write(encoded, scale.to(tl.int32, bitcast=True), True, 4)
        _write(encoded + 4, zero.to(tl.int32, bitcast=True), True, 4)
        indices, values = encoded + 8, encoded + 8 + 2 * count
    else:
        indices = target + row * (2 + BITS // 8) * count
        values = indices + 2 * count
    placed = tl.zeros((), dtype=tl.int32)
    for first in range(0, width, CHUNK):
        columns = first + chunk
        own, magnitude = _magnitude(bits, columns, width, BITS)
        kept, room = _is_kept(magnitude, threshold, room)
        if QUANTIZE:
            kept = tl.where(is_finite, kept, columns < count)
        number = kept.to(tl.int32)
        place = placed + tl.cumsum(number, axis=0) - 1
        placed += tl.sum(number, axis=0)
        _write(indices + 2 * place, columns, kept, 2)
        if QUANTIZE:
            x = tl.load(source + columns, mask=columns < width, other=0.0).to(tl.float32)
            tl.store(values + place, _quantized(x, scale, zero, is_finite).to(tl.uint8), mask=kept)
        else:
            _write(values + (BITS // 8) * place, own, kept, BITS // 8)


@triton.jit(do_not_specialize=["rows", "positions", "capacity", "count", "stride"])  # type: ignore[untyped-decorator, unused-ignore]
def _inner_products_kernel(  # type: ignore[no-untyped-def]
    source, vectors, target, rows, positions, capacity, width, count, stride, vector_step, element_step,
    ROWS: tl.constexpr, VECTORS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    vector = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    at = source + ((row // positions) * capacity + row % positions) * width
    total = tl.zeros((ROWS, VECTORS), dtype=tl.float32)
    for first in range(0, width, WIDTH):
        column = first + tl.arange(0, WIDTH)
        inside = column < width
        x = tl.load(at[:, None] + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        v_at = vectors + vector[None, :].to(tl.int64) * vector_step + column[:, None].to(tl.int64) * element_step
        v = tl.load(v_at, mask=(vector < count)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(x.to(tl.float32), v.to(tl.float32), total, input_precision="ieee")
    place = target + row[:, None] * stride + vector[None, :]
    tl.store(place, total, mask=(row < rows)[:, None] & (vector < count)[None, :])


_launch_quantize_rows, _launch_quantize_columns, _launch_keep_largest, _launch_inner_products = map(
    Launcher, (_quantize_rows_kernel, _quantize_columns_kernel, _keep_largest_kernel, _inner_products_kernel)
)


def quantize_rows(rows: Tensor, out: Tensor, factor: float = 1.0) -> None:
    """Write rows times `factor`, quantised row by row: scale, zero and q of each row.

    Args:
        rows: [units, positions, width], contiguous except for gaps between units.
        out: Receives the encoded bytes, uint8.
        factor: Multiplies every element.
    """
    units, positions, width = rows.shape
    chunk = min(triton.next_power_of_2(width), _CHUNK)
    _launch_quantize_rows(
        (units * positions, 1, 1),
        (rows, out, positions, _capacity(rows), width, factor),
        {"CHUNK": chunk},
        num_warps=_warps(chunk),
    )


def quantize_columns(rows: Tensor, out: Tensor) -> None:
    """Write rows, quantised along dimensions: for each unit all scales, all zeros, then q of its rows."""
    units, positions, width = rows.shape
    unit_bytes = (8 + positions) * width
    _launch_quantize_columns(
        (units, triton.cdiv(width, _COLUMNS), 1),
        (rows, out, positions, _capacity(rows), unit_bytes, width),
        {"COLUMNS": _COLUMNS},
        num_warps=4,
    )


def keep_largest(rows: Tensor, out: Tensor, count: int, *, quantize: bool) -> None:
    """Write the `count` elements of largest magnitude of each row, as TOPK8 (`quantize`) or TOPK."""
    units, positions, width = rows.shape
    chunk = min(triton.next_power_of_2(width), _CHUNK)
    integers = rows.view(torch.int16 if rows.dtype.itemsize == 2 else torch.int32)  # noqa: PLR2004 - bytes
    _launch_keep_largest(
        (units * positions, 1, 1),
        (rows, integers, out, positions, _capacity(rows), width, count),
        {"BITS": 8 * rows.dtype.itemsize, "QUANTIZE": quantize, "CHUNK": chunk},
        num_warps=_warps(chunk),
    )


def inner_products(rows: Tensor, vectors: Tensor, out: Tensor, stride: int = 0) -> None:
    """Write the inner products of rows and vectors, float32 [units, positions, vectors], to `out`.

    Factors and products are float32, whatever torch's own products round to.

    Args:
        rows: [units, positions, width], contiguous except for gaps between units.
        vectors: [vectors, width], of any strides.
        out: float32.
        stride: The distance from one row's products to the next in `out`; 0: they have no gaps.
    """
    units, positions, width = rows.shape
    count, size = len(vectors), units * positions
    _launch_inner_products(
        (triton.cdiv(size, _TILE_ROWS), triton.cdiv(count, _TILE_VECTORS), 1),
        (rows, vectors, out, size, positions, _capacity(rows), width, count, stride or count, *vectors.stride()),
        {"ROWS": _TILE_ROWS, "VECTORS": _TILE_VECTORS, "WIDTH": _TILE_WIDTH},
        num_warps=4,  # Triton's own choice
    )


def _capacity(rows: Tensor) -> int:
    """Return the distance from one unit to the next in rows. In elements, Triton would not know its alignment."""
    return int(rows.stride(0) // rows.shape[2])


def _warps(chunk: int) -> int:
    return max(1, min(8, chunk // 512))
