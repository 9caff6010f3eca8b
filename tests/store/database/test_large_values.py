"""Large values are found without touching them, and are those that py-lmdb finds."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residuum.v1 import capture_pb2
from residuum.wire.rows.frame_keys import FrameKey
from residuum.wire.rows.frames import checksum, chunk_head
from store_svc.database import large_values
from store_svc.database.db import Database
from store_svc.database.frames import PlacedFrame
from store_svc.database.keys import pack_number
from store_svc.database.large_values import LargeValues
from store_svc.database.lmdb_file import LmdbFile, Table
from tests.store.support import make_chunk

PAGE = 4096
LARGE = b"large"


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LmdbFile]:
    with_file = open_file(tmp_path)
    yield with_file
    with_file.close()


def open_file(folder: Path) -> LmdbFile:
    reserves = {"map_reserve": 1 << 20, "disk_reserve": 1 << 20}
    return LmdbFile(folder, [Table.FRAMES, Table.META], 1 << 28, **reserves, sync_roots=False, max_readers=8)


def put(file: LmdbFile, values: dict[bytes, bytes]) -> None:
    with file.writing() as raw:
        for key, value in values.items():
            raw.put(key, value, db=file.tables[Table.FRAMES])


def get(file: LmdbFile, key: bytes, finder: LargeValues | None = None) -> bytes | None:
    with file.reading() as raw:
        value = (finder or file.large_values).get(raw, file.tables[Table.FRAMES], key)
        return None if value is None else bytes(value)


def known(file: LmdbFile) -> LargeValues:
    """Return what finds the values of a file, after the comparison with py-lmdb."""
    put(file, {LARGE: bytes(2 * PAGE)})
    assert get(file, LARGE) == bytes(2 * PAGE)
    assert file.large_values.finds
    return file.large_values


@pytest.mark.parametrize("edge", [0, 1, 1000, 2000, PAGE, 2 * PAGE, 16 * PAGE])
@pytest.mark.parametrize("by", range(-17, 18, 3))
def test_values_of_every_size_are_found(file: LmdbFile, edge: int, by: int) -> None:
    known(file)
    size = max(0, edge + by)
    value = bytes(at % 251 for at in range(size))
    put(file, {b"before": b"x", b"key": value, b"key after": b"y" * size})
    assert get(file, b"key") == value
    assert get(file, b"ke") is None


@settings(max_examples=25, deadline=None)
@given(
    writes=st.lists(
        st.dictionaries(st.binary(min_size=1, max_size=60), st.one_of(st.none(), st.integers(0, 5 * PAGE)), min_size=1),
        min_size=1,
        max_size=6,
    )
)
def test_every_history_gives_what_was_written_last(
    tmp_path_factory: pytest.TempPathFactory, writes: list[dict[bytes, int | None]]
) -> None:
    file = open_file(tmp_path_factory.mktemp("db"))
    kept: dict[bytes, bytes] = {LARGE: bytes(2 * PAGE)}
    known(file)
    for number, write in enumerate(writes):
        with file.reading() as before:  # pages that this transaction sees are not reused
            old = dict(kept)
            with file.writing() as raw:
                for key, size in write.items():
                    if size is None:
                        raw.delete(key, db=file.tables[Table.FRAMES])
                        kept.pop(key, None)
                    else:
                        kept[key] = bytes([number + 1]) * size
                        raw.put(key, kept[key], db=file.tables[Table.FRAMES])
            for key in {*old, *write}:
                value = file.large_values.get(before, file.tables[Table.FRAMES], key)
                assert (None if value is None else bytes(value)) == old.get(key)
        for key in {*kept, *write}:
            assert get(file, key) == kept.get(key)
    file.close()


def test_a_deep_tree_is_read(file: LmdbFile) -> None:
    known(file)
    values = {number.to_bytes(8, "big") * 8: bytes([number % 256]) * PAGE for number in range(3000)}
    put(file, values)
    assert all(get(file, key) == value for key, value in values.items())


def test_the_value_cannot_be_changed(file: LmdbFile) -> None:
    known(file)
    with file.reading() as raw:
        value = file.large_values.get(raw, file.tables[Table.FRAMES], LARGE)
        assert value is not None
        assert value.readonly
        assert (value.format, value.itemsize, value.nbytes) == ("B", 1, 2 * PAGE)


@pytest.mark.parametrize("shards", [1, 3])
def test_reads_of_a_database_touch_no_frame(tmp_path: Path, shards: int) -> None:
    """py-lmdb touches all pages of a value. They are counted with maps that nothing was read from."""
    payload, size = bytes(8 << 20), 4
    keys = [FrameKey(1, 0, 2, 0, 3, 32 * at, 32 * at + 31).pack() for at in range(size * shards)]
    placed = PlacedFrame(chunk_head(capture_pb2.ChunkHeader(), 0), memoryview(payload), checksum(payload))
    db = Database(tmp_path, 1 << 30, sync_roots=False, shards=shards)
    for key in keys:
        db.write(lambda txn, key=key: txn.put_frame(key, placed))
    db.close()
    touched = []
    for finds in (True, False):
        db = Database(tmp_path, 1 << 30, sync_roots=False)
        with db.read() as txn:
            assert [bytes(key) for key in txn.frame_keys(pack_number(1))] == sorted(keys)
            assert all(txn.frame(key) for key in keys)
            for file in db._files:
                file.large_values._is_known = finds
            before = mapped_bytes(tmp_path)
            assert all(len(txn.frame(key).payload) == len(payload) for key in keys)
            touched.append(mapped_bytes(tmp_path) - before)
        db.close()
    assert touched[1] >= (size - 1) * shards * len(payload) // 2  # the measure works
    assert touched[0] <= 1 << 20  # the first reads have touched their first pages


def mapped_bytes(folder: Path) -> int:
    """Return how many bytes of a database's maps have pages."""
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    found = re.findall(rf"{re.escape(str(folder))}/\S*data\.mdb\n(?:.*\n)*?Rss: +(\d+) kB", maps)
    assert found
    return sum(map(int, found)) << 10


