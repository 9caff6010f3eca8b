"""The messages of shared memory, and which bytes of a ring are in use."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residuum.wire.rows.shared_memory import (
    READ,
    WRITE,
    Hello,
    RingUse,
    SharedMemoryError,
    decode_released,
    decode_welcome,
    encode_released,
    encode_welcome,
)

SIZE = 100


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(1, SIZE), st.integers(-8, -1)), max_size=60), st.data())
def test_pieces_in_use_never_overlap(steps, data):
    """A positive step takes a piece of this size, and may shorten it; a negative one releases as many pieces."""
    use, held = RingUse(SIZE), deque()
    for step in steps:
        if step > 0:
            place = use.take(step)
            if place is None:
                assert held, "an unused ring has room for every piece"
                continue
            kept = data.draw(st.integers(0, step))
            place = use.shorten(place, step, kept)
            assert use.taken == place.end
            if kept:
                assert place.offset + kept <= SIZE
                assert all(place.offset + kept <= at or at + size <= place.offset for at, size, _ in held)
                assert not held or place.end >= held[-1][2] + kept
                held.append((place.offset, kept, place.end))
        elif len(held) >= -step:
            released = [held.popleft() for _ in range(-step)]
            use.release(released[-1][2])
        assert use.is_unused == (not held)


def test_a_piece_that_was_released_too_early_cannot_be_shortened():
    use = RingUse(SIZE)
    place = use.take(10)
    use.release(place.end)
    with pytest.raises(SharedMemoryError, match="before it got"):
        use.shorten(place, 10, 5)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, SIZE), min_size=1, max_size=20), st.integers(0, 2**64 - 1))
def test_only_the_end_of_a_piece_in_use_can_be_released(sizes, end):
    use = RingUse(SIZE)
    ends = [place.end for place in map(use.take, sizes) if place is not None]
    if end in ends:
        use.release(end)
        assert use.released == end
    else:
        with pytest.raises(SharedMemoryError, match="released"):
            use.release(end)
        assert use.released == 0
    with pytest.raises(SharedMemoryError, match="released"):  # a second time
        use.release(use.released)


@pytest.mark.parametrize("kind", [READ, WRITE])
def test_messages_are_read_as_they_were_written(kind):
    hello = Hello(kind, bytes(range(16)))
    assert Hello.decode(hello.encode()) == hello
    assert decode_welcome(encode_welcome(bytes(range(16)))) == bytes(range(16))
    assert decode_released(encode_released(2**63)) == 2**63


HELLO = Hello(READ, bytes(16)).encode()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes"),
        (HELLO[:-1], "25 bytes"),
        (HELLO + b"\0", "27 bytes"),
        (b"RESIDUUM" + HELLO[8:], "protocol"),
        (HELLO[:8] + b"\2" + HELLO[9:], "version 2"),
        (HELLO[:9] + b"\3" + HELLO[10:], "kind 3"),
    ],
)
def test_other_bytes_are_no_hello(data, why):
    with pytest.raises(SharedMemoryError, match=why):
        Hello.decode(data)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(data):
    for decode in (Hello.decode, decode_welcome, decode_released):
        try:
            decode(data)
        except SharedMemoryError:
            continue
