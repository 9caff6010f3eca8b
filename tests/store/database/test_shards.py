"""Databases with several shards: where frames lie, which files fit, and what a crash or a full file leaves."""

from __future__ import annotations

import json
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.rows.frame_keys import FrameKey
from residuum.wire.rows.frames import checksum, chunk_head, parse_chunk, split_chunk
from store_svc.captures.capture_names import CaptureName
from store_svc.captures.catalog import Catalog
from store_svc.captures.catalog_loading import load_catalog
from store_svc.captures.numbers import next_number
from store_svc.database.db import DamagedError, Database, StoreFullError, Table, Txn
from store_svc.database.frames import PayloadChangedError, PlacedFrame
from store_svc.database.lmdb_file import LmdbFile
from store_svc.database.shards import FrameChanges, Placement, Shards, _parts
from store_svc.settings import StoreSettings
from store_svc.writing.changes import Batch, purge_some
from tests.store.support import (
    COMPLETE,
    OPEN,
    Process,
    describe,
    grid,
    make_chunk,
    seal_request,
    serving,
    stored_frames,
)

MIB = 1 << 20
LAYERS = [0, 1, 2]
NAME = CaptureName("", "a")
Start = Callable[..., Process]


def key(number: int, layers: tuple[int, int] = (0, 0), position: int = 0, sequence: int = 0) -> bytes:
    return FrameKey(number, sequence, 1, *layers, position, position).pack()


def frames_of(db: Database) -> list[bytes]:
    with db.read() as txn:
        return [found for found, _ in stored_frames(txn)]


def put_frames(frames: dict[bytes, bytes]) -> Callable[[Txn], None]:
    def change(txn: Txn) -> None:
        for found, value in frames.items():
            txn.put(Table.FRAMES, found, value)

    return change


@contextmanager
def database(path: Path, shards: int = 3) -> Iterator[Database]:
    db = Database(path, 64 * MIB, sync_roots=False, shards=shards)
    try:
        yield db
    finally:
        db.close()


# Where frames lie.