def test_frames_end_with_their_capture(tmp_path: Path) -> None:
    db = Database(tmp_path, 1 << 28, sync_roots=False)
    keys = [FrameKey(number, 0, 2, 0, 0, 0, 0).pack() for number in (1, 2, 3)]
    for key in keys:
        db.write(lambda txn, key=key: txn.put(Table.FRAMES, key, make_chunk([0], [0])))
    with db.read() as txn:
        assert [bytes(key) for key in txn.frame_keys(pack_number(2))] == [keys[1]]
        assert list(txn.frame_keys(pack_number(4))) == []
    db.close()


def test_an_address_that_py_lmdb_contradicts_is_never_used(file: LmdbFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_values, "_address", lambda view, real=large_values._address: real(view) + 1)
    monkeypatch.setattr(large_values, "_read", lambda address, size, real=large_values._read: real(address - 1, size))
    values = {bytes([number]): bytes([number]) * 3 * PAGE for number in range(1, 9)}
    put(file, values)
    assert {key: get(file, key) for key in values} == values
    assert not file.large_values.finds
    assert file.large_values._map is not None, "it was compared"


LEAF, OVERFLOW = 0x02, 0x04
NUMBER, COUNT = 0, 12
"""Where the fields of a page's header begin."""


@pytest.mark.parametrize(("kind", "field"), [(LEAF, NUMBER), (OVERFLOW, NUMBER), (OVERFLOW, COUNT)])
def test_a_damaged_header_of_a_page_does_no_harm(file: LmdbFile, tmp_path: Path, kind: int, field: int) -> None:
    """LMDB itself never reads these fields."""
    values = {bytes([number]): bytes([number]) * 4 * PAGE for number in range(1, 40)}
    put(file, {LARGE: bytes(2 * PAGE)})
    put(file, values)
    path = file.folder / "data.mdb"
    with file.reading() as raw:
        pages = raw.stat(file.tables[Table.FRAMES])
        assert pages["overflow_pages"] > len(values)
    data = bytearray(path.read_bytes())
    damaged = 0
    for start in range(2 * PAGE, len(data), PAGE):
        number, _, flags = struct.unpack_from("<QHH", data, start)
        if (number, flags) == (start // PAGE, kind):
            damaged += 1
            data[start + field] = 1
    assert damaged >= (1 if kind == LEAF else len(values))
    copy = tmp_path / "damaged"
    copy.mkdir()
    (copy / "data.mdb").write_bytes(data)
    other = open_file(copy)
    assert {key: get(other, key) for key in values} == values
    other.close()


def test_small_values_decide_nothing(file: LmdbFile) -> None:
    put(file, {b"small": b"value", LARGE: bytes(3 * PAGE)})
    assert get(file, b"small") == b"value"
    assert get(file, LARGE) == bytes(3 * PAGE)
    assert file.large_values.finds


@pytest.mark.parametrize("why", ["format", "byte order", "pointers"])
def test_other_layouts_are_left_to_py_lmdb(file: LmdbFile, tmp_path: Path, why: str, monkeypatch: Any) -> None:
    put(file, {LARGE: bytes(3 * PAGE)})
    path = file.folder / "data.mdb"
    if why == "format":
        data = bytearray(path.read_bytes()[: 2 * PAGE])
        data[20] += 1  # the version
        path = tmp_path / "other.mdb"
        path.write_bytes(data)
    elif why == "byte order":
        monkeypatch.setattr(large_values.sys, "byteorder", "big")
    else:
        monkeypatch.setattr(large_values, "_NUMBER_BYTES", 4)
    finder = LargeValues(path, PAGE)
    monkeypatch.setattr(large_values, "_pages", lambda *_: pytest.fail("it must not look"))
    assert get(file, LARGE, finder) == bytes(3 * PAGE)
    assert not finder.finds


def test_files_of_lmdb_1_are_left_to_py_lmdb(tmp_path: Path) -> None:
    try:
        env = lmdb.open(str(tmp_path), lib_version=1)
    except TypeError:
        pytest.skip("this py-lmdb has only LMDB 0.9")
    with env.begin(write=True) as raw:
        raw.put(LARGE, bytes(3 * PAGE))
    finder = LargeValues(tmp_path / "data.mdb", PAGE)
    with env.begin(buffers=True) as raw:
        assert bytes(finder.get(raw, None, LARGE) or b"") == bytes(3 * PAGE)
    assert not finder.finds
    env.close()
