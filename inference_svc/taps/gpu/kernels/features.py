# ruff: noqa: ANN001, ANN202, N803 - a Triton kernel is written without annotations, its constants in capitals
"""The strongest features of a sparse autoencoder on a GPU: one Triton kernel, from the products to the result.

In torch this takes seven operations or more. The sink's thread would start each of them with Python, for which the
engine's thread waits, and the largest of them reads the outputs 17 times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from inference_svc.taps.gpu.kernels.launching import Launcher

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 4096
"""How many outputs one Triton program has in registers at a time. Below MAX_KEPT_FEATURES, the result would be
the same, but all outputs above 0 might be candidates."""

_RANKED, _COMPARED = 256, 32
"""How many candidates get their ranks at a time, and with how many others they are compared at a time."""

_FEW = 1024
"""If a row has more candidates than this, which is rare, all but the strongest are dropped before they are ranked."""

_WARPS = 8
_INFINITY = tl.constexpr(0x7F800000)
"""The bits of infinity. Those of NaN are larger."""
_NAN = tl.constexpr(0x7FC00000)
"""The bits that every NaN gets. The largest ones, which GPUs of NVIDIA return, would leave no integer above them."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keys_of(outputs, biases, thresholds, columns, features, HAS_THRESHOLD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bits of the features' values. As integers they have the same order, and NaN is the largest."""
    inside = columns < features
    y = tl.load(outputs + columns, mask=inside, other=0.0) + tl.load(biases + columns, mask=inside, other=0.0)
    if HAS_THRESHOLD:
        y = tl.where(y <= tl.load(thresholds + columns, mask=inside, other=0.0), 0.0, y)
    key = y.to(tl.int32, bitcast=True)
    magnitude = key & 0x7FFFFFFF
    return tl.where(magnitude > _INFINITY, _NAN, tl.maximum(key, 0))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _reached_by(keys, wanted):  # type: ignore[no-untyped-def]
    """Return the largest limit that `wanted` keys reach; 0 if there are fewer keys above 0. It is built bit by bit."""
    limit = tl.zeros((), dtype=tl.int32)
    for bit in range(31):
        higher = limit | (1 << (30 - bit))
        limit = tl.where(tl.sum((keys >= higher).to(tl.int32), axis=0) >= wanted, higher, limit)
    return limit


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _number_from(candidates, limit, count, FEW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return how many candidates have at least the key `limit`."""
    found = tl.zeros((FEW,), dtype=tl.int32)
    for first in range(0, count, FEW):
        at = first + tl.arange(0, FEW)
        found += (tl.load(candidates + 2 * at, mask=at < count, other=-1) >= limit).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add(candidates, found, key, number, limit, room):  # type: ignore[no-untyped-def]
    """Add keys above a limit to the candidates, and as many that equal it as there is room for, but none that is 0.

    Return how many candidates there are, and the room that is left.
    """
    equal = ((key == limit) & (limit > 0)).to(tl.int32)
    kept = (key > limit) | ((equal != 0) & (tl.cumsum(equal, axis=0) <= room))
    place = found + tl.cumsum(kept.to(tl.int32), axis=0) - 1
    tl.store(candidates + 2 * place, key, mask=kept)
    tl.store(candidates + 2 * place + 1, number, mask=kept)
    return found + tl.sum(kept.to(tl.int32), axis=0), room - tl.sum(equal, axis=0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _drop_weaker(candidates, count, wanted, FEW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Drop all candidates but the strongest, and return how many are left: at most `wanted`."""
    limit = tl.zeros((), dtype=tl.int32)
    for bit in range(31):
        higher = limit | (1 << (30 - bit))
        limit = tl.where(_number_from(candidates, higher, count, FEW) >= wanted, higher, limit)
    room = wanted - _number_from(candidates, limit + 1, count, FEW)
    left = tl.zeros((), dtype=tl.int32)
    for first in range(0, count, FEW):
        at = first + tl.arange(0, FEW)
        key = tl.load(candidates + 2 * at, mask=at < count, other=0)
        number = tl.load(candidates + 2 * at + 1, mask=at < count, other=0)
        tl.debug_barrier()  # the candidates that are left may get the places of these
        left, room = _add(candidates, left, key, number, limit, room)
    tl.debug_barrier()
    return left


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _write_strongest(candidates, found, target, features, count, wanted, RANKED: tl.constexpr, COMPARED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the strongest candidates in falling order, and what stands for no feature in the places after them."""
    values = target + count
    # A candidate's rank is the number of stronger ones. Of equal ones, the first is stronger.
    for first in range(0, found, RANKED):
        at = first + tl.arange(0, RANKED)
        own = tl.load(candidates + 2 * at, mask=at < found, other=-1)
        rank = tl.zeros((RANKED,), dtype=tl.int32)
        for start in range(0, found, COMPARED):
            others = start + tl.arange(0, COMPARED)
            other = tl.load(candidates + 2 * others, mask=others < found, other=-1)
            is_first = (other[None, :] == own[:, None]) & (others[None, :] < at[:, None])
            rank += tl.sum(((other[None, :] > own[:, None]) | is_first).to(tl.int32), axis=1)
        kept = (at < found) & (rank < wanted)
        tl.store(target + rank, tl.load(candidates + 2 * at + 1, mask=kept, other=0), mask=kept)
        tl.store(values + rank, own, mask=kept)
    for first in range(0, count, RANKED):
        at = first + tl.arange(0, RANKED)
        empty = (at >= tl.minimum(found, wanted)) & (at < count)
        tl.store(target + at, features, mask=empty)
        tl.store(values + at, 0, mask=empty)


# It is not specialised on the pointers: other alignments would be compiled during requests.
_PLAIN = "outputs", "keys", "biases", "thresholds", "candidates", "target", "features", "count", "wanted", "room"


@triton.jit(do_not_specialize=_PLAIN)  # type: ignore[untyped-decorator, unused-ignore]
def _keep_strongest_kernel(  # type: ignore[no-untyped-def]
    outputs, keys, biases, thresholds, candidates, target, features, count, wanted, room,
    HAS_THRESHOLD: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr, RANKED: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    outputs += row * features
    keys += row * features
    candidates += row * room * 2
    lane = tl.arange(0, CHUNK)
    largest = tl.zeros((CHUNK,), dtype=tl.int32)
    for first in range(0, features, CHUNK):
        columns = first + lane
        key = _keys_of(outputs, biases, thresholds, columns, features, HAS_THRESHOLD)
        tl.store(keys + columns, key, mask=columns < features)
        largest = tl.maximum(largest, key)
    # `wanted` lanes have a key that reaches this limit, so no smaller key is kept.
    limit = _reached_by(largest, wanted)
    tl.debug_barrier()  # other threads may read what this one wrote
    found = tl.zeros((), dtype=tl.int32)
    left = wanted
    for first in range(0, features, CHUNK):
        columns = first + lane
        key = tl.load(keys + columns, mask=columns < features, other=0)
        found, left = _add(candidates, found, key, columns, limit, left)
    tl.debug_barrier()
    if found > FEW:
        found = _drop_weaker(candidates, found, wanted, FEW)
    _write_strongest(candidates, found, target + row * count * 2, features, count, wanted, RANKED, COMPARED)


_launch_keep_strongest = Launcher(_keep_strongest_kernel)


def candidate_numbers(features: int, wanted: int) -> int:
    """Return how many int32 numbers `keep_strongest` needs for the candidates of a row."""
    return 2 * _most_candidates(features, wanted)


def keep_strongest(
    outputs: Tensor, biases: Tensor, threshold: Tensor | None, candidates: Tensor, out: Tensor, wanted: int
) -> None:
    """Write the strongest features of rows, as capture.proto says.

    Args:
        outputs: weights @ row of each row, float32 [n, features], contiguous. Overwritten.
        biases: float32 [features].
        threshold: float32 [features]: a feature that does not exceed its threshold is 0. None: 0 for all.
        candidates: Memory for `candidate_numbers(features, wanted)` numbers for each row, int32.
        out: int32 [n, 2, count]: receives the numbers of the features, and the bits of their values. The count is at
            most MAX_KEPT_FEATURES.
        wanted: How many features of a row may be above 0, at most count.
    """
    rows, features = outputs.shape
    thresholds = biases if threshold is None else threshold
    _launch_keep_strongest(
        (rows, 1, 1),
        (
            outputs, outputs.view(torch.int32), biases, thresholds, candidates, out, features, out.shape[2], wanted,
            _most_candidates(features, wanted),
        ),
        {
            "HAS_THRESHOLD": threshold is not None, "CHUNK": _CHUNK, "FEW": _FEW, "RANKED": _RANKED,
            "COMPARED": _COMPARED,
        },
        num_warps=_WARPS,
    )  # fmt: skip


def _most_candidates(features: int, wanted: int) -> int:
    """Return how many candidates a row may have.

    Fewer than `wanted` lanes have keys above the limit, each at most one in each chunk; and `wanted` keys may equal it.
    """
    return min(features, -(-features // _CHUNK) * (wanted - 1) + wanted)
