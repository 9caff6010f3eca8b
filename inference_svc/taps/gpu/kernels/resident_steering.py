# ruff: noqa: ANN001, ANN201, ANN202, N803 - a Triton function has no annotations, its constants are in capitals
"""Steering of a row in registers: a row's operations, one after the other, in float32.

The first operation has code of its own, so that its vectors are not in registers during the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inference_svc.taps.gpu.kernels.parts import (
    ADD,
    CLAMP,
    COSINE,
    ENTRY_FIELDS,
    GATED,
    KEEP_NORM,
    KIND_SHIFT,
    SCORE,
    VECTOR,
    factor_of,
    gated,
    is_direct,
    is_far_moved,
    load_gate,
    moved_by,
    number,
    opened,
    rescaling,
    summable,
)
from inference_svc.taps.gpu.kernels.resident_rows import dot, load, load_if, products, zeros


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def first_vector(code, gate):  # type: ignore[no-untyped-def]
    """Return the number of the vector that an operation needs first: its gate's, or without a gate its own."""
    return tl.where((code & GATED) != 0, gate, code) & VECTOR


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def load_gate_vector(code, gate, bank, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the vector of an operation's gate; zeros without a gate."""
    zero, zero_tail = zeros(tl.float32, HEAD, TAIL)
    at = bank + (gate & VECTOR).to(tl.int64) * WIDTH
    return load_if((code & GATED) != 0, at, zero, zero_tail, WIDTH, HEAD, TAIL)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _opening(x, x_tail, terms, gate, threshold, sharpness, factor, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return how far a gate is open for a row, from 0 to 1. The terms are the `products` of the row and its vector."""
    measured = tl.sum(terms, axis=0) * factor
    if (gate >> KIND_SHIFT) == COSINE:
        measured /= tl.sqrt(dot(x, x_tail, x, x_tail, TAIL))
    return opened(gate, measured, threshold, sharpness)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _factor(  # type: ignore[no-untyped-def]
    x, x_tail, v, v_tail, code, scale_or_low, high, gate, inverse, opening, scores, TAIL: tl.constexpr
):
    """Return the factor of one operation along v, as far as its gate is open. Store a score."""
    kind = code >> KIND_SHIFT
    factor = tl.where(is_direct(kind), 1.0, scale_or_low)
    if (kind != ADD) & (kind != CLAMP) & (is_direct(kind) == 0):
        product = dot(x, x_tail, v, v_tail, TAIL)
        if kind == SCORE:
            tl.store(scores + gate, product)
        factor = factor_of(kind, product * inverse, scale_or_low, high, inverse)
    return summable(code, gated(kind, factor, opening, scale_or_low, high), inverse)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _moved(x, x_tail, v, v_tail, code, factor, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a row after one operation along v with this factor."""
    kind = code >> KIND_SHIFT
    before = 0.0
    if code & KEEP_NORM:
        before = dot(x, x_tail, x, x_tail, TAIL)
    if is_direct(kind):
        x, x_tail = moved_by(kind, x, v, factor), moved_by(kind, x_tail, v_tail, factor)
    else:  # the same in a third of the instructions
        x += factor * v
        x_tail += factor * v_tail
    if code & KEEP_NORM:
        rescaled = rescaling(before, dot(x, x_tail, x, x_tail, TAIL), factor)
        x *= rescaled
        x_tail *= rescaled
    return x, x_tail


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _apply(  # type: ignore[no-untyped-def]
    x,
    x_tail,
    v,
    v_tail,
    code,
    scale_or_low,
    high,
    gate,
    inverse,
    opening,
    max_abs,
    scores,
    leaves_add,
    TAIL: tl.constexpr,
):
    """Apply one operation to a row. With `leaves_add`, leave factor * v to the caller if nothing else is to be done.

    Returns:
        The row (head and tail), the factor, whether the operation moves the row and only adds factor * v, and whether
        it moves the row far. An operation that moves the row far is not one that only adds.
    """
    factor = _factor(x, x_tail, v, v_tail, code, scale_or_low, high, gate, inverse, opening, scores, TAIL)
    kind = code >> KIND_SHIFT
    moves = factor != 0.0
    is_far = moves & is_far_moved(code, factor, inverse, max_abs)
    only_adds = moves & (is_far == 0) & (is_direct(kind) == 0) & ((code & KEEP_NORM) == 0)
    # Without `moves`, an operation that adds zeros would make a positive zero of a negative one.
    if moves & ((only_adds & leaves_add) == 0):
        x, x_tail = _moved(x, x_tail, v, v_tail, code, factor, TAIL)
    return x, x_tail, factor, only_adds, is_far


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def steer(  # type: ignore[no-untyped-def]
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
    first,
    count,
    entries,
    bank,
    inverse_norms,
    max_abs,
    scores,
    IN_PLACE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Apply all operations to a row. What the first needs is loaded already.

    With IN_PLACE, the caller adds factor * v to the hidden row if a single operation moves the row, only adds, and
    does not move it far. The returned row must not be used then. If the first operation has a gate, the caller has
    loaded only g, the gate's vector, and may pass it as v, too. Then v is loaded here, which needs fewer registers.

    Returns:
        The row (head and tail), whether an operation moved it, whether one moved it far (then its elements must be
        `bounded`), whether the caller adds factor * v, this factor, and v (head and tail).
    """
    opening = 1.0
    if code & GATED:
        terms = products(x, x_tail, g, g_tail, TAIL)
        if IN_PLACE:  # loaded here, because threads wait for each other next
            v, v_tail = load(bank + (code & VECTOR).to(tl.int64) * WIDTH, WIDTH, HEAD, TAIL)
        opening = _opening(x, x_tail, terms, gate, threshold, sharpness, gate_factor, TAIL)
    x, x_tail, added_factor, is_added, is_far = _apply(
        x, x_tail, v, v_tail, code, scale_or_low, high, gate, inverse, opening, max_abs, scores,
        (count == 1) & IN_PLACE, TAIL,
    )  # fmt: skip
    is_moved = added_factor != 0.0
    if count > 1:
        added_vector = code & VECTOR
        for index in range(first + 1, first + count):
            entry = entries + index * ENTRY_FIELDS
            code, gate = tl.load(entry), tl.load(entry + 3)
            scale_or_low, high = number(entry + 1), number(entry + 2)
            opening = 1.0
            if code & GATED:
                threshold, sharpness, gate_factor = load_gate(code, gate, entry + count * ENTRY_FIELDS, inverse_norms)
                g, g_tail = load(bank + (gate & VECTOR).to(tl.int64) * WIDTH, WIDTH, HEAD, TAIL)
                terms = products(x, x_tail, g, g_tail, TAIL)
                opening = _opening(x, x_tail, terms, gate, threshold, sharpness, gate_factor, TAIL)
            inverse = tl.load(inverse_norms + (code & VECTOR))
            v, v_tail = load(bank + (code & VECTOR).to(tl.int64) * WIDTH, WIDTH, HEAD, TAIL)
            x, x_tail, factor, only_adds, strays = _apply(
                x, x_tail, v, v_tail, code, scale_or_low, high, gate, inverse, opening, max_abs, scores, False, TAIL
            )
            if IN_PLACE:
                # Only what moves the row counts: a score or a closed gate must not change its bits.
                moves = factor != 0.0
                is_added = tl.where(moves, only_adds & (is_moved == 0), is_added)
                added_factor = tl.where(moves, factor, added_factor)
                added_vector = tl.where(moves, code & VECTOR, added_vector)
            is_moved = is_moved | (factor != 0.0)
            is_far = is_far | strays
        if IN_PLACE & is_added:
            v, v_tail = load(bank + added_vector.to(tl.int64) * WIDTH, WIDTH, HEAD, TAIL)
    return x, x_tail, is_moved, is_far, is_added, added_factor, v, v_tail