GROUPS = [(0, 13), (14, 27), (28, 35)]
"""The groups of layers in which the rows of a model with 36 layers arrive."""


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    "frames",
    [
        [key(7, group, position) for position in range(0, 640, 32) for group in GROUPS],
        [key(number, group, 544) for number in range(1, 21) for group in GROUPS],
        [key(number, (0, 35), 600) for number in range(100, 160)],
        [key(3, (0, 35), position) for position in range(60)],
        [key(3, (layer, layer), 0) for layer in range(60)],
        [key(3, (0, 35), 64, sequence) for sequence in range(60)],
    ],
    ids=["one capture's prompt", "all captures at one position", "captures", "positions", "layers", "sequences"],
)
def test_frames_that_come_together_spread_evenly(frames: list[bytes], count: int) -> None:
    """Of 16 consecutive frames, no shard gets many more than its share."""
    placement = Placement(count, b"secret")
    share = -(-16 // count)
    for start in range(0, len(frames) - 16, 4):
        load = Counter(placement.of(frame)[0] for frame in frames[start : start + 16])
        assert max(load.values()) <= share + 2, load


def test_frames_of_unrelated_captures_spread_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shippers send frames of any captures. With one choice, the fullest of 8 shards gets 6 or more of 18."""
    monkeypatch.setattr("secrets.token_bytes", bytes)  # with one secret of 400, the fullest gets 5 of 18 at some time
    source = np.random.default_rng(0)
    with database(tmp_path / "db", shards=8) as db:
        before = [0] * 8
        for number in range(1, 21):
            positions = source.choice(600, 18, replace=False) * 32
            captures = source.integers(1, 100, 18) + 100 * number
            frames = (key(int(capture), (0, 35), int(at)) for capture, at in zip(captures, positions, strict=True))
            db.write(put_frames(dict.fromkeys(frames, bytes(20_000))))
            counts = frames_in_shards(db)
            assert max(now - then for now, then in zip(counts, before, strict=True)) <= 4
            before = counts


def frames_in_shards(db: Database) -> list[int]:
    """Return how many frames each shard has."""
    assert db._shards
    counts = []
    for file in db._shards.files:
        with file.reading() as raw:
            counts.append(int(raw.stat(file.tables[Table.FRAMES])["entries"]))
    return counts


def test_a_frame_in_its_second_shard_is_found_and_deleted_and_older_stores_refuse_it(tmp_path: Path) -> None:
    with database(tmp_path / "db", shards=2) as db:
        assert db._shards
        same = [found for at in range(40) if db._shards._placement.of(found := key(1, position=at))[0] == 0][:4]
        db.write(put_frames({same[0]: b"alone"}))
        assert (frames_in_shards(db), format_of(db)) == ([1, 0], b"3")
        db.write(put_frames(dict.fromkeys(same[1:], b"together")))
        assert (frames_in_shards(db), format_of(db)) == ([3, 1], b"6")
        with db.read() as txn:
            assert [bytes(txn.get(Table.FRAMES, found) or b"") for found in same] == [b"alone", *[b"together"] * 3]
        for found in same:
            db.write(partial(Txn.delete, table=Table.FRAMES, key=found))
        assert frames_in_shards(db) == [0, 0]


def format_of(db: Database) -> bytes:
    with db.read() as txn:
        return bytes(txn.get(Table.META, b"format") or b"")


def test_callers_cannot_tell_where_captures_begin() -> None:
    """Otherwise the captures of one tenant could all be in one file, which never shrinks."""
    first = [[Placement(8, secret).of(key(number))[0] for number in range(0, 800, 8)] for secret in (b"one", b"two")]
    assert first[0] != first[1]
    assert all(5 <= Counter(shards)[shard] <= 25 for shards in first for shard in range(8))


@settings(deadline=None)
@given(
    st.sets(
        st.builds(
            FrameKey, *(st.integers(1, 4), st.integers(0, 1), st.just(1), st.integers(0, 3), st.integers(4, 5)),
            *(st.integers(0, 99), st.just(99)),
        ),
        max_size=30,
    ),
    st.lists(st.integers(0, 5), max_size=8),
)  # fmt: skip
def test_frames_of_all_shards_are_one_table(
    tmp_path_factory: pytest.TempPathFactory, frames: set[FrameKey], numbers: list[int]
) -> None:
    """Compared with a sorted list: scans, seeks in any order, values and counts."""
    expected = sorted(frame.pack() for frame in frames)
    with database(tmp_path_factory.mktemp("db") / "db") as db:
        db.write(put_frames({found: found * 3 for found in expected}))
        with db.read() as txn:
            assert txn.count(Table.FRAMES) == len(expected)
            assert [(found, bytes(value)) for found, value in stored_frames(txn)] == [
                (found, found * 3) for found in expected
            ]
            assert all(txn.get(Table.FRAMES, found) == found * 3 for found in expected)
            for number in numbers:
                at = number.to_bytes(8, "big")
                assert txn.next_key(Table.FRAMES, at) == min((found for found in expected if found >= at), default=None)
            scanned, at = [], b""
            while (found := txn.next_key(Table.FRAMES, at)) is not None:
                scanned.append(found)
                at = found + b"\0"
            assert scanned == expected
        for number in range(1, 5):
            prefix = number.to_bytes(8, "big")
            own = [found for found in expected if found.startswith(prefix)]
            assert db.write(lambda txn, at=prefix: txn.delete_some(Table.FRAMES, at, 3)) == min(len(own), 3)
            expected = [found for found in expected if found not in own[:3]]
        assert frames_of(db) == expected


# The number of shards, and files that belong together.


def test_a_database_keeps_its_number_of_shards(start: Start) -> None:
    process = start("--shards", "3")
    process.client.open()
    process.client.append([make_chunk(LAYERS, [position]) for position in range(5)])
    assert process.end() == 0
    process = start("--shards", "2")
    assert process.client.read()[0] == grid(LAYERS, range(5))
    assert process.end() == 0
    events = [json.loads(line) for line in process.log_path.read_text().splitlines()]
    assert [event["shards"] for event in events if event["event"] == "serving"] == [3, 3]
    (told,) = [event for event in events if "--shards is for new databases" in event["event"]]
    assert (told["shards"], told["setting"], told["level"]) == (3, 2, "warning")


def test_a_database_of_one_file_is_as_before(tmp_path: Path) -> None:
    """A database that was made without shards is opened unchanged, and an older store opens it."""
    with database(tmp_path / "db", shards=1) as db:
        db.write(put_frames({key(1): b"frame"}))
    with database(tmp_path / "db", shards=3) as db:
        assert (db.num_shards, frames_of(db)) == (1, [key(1)])
        with db.read() as txn:
            assert txn.get(Table.META, b"format") == b"2"
            assert txn.get(Table.META, b"shards") is None
    assert {path.name for path in (tmp_path / "db").iterdir()} == {"data.mdb", "lock.mdb", "store.lock"}


def test_an_older_store_refuses_several_shards(tmp_path: Path) -> None:
    """It would see no rows. Versions that know only one file accept only format 2."""
    with database(tmp_path / "db") as db, db.read() as txn:
        assert txn.get(Table.META, b"format") == b"3"


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    with database(tmp_path / "db"):
        pass
    (tmp_path / "db" / "shard-1").rename(tmp_path / "elsewhere")
    with pytest.raises(DamagedError, match="shard-1 is missing"):
        Database(tmp_path / "db", 64 * MIB, sync_roots=False)
    assert not (tmp_path / "db" / "shard-1").exists()


@pytest.mark.parametrize("other", ["another database's", "the next"])
def test_a_shard_in_the_wrong_place_is_refused(tmp_path: Path, other: str) -> None:
    for name in ("db", "other"):
        with database(tmp_path / name):
            pass
    wrong = tmp_path / "other" / "shard-1" if other == "another database's" else tmp_path / "db" / "shard-2"
    (tmp_path / "db" / "shard-1" / "data.mdb").write_bytes((wrong / "data.mdb").read_bytes())
    with pytest.raises(DamagedError, match="shard-1 belongs"):
        Database(tmp_path / "db", 64 * MIB, sync_roots=False)


def test_rows_whose_main_file_is_gone_are_not_deleted(tmp_path: Path) -> None:
    with database(tmp_path / "db") as db:
        db.write(put_frames({key(1, position=position): b"frame" for position in range(3)}))
    (tmp_path / "db" / "data.mdb").unlink()
    with pytest.raises(DamagedError, match="holds rows"):
        Database(tmp_path / "db", 64 * MIB, sync_roots=False, shards=3)


def test_a_store_that_was_killed_while_it_made_its_database_makes_it_anew(tmp_path: Path) -> None:
    with database(tmp_path / "db"):
        pass
    (tmp_path / "db" / "data.mdb").unlink()
    with database(tmp_path / "db", shards=2) as db:
        assert db.num_shards == 2


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 1), (4, 2), (16, 8), (64, 8)])
def test_the_default_follows_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, expected: int
) -> None:
    monkeypatch.delenv("RESIDUUM_SHARDS")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert StoreSettings(path=tmp_path).num_shards == expected


# What a crash leaves: the files are copied after the shards have committed, and before the main file has.


@contextmanager
def copied_before_the_main_file_commits(db: Database, to: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    commit = Shards.commit

    def commit_and_copy(shards: Shards, *changes: object, **more: object) -> None:
        commit(shards, *changes, **more)
        for file in db._files:
            copy = to / file.folder.relative_to(db._path)
            copy.mkdir(parents=True)
            shutil.copy(file.folder / "data.mdb", copy)

    with monkeypatch.context() as patch:
        patch.setattr(Shards, "commit", commit_and_copy)
        yield


def apply(db: Database, catalog: Catalog, *changes: Callable[[Batch], object]) -> None:
    """Make changes in one transaction, and publish them."""

    def run(txn: Txn) -> Batch:
        batch = Batch(txn, catalog)
        for change in changes:
            change(batch)
        return batch

    db.write(run).publish()


def append(layers: Sequence[int], positions: Sequence[int], name: CaptureName = NAME) -> Callable[[Batch], object]:
    frame = memoryview(make_chunk(layers, positions))
    return lambda batch: batch.append(name, frame, parse_chunk(frame))


def test_rows_of_a_capture_that_was_not_committed_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with database(tmp_path / "db") as db:
        catalog = load_catalog(db)
        apply(db, catalog, lambda batch: batch.open(describe("before")))
        with copied_before_the_main_file_commits(db, tmp_path / "copy", monkeypatch):
            rows = [append(LAYERS, [position]) for position in range(6)]
            apply(db, catalog, lambda batch: batch.open(describe("a")), *rows)
    with database(tmp_path / "copy") as db:
        assert len(frames_of(db)) == 6
        catalog = load_catalog(db)
        assert catalog.number_of(NAME) is None
        apply(db, catalog, lambda batch: batch.open(describe("a")), append([0], [0]))
        (number,) = {int.from_bytes(found[:8], "big") for found in frames_of(db)} - {2}
        assert number == 3, "the number of the lost capture is not used again"
        while db.write(partial(purge_some, limit=4), reserve=True):
            pass
        assert [int.from_bytes(found[:8], "big") for found in frames_of(db)] == [3]
        with db.read() as txn:
            assert (txn.count(Table.DOOMED), next_number(txn)) == (0, 4)


def test_rows_that_were_not_acknowledged_are_rows_if_their_capture_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer sends them again, cut in another way. Reading fails on a row that is there twice."""
    with database(tmp_path / "db") as db:
        catalog = load_catalog(db)
        apply(db, catalog, lambda batch: batch.open(describe("a")))
        with copied_before_the_main_file_commits(db, tmp_path / "copy", monkeypatch):
            apply(db, catalog, append([0, 1], [0, 1]), append([2], [0]), append([0], [3]))
    with serving(tmp_path / "copy") as (_, client):
        assert client.read()[0] == grid([0, 1], [0, 1]) | grid([2], [0]) | grid([0], [3])
        client.append([make_chunk([0, 2], range(5)), make_chunk([1], range(5))])
        assert client.read()[0] == grid(LAYERS, range(5))
        assert client.seal(generated=[2]).state == COMPLETE


@pytest.mark.parametrize(("is_placed", "count", "expected"), [(True, 1, b"4"), (False, 4, b"6"), (True, 4, b"6")])
def test_older_stores_refuse_what_a_crash_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_placed: bool, count: int, expected: bytes
) -> None:
    """The shards commit first. Frames that older stores would not find, or not understand, may be all there is."""
    chunk = make_chunk(LAYERS, [0])
    head, payload = split_chunk(chunk)
    frame = PlacedFrame(bytes(head), memoryview(payload), parse_chunk(chunk).crc32c) if is_placed else chunk
    commit, runs = Shards.commit, 0

    def change(txn: Txn) -> None:
        nonlocal runs
        runs += 1
        for found in same:
            txn.put_frame(found, frame)

    def commit_after_a_sync(shards: Shards, frames: FrameChanges, main: LmdbFile, **more: bool) -> None:
        assert main.is_synced, "a power failure could undo the format alone"
        commit(shards, frames, main, **more)

    with database(tmp_path / "db", shards=2) as db:
        assert db._shards
        same = [found for at in range(40) if db._shards._placement.of(found := key(1, position=at))[0] == 0][:count]
        with monkeypatch.context() as patch:
            patch.setattr(Shards, "commit", commit_after_a_sync)
            with copied_before_the_main_file_commits(db, tmp_path / "copy", monkeypatch):
                db.write(change)
        assert (format_of(db), len(frames_of(db))) == (expected, count)
        runs, same = 0, [key(2, position=position) for position in range(count)]
        db.write(change)
        assert runs == 1, "a change runs again only when the format changes"
    with database(tmp_path / "copy") as db:
        assert (format_of(db), len(frames_of(db))) == (expected, count)


