"""Computes the checksum of a whole from the checksums of its parts, without reading the bytes again.

The CRC-32C of bytes that are followed by zeros is a linear function of the CRC-32C of the bytes, and that of two parts
is the XOR of the first part's, shifted so, and the second's. zlib's `crc32_combine` does the same for CRC-32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, with the bits reversed (RFC 3720, appendix B.4)."""

_BYTE = 0xFF

_Tables = tuple[list[int], list[int], list[int], list[int]]
"""A linear function of 32 bits: the images of the values of each byte, the lowest byte first."""


def combined(checksums: Sequence[int], part_bytes: int) -> int:
    """Return the CRC-32C of parts that follow each other.

    Args:
        checksums: The CRC-32C of each part.
        part_bytes: The size of each part. The first one may have another size.
    """
    if len(checksums) <= 1:  # needs no tables
        return checksums[0] if checksums else 0
    return _joined(_appending_bytes(part_bytes), checksums)


@lru_cache(maxsize=128)
def _appending_bytes(count: int) -> _Tables:
    """Return the function that appends this many zero bytes."""
    images = [1 << bit for bit in range(32)]
    bits = 8 * count
    for exponent in range(bits.bit_length()):
        if bits >> exponent & 1:
            step = _appending_bits(exponent)
            images = [_apply(step, image) for image in images]
    return _tables(images)


@cache
def _appending_bits(exponent: int) -> _Tables:
    """Return the function that appends 2**exponent zero bits."""
    if exponent == 0:
        return _tables([_POLYNOMIAL, *(1 << bit for bit in range(31))])
    half = _appending_bits(exponent - 1)
    return _tables([_apply(half, _apply(half, 1 << bit)) for bit in range(32)])


def _tables(images: Sequence[int]) -> _Tables:
    """Return a function as tables, from its images of the 32 bits."""
    return _table(images[:8]), _table(images[8:16]), _table(images[16:24]), _table(images[24:])


def _table(images: Sequence[int]) -> list[int]:
    """Return the image of each byte, from those of its bits."""
    table = [0]
    for image in images:
        table += [number ^ image for number in table]
    return table


def _apply(tables: _Tables, number: int) -> int:
    return _joined(tables, (number, 0))


def _joined(tables: _Tables, checksums: Sequence[int]) -> int:
    """Return the checksum of parts, given the function that appends as many zeros as each has."""
    first, second, third, fourth = tables
    whole = 0
    for number in checksums:
        shifted = first[whole & _BYTE] ^ second[whole >> 8 & _BYTE] ^ third[whole >> 16 & _BYTE] ^ fourth[whole >> 24]
        whole = shifted ^ number
    return whole
