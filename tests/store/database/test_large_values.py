"""Large values are found without touching them, and are those that py-lmdb finds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store_svc.database import large_values
from store_svc.database.large_values import LargeValues
from store_svc.database.lmdb_file import LmdbFile, Table

PAGE = 4096
LARGE = b"large"


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LmdbFile]:
    with_file = open_file(tmp_path)
    yield with_file
    with_file.close()


def open_file(folder: Path) -> LmdbFile:
    return LmdbFile(folder, [Table.FRAMES, Table.META], 1 << 28, disk_reserve=1 << 20, sync_roots=False, max_readers=8)


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


def test_a_large_value_is_not_touched(tmp_path: Path) -> None:
    """py-lmdb touches all pages of a value. They are counted with a map that nothing was read from."""
    value = bytes(64 << 20)
    writer = open_file(tmp_path)
    put(writer, {b"first": bytes(2 * PAGE), b"key": value})
    writer.close()
    touched = []
    for finds in (True, False):
        file = open_file(tmp_path)
        get(file, b"first")
        with file.reading() as raw:
            before = mapped_bytes(tmp_path)
            if finds:
                found = file.large_values.get(raw, file.tables[Table.FRAMES], b"key")
            else:
                found = raw.get(b"key", db=file.tables[Table.FRAMES])
            assert len(found or b"") == len(value)
            touched.append(mapped_bytes(tmp_path) - before)
            del found
        file.close()
    assert touched[1] >= len(value) // 2  # the measure works
    assert touched[0] <= 4 << 20  # the kernel maps some pages around a page


def mapped_bytes(folder: Path) -> int:
    """Return how many bytes of the database's map have pages."""
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    (found,) = re.findall(rf"{re.escape(str(folder))}/data\.mdb\n(?:.*\n)*?Rss: +(\d+) kB", maps)
    return int(found) << 10


def test_a_place_that_py_lmdb_contradicts_is_never_used(file: LmdbFile, monkeypatch: pytest.MonkeyPatch) -> None:
    find = LargeValues._find

    def off_by_one(self: LargeValues, key: memoryview) -> Any:
        place = find(self, key)
        return place and place._replace(address=place.address + 1)

    monkeypatch.setattr(LargeValues, "_find", off_by_one)
    values = {bytes([number]): bytes([number]) * 3 * PAGE for number in range(1, 9)}
    put(file, values)
    assert {key: get(file, key) for key in values} == values
    assert not file.large_values.finds


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
    monkeypatch.setattr(LargeValues, "_find", lambda *_: pytest.fail("it must not look"))
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
