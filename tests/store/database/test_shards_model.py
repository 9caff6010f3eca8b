"""Random changes of a database with shards, some of which fail, compared with a dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residuum.wire.rows.frame_keys import FrameKey
from residuum.wire.rows.frames import parse_chunk, split_chunk
from store_svc.database.db import Database, PayloadChangedError, StoreFullError, Table, Txn
from store_svc.database.frames import PlacedFrame
from store_svc.database.keys import pack_number
from store_svc.database.lmdb_file import LmdbFile
from tests.store.support import make_chunk, whole_frames

SHARDS = 3
CHUNK = make_chunk([0, 1, 2], [0])
LARGE = make_chunk([0, 1, 2], [0], width=1000)
"""A chunk whose payload has pages of its own."""

NUMBERS = st.integers(1, 2)
KEYS = st.builds(lambda number, position: FrameKey(number, 0, 1, 0, 0, position, position), NUMBERS, st.integers(0, 20))
PUTS = st.dictionaries(KEYS.map(FrameKey.pack), st.tuples(st.sampled_from([CHUNK, LARGE]), st.booleans()), max_size=8)
"""For each key, the chunk, and whether it comes through shared memory."""
FAILURES = st.none() | st.sampled_from(["change", "payload", "main", *range(SHARDS)])
STEPS = st.one_of(
    st.tuples(st.just("put"), PUTS, FAILURES),
    st.tuples(st.just("delete"), st.lists(KEYS.map(FrameKey.pack), max_size=4), st.none()),
    st.tuples(st.just("delete some"), NUMBERS, st.integers(1, 9)),
    st.tuples(st.just("reopen"), st.none(), st.none()),
)


@settings(deadline=None, max_examples=40)
@given(st.lists(STEPS, max_size=14))
def test_changes_and_failures_leave_what_a_dict_has(
    tmp_path_factory: pytest.TempPathFactory, steps: Sequence[tuple[str, object, object]]
) -> None:
    path, expected = tmp_path_factory.mktemp("db") / "db", dict[bytes, bytes]()
    db = _opened(path)
    try:
        for kind, what, more in steps:
            if kind == "put":
                puts = {key: value for key, value in what.items() if key not in expected}
                if _put(db, puts, more):
                    expected |= {key: chunk for key, (chunk, _) in puts.items()}
            elif kind == "delete":
                db.write(_deletion(what))
                expected = {key: chunk for key, chunk in expected.items() if key not in what}
            elif kind == "delete some":
                prefix = pack_number(what)
                gone = sorted(key for key in expected if key.startswith(prefix))[:more]
                assert db.write(lambda txn, at=prefix, most=more: txn.delete_some(Table.FRAMES, at, most)) == len(gone)
                expected = {key: chunk for key, chunk in expected.items() if key not in gone}
            else:
                db.close()
                db = _opened(path)
            _check(db, expected)
    finally:
        db.close()


def _opened(path: Path) -> Database:
    return Database(path, 64 << 20, sync_roots=False, shards=SHARDS)


def _put(db: Database, puts: dict[bytes, tuple[bytes, bool]], failure: str | int | None) -> bool:
    """Write frames and a value of the main file. Return whether that succeeded."""

    def change(txn: Txn) -> None:
        for at, (key, (chunk, is_placed)) in enumerate(puts.items()):
            frame = _placed(chunk, is_changed=failure == "payload" and at == len(puts) // 2)
            txn.put_frame(key, frame if is_placed or failure == "payload" else chunk)
        if failure != 0:  # the commit of frames alone is another one
            txn.put(Table.META, b"beside", b"it")
        if failure == "change":
            raise KeyError

    file = {"main": db._main, **dict(enumerate(db._shards.files))}.get(failure)
    try:
        with _failing_commit(file):
            db.write(change)
    except (KeyError, PayloadChangedError, StoreFullError):
        assert failure is not None
        return False
    return True


def _placed(chunk: bytes, *, is_changed: bool) -> PlacedFrame:
    head, payload = split_chunk(chunk)
    copy = bytearray(payload)
    copy[0] ^= is_changed
    return PlacedFrame(bytes(head), memoryview(copy), parse_chunk(chunk).crc32c)


@contextmanager
def _failing_commit(file: LmdbFile | None) -> Iterator[None]:
    """Let the next commit of a file fail after the others, or for the main file, after all shards."""
    if file is None:
        yield
        return
    writing, has_failed = file.writing, False

    @contextmanager
    def failing() -> Iterator[object]:
        nonlocal has_failed
        with writing() as raw:
            yield raw
            if not has_failed:
                has_failed = True
                raise StoreFullError("no room")

    file.writing = failing
    try:
        yield
    finally:
        del file.writing


def _deletion(keys: Sequence[bytes]) -> Callable[[Txn], None]:
    def change(txn: Txn) -> None:
        for key in keys:
            txn.delete(Table.FRAMES, key)

    return change


def _check(db: Database, expected: dict[bytes, bytes]) -> None:
    """Compare scans, seeks, reads and counts, and look that no file has anything else."""
    with db.read() as txn:
        assert whole_frames(txn) == expected
        assert txn.count(Table.FRAMES) == len(expected)
    with db.read() as txn:
        for number in range(1, 3):
            for position in reversed(range(21)):
                key = FrameKey(number, 0, 1, 0, 0, position, position).pack()
                frame = txn.frame(key)
                assert (frame and frame.prefix + bytes(frame.payload)) == expected.get(key)
                assert txn.next_key(Table.FRAMES, key) == min((at for at in expected if at >= key), default=None)
        is_newest = bytes(txn.get(Table.META, b"format") or b"") == b"6"
    for shard, file in enumerate(db._shards.files):
        with file.reading() as raw:
            keys = {bytes(key) for key in raw.cursor(db=file.tables[Table.FRAMES]).iternext(values=False)}
            heads = {bytes(key) for key in raw.cursor(db=file.tables[Table.HEADS]).iternext(values=False)}
        assert heads <= keys
        for key in keys:
            first, second = db._shards._placement.of(key)
            assert shard == first or (shard == second and is_newest)
