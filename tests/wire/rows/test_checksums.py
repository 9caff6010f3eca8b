"""Combined checksums are those of the whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from residuum.wire.rows.checksums import combined
from residuum.wire.rows.frames import checksum


@given(st.binary(max_size=4000), st.integers(1, 40))
def test_checksums_of_equal_parts_are_combined(data, count):
    size = len(data) // count
    parts = [data[at * size : (at + 1) * size] for at in range(count)]
    assert combined([checksum(part) for part in parts], size) == checksum(b"".join(parts))


@given(st.binary(max_size=300), st.lists(st.binary(min_size=7, max_size=7), max_size=9))
def test_the_first_part_may_have_another_size(first, others):
    assert combined([checksum(first), *map(checksum, others)], 7) == checksum(first + b"".join(others))


def test_a_combined_checksum_is_that_of_rfc_3720():
    """Appendix B.4: 32 bytes of zeros, of ones, and ascending."""
    for data, expected in ((bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)):
        assert combined([checksum(data[:16]), checksum(data[16:])], 16) == expected


def test_large_parts():
    parts = [bytes([number]) * 131_072 for number in range(36)]
    assert combined([checksum(part) for part in parts], 131_072) == checksum(b"".join(parts))
