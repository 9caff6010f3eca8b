# ruff: noqa: ANN001, ANN201, ANN202, N803 - Triton functions are written without annotations, their constants in capitals
"""Rows in the registers of a Triton program: how they are split, loaded, added, stored and multiplied.

A row is a head and a tail, because Triton's blocks are powers of two (see `split`). Without a tail (TAIL is 0), the
tail variables are copies of the head and are ignored. The width of a row is a constant, so that the compiler leaves out
the masks that hold for all elements.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

from inference_svc.taps.gpu.kernels.parts import place_of

AGAIN = tl.constexpr("evict_first")
"""The policy of the second load of a row. With the same one, the compiler would merge both and keep the row in
registers."""


@cache
def split(width: int) -> tuple[int, int]:
    """Return the lengths of a row's head and tail, which are powers of two; 0 is no tail.

    Triton's blocks are powers of two. A row of 2560 elements in a block of 4096 would leave three eighths of the
    threads idle.
    """
    head = 1 << (width.bit_length() - 1)
    tail = triton.next_power_of_2(width - head) if width > head else 0
    return (head, tail) if tail < head else (2 * head, 0)


@triton.constexpr_function  # type: ignore[untyped-decorator, unused-ignore]
def warps(head, tail):  # type: ignore[no-untyped-def]
    """Return the warps of a program that holds a row.

    They are few with many elements each, because a reduction makes warps wait for each other. The numbers come from
    measurements with widths from 1536 to 4096. With more than 1280 elements, a warp would spill registers.
    """
    count = min(32, max(1, min(4, head // 256), head // 1024))
    return count if head + tail <= 1280 * count else 2 * count


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def row_of(program, programs, MULTIPROCESSORS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row of a program, such that a multiprocessor gets rows next to each other. Each has its own row.

    The device hands out programs to its multiprocessors in turn. Rows next to each other are mostly those of one
    request, and need the same vectors. So these are in the multiprocessor's cache.
    """
    multiprocessor, turn = program % MULTIPROCESSORS, program // MULTIPROCESSORS
    each, more = programs // MULTIPROCESSORS, programs % MULTIPROCESSORS  # the first of them get one more
    return multiprocessor * each + tl.minimum(multiprocessor, more) + turn


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def load(  # type: ignore[no-untyped-def]
    at,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    POLICY: tl.constexpr = tl.constexpr(""),  # noqa: B008 - Triton 3.6 takes no plain text
):
    """Load a row, and zeros beyond its width, as a head and a tail."""
    columns = tl.arange(0, HEAD)
    head = tl.load(at + columns, mask=columns < WIDTH, other=0.0, eviction_policy=POLICY)
    tail = head
    if TAIL:
        rest = HEAD + tl.arange(0, TAIL)
        tail = tl.load(at + rest, mask=rest < WIDTH, other=0.0, eviction_policy=POLICY)
    return head, tail


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def load_if(  # type: ignore[no-untyped-def]
    wanted, at, head, tail, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr
):
    """Load a row if it is wanted; otherwise return the given one. No branch: other loads may overtake these."""
    columns = tl.arange(0, HEAD)
    head = tl.load(at + columns, mask=tl.where(columns < WIDTH, wanted, False), other=head)
    if TAIL:
        rest = HEAD + tl.arange(0, TAIL)
        tail = tl.load(at + rest, mask=tl.where(rest < WIDTH, wanted, False), other=tail)
    return head, tail


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def zeros(DTYPE: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a row of zeros."""
    head = tl.zeros((HEAD,), DTYPE)
    tail = head
    if TAIL:
        tail = tl.zeros((TAIL,), DTYPE)
    return head, tail


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def added(h, h_tail, r, r_tail, HAS_RESIDUAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum of a hidden row and its residual, in float32; without a residual, the hidden row."""
    x, x_tail = h.to(tl.float32), h_tail.to(tl.float32)
    if HAS_RESIDUAL:
        x += r.to(tl.float32)
        x_tail += r_tail.to(tl.float32)
    return x, x_tail


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def load_sum(  # type: ignore[no-untyped-def]
    h_at,
    r_at,
    HAS_RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Load a hidden row and its residual for a second time. Return the hidden row and the sum of both, in float32."""
    h, h_tail = load(h_at, WIDTH, HEAD, TAIL, AGAIN)
    r, r_tail = h, h_tail
    if HAS_RESIDUAL:
        r, r_tail = load(r_at, WIDTH, HEAD, TAIL, AGAIN)
    x, x_tail = added(h, h_tail, r, r_tail, HAS_RESIDUAL)
    return h.to(tl.float32), h_tail.to(tl.float32), x, x_tail


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def store(at, head, tail, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a row."""
    columns = tl.arange(0, HEAD)
    tl.store(at + columns, head, mask=columns < WIDTH)
    if TAIL:
        rest = HEAD + tl.arange(0, TAIL)
        tl.store(at + rest, tail, mask=rest < WIDTH)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def before(destination):  # type: ignore[no-untyped-def]
    """Return a destination if it is one for rows before steering, otherwise a negative number."""
    return tl.where((destination & 1) == 1, destination, -1)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def after(destination):  # type: ignore[no-untyped-def]
    """Return a destination if it is one for rows after steering, otherwise a negative number."""
    return tl.where((destination & 1) == 0, destination, -1)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def keep(  # type: ignore[no-untyped-def]
    x,
    x_tail,
    destination,
    row_line,
    pool,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Store a row into its block if the destination is not negative."""
    if destination >= 0:
        store(place_of(destination, WIDTH, row_line, pool), x.to(DTYPE), x_tail.to(DTYPE), WIDTH, HEAD, TAIL)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def keep_from_memory(  # type: ignore[no-untyped-def]
    destination,
    h_at,
    r_at,
    row_line,
    pool,
    DTYPE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Load a row, as it is in memory now, and store it into its block, if the destination is not negative."""
    if destination >= 0:
        _, _, x, x_tail = load_sum(h_at, r_at, HAS_RESIDUAL, WIDTH, HEAD, TAIL)
        store(place_of(destination, WIDTH, row_line, pool), x.to(DTYPE), x_tail.to(DTYPE), WIDTH, HEAD, TAIL)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _halves(x, LEVEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Split elements into two halves such that each thread has half of its own in each of them."""
    # Triton gives each thread up to 8 neighbours (16 bytes of a row), and then the same again further on. So the first
    # three levels part neighbours, and the others the two ends of a row: no element leaves its thread.
    if LEVEL < 3:  # noqa: PLR2004 - 2 ** 3 neighbours
        first, second = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    else:
        first, second = tl.split(tl.trans(tl.reshape(x, (2, x.shape[0] // 2))))
    return first, second


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_products(total, a, b, THREADS: tl.constexpr, LEVEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the products of each thread's elements to `total`, which has one number for each of THREADS."""
    # One after the other: then each is a single instruction, a fused multiplication and addition.
    if a.shape[0] > THREADS:
        a, a_second = _halves(a, LEVEL)
        b, b_second = _halves(b, LEVEL)
        total = _add_products(total, a, b, THREADS, LEVEL + 1)
        total = _add_products(total, a_second, b_second, THREADS, LEVEL + 1)
    else:
        total += a * b
    return total


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def dot(a, a_tail, b, b_tail, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the inner product of two rows."""
    return tl.sum(products(a, a_tail, b, b_tail, TAIL), axis=0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def products(a, a_tail, b, b_tail, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return numbers whose sum is the inner product of two rows.

    Threads wait for each other in that sum. Neither row has to be in registers then.
    """
    total = a * b
    if TAIL:
        # One sum across threads instead of two, because threads wait for each other in each.
        threads: tl.constexpr = 32 * warps(a.shape[0], TAIL)
        if threads <= TAIL:
            # Two sums in each thread, because an addition waits for the one before.
            a, a_second = _halves(a, 0)
            b, b_second = _halves(b, 0)
            first = _add_products(tl.zeros((threads,), tl.float32), a, b, threads, 1)
            second = _add_products(tl.zeros((threads,), tl.float32), a_second, b_second, threads, 1)
            total = first + _add_products(second, a_tail, b_tail, threads, 0)
        else:
            rest = tl.sum(a_tail * b_tail, axis=0)
            total += tl.where(tl.arange(0, a.shape[0]) == 0, rest, 0.0)
    return total
