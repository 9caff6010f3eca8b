# ruff: noqa: ANN001, ANN201, N803 - Triton functions are written without annotations, their constants in capitals
"""What the kernels of the tap share: the tables' format, and the arithmetic of steering (operations.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from inference_svc.taps.gpu import tables
from inference_svc.taps.plan import Kind, Measure
from residuum.wire.limits import MAX_PROBE_OUTPUTS

ADD = tl.constexpr(int(Kind.ADD))
ABLATE = tl.constexpr(int(Kind.ABLATE))
SET = tl.constexpr(int(Kind.SET))
MULTIPLY = tl.constexpr(int(Kind.MULTIPLY))
SCORE = tl.constexpr(int(Kind.SCORE))
CLAMP = tl.constexpr(int(Kind.CLAMP))
INNER_PRODUCT = tl.constexpr(int(Measure.INNER_PRODUCT))
COSINE = tl.constexpr(int(Measure.COSINE))
FEATURE = tl.constexpr(int(Measure.FEATURE))

LINE_FIELDS = tl.constexpr(tables.LINE_FIELDS)
ENTRY_FIELDS = tl.constexpr(tables.ENTRY_FIELDS)
KIND_SHIFT = tl.constexpr(tables.KIND_SHIFT)
KEEP_NORM = tl.constexpr(tables.KEEP_NORM)
GATED = tl.constexpr(tables.GATED)
VECTOR = tl.constexpr(tables.MAX_BANK_ROWS - 1)
ROW_FIELDS = tl.constexpr(tables.ROW_FIELDS)
SCORE_COLUMNS = tl.constexpr(MAX_PROBE_OUTPUTS)
LARGEST_FLOAT16 = tl.constexpr(65504.0)
LONGEST = tl.constexpr(1e17)
"""The longest vector that an operation which keeps the norm adds; see `summable`."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def number(pointer):  # type: ignore[no-untyped-def]
    """Load a float32 whose bits are stored as an int32."""
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def is_direct(kind):  # type: ignore[no-untyped-def]
    """Return whether an operation has no factor of its own: it is 1, or how far the gate is open."""
    return (kind == SET) | (kind == MULTIPLY)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def load_gate(code, gate, at, inverse_norms):  # type: ignore[no-untyped-def]
    """Load the threshold and sharpness of an operation's gate, and the factor of its inner product.

    The factor is 1 for INNER_PRODUCT and FEATURE, and otherwise the inverse norm of the gate's vector. Without a gate
    nothing is read.
    """
    # Call this before an inner product: no load passes its barriers.
    is_gated = (code & GATED) != 0
    kind = gate >> KIND_SHIFT
    is_scaled = is_gated & (kind != INNER_PRODUCT) & (kind != FEATURE)
    threshold = tl.load(at, mask=is_gated, other=0).to(tl.float32, bitcast=True)
    sharpness = tl.load(at + 1, mask=is_gated, other=0).to(tl.float32, bitcast=True)
    return threshold, sharpness, tl.load(inverse_norms + (gate & VECTOR), mask=is_scaled, other=1.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def opened(gate, measured, threshold, sharpness):  # type: ignore[no-untyped-def]
    """Return how far a gate is open for a row, from 0 to 1; for a FEATURE, return its value."""
    feature = measured + sharpness  # the bias
    feature = tl.where(feature > threshold, feature, 0.0)  # also if it is NaN
    exponent = sharpness * (measured - threshold)
    # Infinite sharpness must give 1 or 0 exactly. NaN, also that of infinite sharpness at the threshold, is closed.
    partly = tl.where(exponent > float("-inf"), 1.0 / (1.0 + tl.exp(-exponent)), 0.0)
    partly = tl.where(exponent == float("inf"), 1.0, partly)
    return tl.where((gate >> KIND_SHIFT) == FEATURE, feature, partly)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gated(kind, factor, opening, low, high):  # type: ignore[no-untyped-def]
    """Return the factor of an operation whose gate is open as far as `opening`; for CLAMP, which has this value."""
    under = tl.where(opening < low, low - opening, 0.0)
    clamped = tl.where(opening > high, high - opening, under)
    partly = tl.where(opening == 0.0, 0.0, factor * opening)  # a closed gate stops even an infinite factor
    return tl.where(kind == CLAMP, clamped, partly)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def factor_of(kind, projection, scale_or_low, high, inverse):  # type: ignore[no-untyped-def]
    """Return the factor by which ABLATE or CAP adds its vector to a row with this projection; 0 for SCORE.

    `scale_or_low` is the scale of ABLATE, or the lower bound of CAP.
    """
    # Not clamp(projection) - projection: the compiler may fuse the multiplication that gave the projection into the
    # subtraction. Then the difference is not exactly zero where nothing is clamped.
    under = tl.where(projection < scale_or_low, scale_or_low - projection, 0.0)
    over = tl.where(projection > high, high - projection, under)
    factor = tl.where(kind == ABLATE, -scale_or_low * projection, over) * inverse
    return tl.where(kind == SCORE, 0.0, factor)  # also if the projection is not finite


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def moved_by(kind, x, v, factor):  # type: ignore[no-untyped-def]
    """Return elements of a row after one operation, x + factor * change.

    The change is v - x for SET, x * v - x for MULTIPLY, and v for the others.
    """
    # Written so that few numbers are in registers at once, and so that SET replaces even an infinity.
    x = tl.where((kind == SET) & (factor == 1.0), 0.0, x)
    kept = tl.where(is_direct(kind), 1.0 - factor, 1.0) + tl.where(kind == MULTIPLY, factor, 0.0) * v
    return x * kept + tl.where(kind == MULTIPLY, 0.0, factor) * v


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def summable(code, factor, inverse):  # type: ignore[no-untyped-def]
    """Limit a factor so that the row's squares can be summed after the operation, if it keeps the norm.

    Beside such a vector the row itself is nothing, so the result is the same.
    """
    most = LONGEST * inverse
    limited = tl.where(factor > most, most, tl.where(factor < -most, -most, factor))  # NaN stays
    return tl.where(((code & KEEP_NORM) != 0) & (is_direct(code >> KIND_SHIFT) == 0), limited, factor)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def rescaling(before, after, factor):  # type: ignore[no-untyped-def]
    """Return what restores the norm of a row, from the sums of squares before and after an operation."""
    # A row that became zero stays zero, and a row that was not moved keeps its bits.
    return tl.where((after > 0.0) & (factor != 0.0), tl.sqrt(before / after), 1.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def is_far_moved(code, factor, inverse, max_abs):  # type: ignore[no-untyped-def]
    """Return whether an operation may have moved a row by more than a thousandth of `max_abs`."""
    is_near = tl.abs(factor) <= max_abs * 1e-3 * inverse  # false if factor is NaN, so such a row counts as moved far
    # With KEEP_NORM, a small vector may get the norm of a large row, in a single element.
    return (is_near == 0) | ((code >> KIND_SHIFT) == MULTIPLY) | ((code & KEEP_NORM) != 0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def bounded(steered, x, max_abs):  # type: ignore[no-untyped-def]
    """Limit the magnitude of steered elements; see `operations.bounded`."""
    bounds = tl.maximum(tl.abs(x), max_abs)
    is_number = steered == steered  # noqa: PLR0124 - NaN is not
    return tl.where(is_number, tl.minimum(tl.maximum(steered, -bounds), bounds), x)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def written(moved, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Limit the numbers that are written into a hidden row with a residual; see `operations.written`. NaN stays."""
    if tl.float16 == DTYPE:  # others hold far more than a residual has
        moved = tl.where(moved > LARGEST_FLOAT16, LARGEST_FLOAT16, moved)
        moved = tl.where(moved < -LARGEST_FLOAT16, -LARGEST_FLOAT16, moved)
    return moved


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def place_of(destination, width, row_line, pool):  # type: ignore[no-untyped-def]
    """Return the address of a captured row in its block."""
    place = tl.load(row_line + 1).to(tl.int64)
    stride = tl.load(row_line + 2).to(tl.int64)
    return pool + (place + (destination >> 1).to(tl.int64) * stride) * width
