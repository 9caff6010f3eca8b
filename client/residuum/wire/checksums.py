"""Computes the checksum of a whole from the checksums of its parts, without reading the bytes again.

The CRC-32C of bytes that are followed by zeros is a linear function of the CRC-32C of the bytes, and that of two parts
is the XOR of the first part's, shifted so, and the second's. zlib's `crc32_combine` does the same for CRC-32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, with the bits reversed (RFC 3720, appendix B.4)."""

_BYTE = 0xFF

_Matrix = list[int]
"""A linear function of 32 bits: the image of each bit."""


def combined(checksums: Sequence[int], part_bytes: int) -> int:
    """Return the CRC-32C of parts that follow each other.

    Args:
        checksums: The CRC-32C of each part.
        part_bytes: The size of each part.
    """
    first, second, third, fourth = _tables(part_bytes)
    whole = 0
    for number in checksums:
        shifted = first[whole & _BYTE] ^ second[whole >> 8 & _BYTE] ^ third[whole >> 16 & _BYTE] ^ fourth[whole >> 24]
        whole = shifted ^ number
    return whole


@lru_cache(maxsize=64)
def _tables(num_bytes: int) -> tuple[list[int], ...]:
    """Return what each byte of a CRC-32C, the lowest first, adds to it when this many zero bytes follow."""
    matrix = _power(num_bytes)
    return tuple([_apply(matrix, byte << shift) for byte in range(_BYTE + 1)] for shift in (0, 8, 16, 24))


def _power(num_bytes: int) -> _Matrix:
    """Return the function that appends this many zero bytes."""
    power = [1 << bit for bit in range(32)]
    step = [_POLYNOMIAL, *(1 << bit for bit in range(31))]  # one zero bit
    for _ in range(3):
        step = _after(step, step)
    while num_bytes:
        if num_bytes & 1:
            power = _after(step, power)
        step = _after(step, step)
        num_bytes >>= 1
    return power


def _after(second: _Matrix, first: _Matrix) -> _Matrix:
    return [_apply(second, image) for image in first]


def _apply(matrix: _Matrix, number: int) -> int:
    result = 0
    for image in matrix:
        if number & 1:
            result ^= image
        number >>= 1
    return result
