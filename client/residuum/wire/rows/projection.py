"""The matrix of a random projection. capture.proto defines it; projection_signs.json has test vectors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_GAMMA = 0x9E3779B97F4A7C15
_GROUP = 64
"""Columns whose signs one 64-bit number holds."""


def projection_signs(seed: int, width: int, dimensions: int) -> npt.NDArray[np.int8]:
    """Return the signs of a projection, +1 and -1: int8 [width, dimensions].

    Each entry depends only on the seed and its own indices. So a smaller matrix is a corner of a larger one.

    Args:
        seed: 0 to 2**64 - 1.
        width: Elements of a row.
        dimensions: Elements of a projected row.
    """
    groups = -(-dimensions // _GROUP)
    seeds = _splitmix64(np.array([seed], dtype=np.uint64), groups)[0]
    words = np.ascontiguousarray(_splitmix64(seeds, width).T, dtype="<u8")
    bits = np.unpackbits(words.view(np.uint8).reshape(width, groups * 8), axis=1, bitorder="little")
    signs = bits[:, :dimensions].view(np.int8)
    return (1 - 2 * signs).astype(np.int8, copy=False)


def projection_factor(dimensions: int) -> np.float32:
    """Return the factor of projected rows, 1 / sqrt(dimensions), as a float32."""
    return np.float32(1.0 / math.sqrt(dimensions))


def projection_matrix(seed: int, width: int, dimensions: int) -> npt.NDArray[np.float32]:
    """Return the matrix of a projection, float32 [width, dimensions]: rows @ matrix are the projected rows.

    Args:
        seed: 0 to 2**64 - 1.
        width: Elements of a row.
        dimensions: Elements of a projected row.
    """
    return projection_signs(seed, width, dimensions) * projection_factor(dimensions)


def _splitmix64(seeds: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.uint64]:
    """Return the first `count` numbers of SplitMix64 for each seed; uint64 [seeds, count]."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    z: npt.NDArray[np.uint64] = seeds[:, None] + steps[None, :]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
