from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from residuum.wire.rows.frame_keys import FrameKey, unpack_frame
from store_svc.database.keys import after_group, pack_number, unpack_number

u32 = st.integers(0, 2**32 - 1)
u16 = st.integers(0, 2**16 - 1)
keys = st.builds(FrameKey, st.integers(0, 2**64 - 1), u32, st.integers(0, 255), u16, u16, u32, u32)


@settings(deadline=None)
@given(keys, keys)
def test_bytes_sort_as_numbers_do(a: FrameKey, b: FrameKey) -> None:
    assert (a.pack() < b.pack()) == (a < b)
    assert unpack_frame(a.pack()) == a


@settings(deadline=None)
@given(keys, keys)
def test_after_group_passes_the_group_and_nothing_else(a: FrameKey, b: FrameKey) -> None:
    group = slice(0, 5)
    for other in (b, b._replace(**dict(zip(FrameKey._fields[:5], a[group], strict=True)))):
        assert (other.pack() >= after_group(a.pack())) == (other[group] > a[group])


@settings(deadline=None)
@given(keys)
def test_a_number_is_the_prefix_of_its_frames(key: FrameKey) -> None:
    assert key.pack().startswith(pack_number(key.number))
    assert unpack_number(pack_number(key.number)) == key.number