def test_a_capture_whose_last_rows_came_just_before_a_crash_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are committed and its end is not. Its writer may be gone, so the store ends it by itself."""
    with database(tmp_path / "db") as db:
        catalog = load_catalog(db)
        apply(db, catalog, lambda batch: batch.open(describe("a")), append(LAYERS, range(4)))
        apply(db, catalog, lambda batch: batch.seal(NAME, seal_request(generated=[2])))
        with copied_before_the_main_file_commits(db, tmp_path / "copy", monkeypatch):
            apply(db, catalog, append(LAYERS, [4]))
    with database(tmp_path / "copy") as db:
        feed = load_catalog(db).feed_named(NAME)
        assert feed
        assert feed.capture.state == OPEN
        assert feed.capture.ledger.outstanding == 0
    with serving(tmp_path / "copy") as (_, client):
        assert client.get(wait=20).state == COMPLETE
        assert client.read()[0] == grid(LAYERS, range(5))
    with serving(tmp_path / "copy") as (_, client):
        assert client.get().state == COMPLETE, "the end was committed"


# What a failed commit leaves: nothing. Writes beyond a file's limit fail as on a full disk.


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def spread_frames(db: Database, number: int) -> dict[bytes, bytes]:
    """Return a small frame for each shard but the last, for which there is one of 8 MiB."""
    assert db._shards
    placement = db._shards._placement
    keys = [key(number, position=position) for position in range(9)]
    by_shard = {placement.of(found)[0]: found for found in keys}
    assert by_shard.keys() == {0, 1, 2}
    return {by_shard[shard]: bytes(8 * MIB if shard == 2 else 5000) for shard in range(3)}


def test_what_a_file_without_room_fails_is_undone_in_the_others(tmp_path: Path) -> None:
    with database(tmp_path / "db") as db:
        db.write(put_frames({key(1, position=position): bytes(5000) for position in range(9)}))
        before, chunks = frames_of(db), db.num_chunks()
        with file_limit(4 * MIB), pytest.raises(StoreFullError):
            db.write(put_frames(spread_frames(db, 2)))
        assert (frames_of(db), db.num_chunks()) == (before, chunks)
        db.write(put_frames(spread_frames(db, 2)))
        assert len(frames_of(db)) == chunks + 3


def test_what_the_main_file_without_room_fails_is_undone_in_the_shards(tmp_path: Path) -> None:
    def change(txn: Txn) -> None:
        txn.put(Table.META, b"large", bytes(8 * MIB))
        put_frames({key(2, position=position): bytes(5000) for position in range(9)})(txn)

    with database(tmp_path / "db") as db:
        with file_limit(4 * MIB), pytest.raises(StoreFullError):
            db.write(change)
        assert frames_of(db) == []
        db.write(change)
        assert len(frames_of(db)) == 9


def test_what_cannot_be_undone_for_want_of_room_is_undone_before_the_next_write(tmp_path: Path) -> None:
    with database(tmp_path / "db") as db:
        with file_limit(4096), pytest.raises(StoreFullError):  # no file can grow at all
            db.write(put_frames({key(1): bytes(5000)}), reserve=True)
        frames = spread_frames(db, 2)
        assert db._shards
        sync, db._shards.files[0].sync = db._shards.files[0].sync, _no_room
        with file_limit(4 * MIB), pytest.raises(StoreFullError):
            db.write(put_frames(frames))
        with pytest.raises(StoreFullError, match="no room to sync"):
            db.write(put_frames({key(3): b"frame"}))
        db._shards.files[0].sync = sync
        db.write(put_frames({key(3): b"frame"}))
        assert frames_of(db) == [key(3)]


def test_what_was_undone_leaves_its_room_to_the_next_write(tmp_path: Path) -> None:
    """The writer then writes the half of its work. It would fail, too, as long as the pages cannot be used again."""
    with database(tmp_path / "db", shards=2) as db:
        assert db._shards
        frames = {key(1, position=position): bytes(MIB) for position in range(80)}
        ours = [found for found in frames if db._shards._placement.of(found)[0] == 0]
        others = [found for found in frames if found not in ours]
        mixed = [found for pair in zip(ours[:10], others[:10], strict=True) for found in pair]
        large = {others[10]: bytes(20 * MIB)}
        with file_limit(14 * MIB):
            with pytest.raises(StoreFullError):
                db.write(put_frames({**{found: frames[found] for found in mixed}, **large}))
            assert frames_of(db) == []
            db.write(put_frames({found: frames[found] for found in mixed}))
        assert frames_of(db) == sorted(mixed)


def _no_room() -> None:
    raise StoreFullError("no room to sync")


def test_a_damaged_payload_undoes_what_its_shard_committed_before_it(tmp_path: Path) -> None:
    header = capture_pb2.ChunkHeader()
    payloads = [bytes([position]) * (3 * MIB) for position in range(12)]
    frames = {
        key(1, position=position): PlacedFrame(chunk_head(header, 0), memoryview(payload), checksum(payload))
        for position, payload in enumerate(payloads)
    }
    damaged = {**frames, key(1, position=11): frames[key(1, position=11)]._replace(crc32c=0)}

    def change(txn: Txn, frames: dict[bytes, PlacedFrame]) -> None:
        for found, frame in frames.items():
            txn.put_frame(found, frame)

    with database(tmp_path / "db", shards=2) as db:
        db.write(partial(change, frames={key(2): frames[key(1)]}))
        with pytest.raises(PayloadChangedError):
            db.write(partial(change, frames=damaged))
        assert frames_of(db) == [key(2)]
        with db.read() as txn:
            assert [bool(txn.get(Table.HEADS, found)) for found in (key(1), key(2))] == [False, True]
        db.write(partial(change, frames=frames))
        assert len(frames_of(db)) == 13


_PUTS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9 * MIB) | st.integers(4 * MIB - 300, 4 * MIB)))


@settings(max_examples=50)
@given(_PUTS)
def test_a_shard_commits_often_and_both_values_of_a_frame_at_once(sizes: list[tuple[int, int]]) -> None:
    puts: list[tuple[Table, bytes, bytes | memoryview]] = []
    for number, (head, payload) in enumerate(sizes):
        puts += [(Table.HEADS, key(number), bytes(head)), (Table.FRAMES, key(number), memoryview(bytes(payload)))]
    parts = _parts(puts)
    assert [put for part in parts for put in part] == puts
    assert all(part[0][0] is Table.HEADS and part[-1][0] is Table.FRAMES for part in parts if puts)
    for part in parts[:-1]:
        assert sum(len(value) for _, _, value in part) >= 4 * MIB > sum(len(value) for _, _, value in part[:-2])


def test_a_change_that_raises_writes_no_frames(tmp_path: Path) -> None:
    def change(txn: Txn) -> None:
        put_frames({key(1, position=position): b"frame" for position in range(9)})(txn)
        raise KeyError

    with database(tmp_path / "db") as db:
        with pytest.raises(KeyError):
            db.write(change)
        assert frames_of(db) == []


def test_statistics_count_all_files(tmp_path: Path) -> None:
    with serving(tmp_path / "store", shards=3) as (store, client):
        client.open(describe(prompt=90, width=MIB // 256))
        client.append([make_chunk(LAYERS, [position], width=MIB // 256) for position in range(90)])
        stats = client.stub.GetStats(store_pb2.GetStatsRequest())
        assert stats.num_chunks == 90
        assert stats.used_bytes >= stats.num_bytes
        assert stats.used_bytes <= 1.2 * stats.num_bytes
        files = list((tmp_path / "store").rglob("data.mdb"))
        assert len(files) == 4
        assert stats.disk_bytes == sum(file.stat().st_blocks * 512 for file in files)
        sizes = [file.used_bytes for file in store._db._shards.files]
        assert max(sizes) < 1.2 * min(sizes), "the frames are spread"
