"""Rows of copied captures are dropped from the database when it has too many of them, or is full."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from residuum.rpc.errors import Failure
from residuum.rpc.objects import ArchiveError, Objects
from residuum.v1 import capture_pb2, store_pb2
from store_svc.archive.access import LOOK_SECONDS
from store_svc.archive.dropper import Dropper
from store_svc.captures.capture_names import CaptureName
from store_svc.database.db import Database, Table, Txn
from store_svc.database.keys import pack_number
from store_svc.reading.frame_access import FrameAccess
from store_svc.writing.changes import purge_some
from tests.archive.support import (
    COPIED,
    LAYERS,
    MOVED,
    PENDING,
    capture,
    file_url,
    files_under,
    listed_states,
    state,
    stats,
    wait_for_state,
)
from tests.store.support import ABORTED, Client, describe, grid, make_chunk, serving, stored_frames
from tests.waiting import wait_for

WIDTH = 1024
NUM_BYTES = 3 * 8 * WIDTH * 4
"""About the bytes of a capture of 8 positions and 3 layers."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return file_url(tmp_path / "archive")


def copy_three(client: Client) -> None:
    """Make the captures c0, c1 and c2, each once the one before is copied."""
    for at in range(3):
        capture(client, f"c{at}", width=WIDTH, prompt=8)
        wait_for_state(client, COPIED, [f"c{at}"])


def test_rows_stay_while_there_are_few(tmp_path: Path, url: str) -> None:
    with serving(tmp_path / "store", archive=url) as (store, client):
        for at in range(5):
            capture(client, f"c{at}", width=WIDTH, prompt=8)
        wait_for(lambda: stats(client).captures_copied == 5, "copies")
        store._archive._dropper.drop()
        assert set(listed_states(client).values()) == {COPIED}


def test_captures_that_were_not_read_for_longest_are_dropped_first(tmp_path: Path, url: str) -> None:
    keep = int(3.5 * NUM_BYTES)
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=keep) as (_, client):
        copy_three(client)
        expected = dict.fromkeys(("c0", "c1", "c2"), COPIED)
        wait_for(lambda: listed_states(client) == expected, "copies")  # a copy counts as a use, too
        client.read("c0")
        for dropped, new in (("c1", "c3"), ("c2", "c4")):
            capture(client, new, width=WIDTH, prompt=8)
            expected |= {dropped: MOVED, new: COPIED}
            wait_for(lambda: listed_states(client) == expected, "drop")  # noqa: B023
        assert client.stub.GetStats(store_pb2.GetStatsRequest()).num_bytes <= keep
        for at in range(5):
            assert client.read(f"c{at}")[0] == grid(LAYERS, range(8))


def test_a_full_store_makes_room_by_dropping(tmp_path: Path, url: str) -> None:
    """Without the archive, a store of 16 MiB would be full after four of these captures."""
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=14 << 20, max_bytes=16 << 20, shards=1) as (
        _,
        client,
    ):
        names = [f"c{at}" for at in range(12)]
        refusals = 0
        for name in names:
            until = time.monotonic() + 60
            while True:  # as a shipper does: rows that were refused are sent again
                with contextlib.suppress(grpc.RpcError):
                    capture(client, name, width=WIDTH, prompt=300, at_once=10)
                    break
                assert time.monotonic() < until, "the store stays full"
                refusals += 1
                time.sleep(0.1)
        wait_for(lambda: stats(client).captures_pending == 0, "copies", 60)
        for name in names:
            assert client.read(name)[0] == grid(LAYERS, range(300))
        assert refusals
        assert MOVED in listed_states(client).values()


def test_a_capture_that_is_read_while_it_is_dropped_is_read_whole(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader finds some rows in the database, and the others in the archive."""
    monkeypatch.setattr("store_svc.reading.frame_access._KEYS_AT_ONCE", 4)
    half_done, go_on = threading.Event(), threading.Event()
    purges = itertools.count()

    def purge(txn: Txn, limit: int) -> bool:
        if next(purges) == 25:
            half_done.set()
            assert go_on.wait(60)
        return purge_some(txn, 4)

    with serving(tmp_path / "store", archive=url) as (store, client):
        capture(client, "big", width=8, prompt=400)
        wait_for_state(client, COPIED, ["big"])
        number = store._catalog.number_of(CaptureName("", "big"))
        monkeypatch.setattr("store_svc.writing.writer.purge_some", purge)
        try:
            store._writer.call("big", lambda batch: batch.drop_rows([number]), reserve=True)
            assert half_done.wait(30)
            assert client.read("big")[0] == grid(LAYERS, range(400))
            assert store._db.num_chunks() == 300
            assert 0 < store._archive.fetcher.num_bytes < client.get("big").num_bytes, "some rows came from each side"
            with ThreadPoolExecutor(4) as readers:
                reads = [readers.submit(client.read, "big") for _ in range(12)]
                go_on.set()
                assert [read.result()[0] for read in reads] == [grid(LAYERS, range(400))] * 12
        finally:
            go_on.set()
        assert state(client, "big") == MOVED
        wait_for(lambda: store._db.num_chunks() == 0, "empty database")
        assert client.read("big")[0] == grid(LAYERS, range(400))


def test_a_frame_that_is_dropped_before_it_is_read_is_fetched_unless_the_caller_cancels(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read has the key of the frame since the capture was open."""
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (store, client):
        client.open(describe("a", layers=LAYERS, prompt=2))
        client.append([make_chunk(LAYERS, [at]) for at in range(2)], "a")
        with store._db.read() as txn:
            keys = [key for key, _ in stored_frames(txn)]
        client.seal("a", generated=(1,))
        wait_for(lambda: store._db.num_chunks() == 0, "empty database")
        frames = FrameAccess(store._db, store._archive.fetcher)
        with frames.frame(keys[0], "a", lambda: False) as frame:
            assert frame.parse().verify()
        free = threading.Event()
        monkeypatch.setattr(Objects, "get_range", lambda *_: free.wait(60))
        with pytest.raises(Failure, match="cancelled the call"), frames.frame(keys[1], "a", lambda: True):
            pass
        free.set()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("searches", "table", "nth"),
    [(False, Table.ARCHIVED, 2), (False, Table.FRAMES, 1), (True, Table.ARCHIVED, 1)],
    ids=["read that looks for frames", "read of a frame", "search"],
)
def test_rows_that_are_dropped_while_a_transaction_begins_are_found(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, shards: int, searches: bool, table: Table, nth: int
) -> None:
    """A transaction sees the shards a little later than the main file. Rows were in neither, and were left out."""
    copies = threading.Event()
    put, get = Objects.put, Txn.get
    copies.set()
    monkeypatch.setattr(Objects, "put", lambda *of: (copies.wait(20), put(*of))[1])
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0, shards=shards) as (store, client):
        capture(client, "first")
        wait_for(lambda: store._db.num_chunks() == 0, "dropped rows")
        copies.clear()
        capture(client)
        looks = itertools.count(1)

        def late(txn: Txn, wanted: Table, key: bytes) -> memoryview | None:
            is_reader = threading.current_thread().name not in ("writer", "archive")
            if is_reader and wanted is table and not copies.is_set() and next(looks) == nth:
                copies.set()
                wait_for(lambda: store._db.num_chunks() == 0, "dropped rows")
            return get(txn, wanted, key)

        monkeypatch.setattr(Txn, "get", late)
        if searches:
            request = store_pb2.SearchRequest(vector=b"\0\0\x80?" * 4, layer=1, max_hits=9, capture_ids=["a"])
            *_, last = client.stub.Search(request)
            assert [hit.position for hit in last.hits] == [3, 2, 1, 0]
        else:
            assert client.read()[0] == grid(LAYERS, range(4))
        assert copies.is_set()


def test_expired_captures_are_deleted_in_the_archive(tmp_path: Path, url: str) -> None:
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (_, client):
        capture(client)
        wait_for_state(client, MOVED)
    with serving(tmp_path / "store", archive=url, retain_hours=1e-6) as (_, client):
        wait_for(lambda: not listed_states(client), "expiry")
        wait_for(lambda: not files_under(tmp_path / "archive" / "captures"), "deletion")
        wait_for(lambda: not files_under(tmp_path / "archive" / "chunks"), "deletion of chunks")


def test_captures_in_the_archive_do_not_expire_by_size(tmp_path: Path, url: str) -> None:
    """Their rows are dropped, also if `--archive-keep-bytes` would keep them."""
    with serving(tmp_path / "store", archive=url, retain_bytes=2 * NUM_BYTES + 1000) as (store, client):
        for at in range(6):
            capture(client, f"c{at}", width=WIDTH, prompt=8)
            wait_for(lambda at=at: listed_states(client)[f"c{at}"] in (COPIED, MOVED), "copy")
        wait_for(lambda: store._db.num_chunks() == 2 * 8, "free rows")
        assert {name: state == COPIED for name, state in listed_states(client).items()} == {
            f"c{at}": at >= 4 for at in range(6)
        }
        assert store._writer.counters.expired_by_size == 0
        for at in range(6):
            assert client.read(f"c{at}")[0] == grid(LAYERS, range(8))


def test_captures_that_wait_for_the_archive_expire_by_size(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the archive is away, the limit holds nevertheless."""
    with serving(tmp_path / "store", archive=url, retain_bytes=2 * NUM_BYTES + 1000) as (store, client):
        monkeypatch.setattr(Objects, "put", failing_operation)
        for at in range(4):
            capture(client, f"c{at}", width=WIDTH, prompt=8)
        wait_for(lambda: set(listed_states(client)) == {"c2", "c3"}, "expiry")
        wait_for(lambda: not store._archive._copier._waiting, "the deleted captures wait no more")


def test_a_store_that_has_lost_its_archive_setting_drops_no_rows(tmp_path: Path, url: str) -> None:
    """It deletes the oldest captures, as a store without an archive does, and can be started again."""
    with serving(tmp_path / "store", archive=url) as (_, client):
        copy_three(client)
    for _ in range(2):
        with serving(tmp_path / "store", retain_bytes=2 * NUM_BYTES + 1000) as (_, client):
            expected = dict.fromkeys(("c1", "c2"), capture_pb2.ARCHIVE_STATE_UNSPECIFIED)
            wait_for(lambda: listed_states(client) == expected, "expiry")  # noqa: B023
            assert state(client, "c1") == capture_pb2.ARCHIVE_STATE_UNSPECIFIED
            assert client.read("c1")[0] == client.read("c2")[0] == grid(LAYERS, range(8))
    with serving(tmp_path / "store", archive=url) as (_, client):
        assert listed_states(client) == dict.fromkeys(("c1", "c2"), COPIED)


def test_no_rows_are_dropped_before_the_archive_has_answered(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another archive, which does not have the rows."""
    with serving(tmp_path / "store", archive=url) as (_, client):
        copy_three(client)
    with monkeypatch.context() as away:
        away.setattr(Objects, "put", failing_operation)
        with serving(tmp_path / "store", archive=url, archive_keep_bytes=0, retain_bytes=NUM_BYTES) as (store, client):
            capture(client, "new")
            store._archive._dropper.drop()
            expected = dict.fromkeys(("c0", "c1", "c2"), COPIED) | {"new": PENDING}
            assert listed_states(client) == expected
            away.undo()
            wait_for(lambda: set(listed_states(client).values()) == {MOVED}, "drops", 60)
            assert client.read("c0")[0] == grid(LAYERS, range(8))


def failing_operation(*_: object) -> None:
    raise ArchiveError("503")


def test_rows_are_dropped_while_the_archive_is_slow_or_away(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropping needs no network, so no call to the archive delays it."""
    with serving(tmp_path / "store", archive=url) as (store, client):
        for at in range(4):
            capture(client, f"c{at}", width=WIDTH, prompt=8)
        wait_for(lambda: stats(client).captures_copied == 4, "copies")
        blocked, release = threading.Event(), threading.Event()

        def stuck(*_: object) -> None:
            blocked.set()
            release.wait(60)
            raise ArchiveError("503")

        monkeypatch.setattr(Objects, "put", stuck)
        label = capture_pb2.Label(name="split", text="train")
        client.stub.LabelCapture(store_pb2.LabelCaptureRequest(capture_id="c0", labels=[label]))
        assert blocked.wait(10)
        store._archive._dropper.keep_bytes = 0
        wait_for(lambda: set(listed_states(client).values()) == {MOVED}, "drop")
        release.set()


def test_copies_leave_a_full_store_room_to_end_and_delete_captures(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places of many tiny chunks take more than the reserve, half a MiB. Only what is deleted makes room."""
    monkeypatch.setattr("store_svc.archive.copier._PLACES_AT_ONCE", 512)
    monkeypatch.setattr("store_svc.database.db._LARGEST_RESERVE", 512 << 10)
    names, tiny = [f"c{at}" for at in range(60)], 12_000
    with serving(tmp_path / "store", archive=url, max_bytes=16 << 20, shards=1, ending_timeout_seconds=0.05) as (
        store,
        client,
    ):
        for name in names:
            client.open(describe(name, prompt=500))
        client.open(describe("tiny", layers=[0], prompt=tiny))
        client.append((make_chunk([0], [at]) for at in range(tiny)), "tiny")
        client.open(describe("large", layers=[0], prompt=1000, width=8 * WIDTH))
        with pytest.raises(grpc.RpcError):
            fill(client, "large")
        client.seal("tiny", generated=[1])
        wait_for(lambda: not grows(store._db), "end of the copy, or what it can write", 60)
        assert state(client, "tiny") == PENDING
        for name in names:
            client.seal(name, generated=[500], outcome=ABORTED)
        assert all(client.get(name, wait=20).state == ABORTED for name in names)
        for name in [*names, "large"]:
            client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=name))
        wait_for_state(client, COPIED, ["tiny"])


def fill(client: Client, capture_id: str) -> None:
    for at in range(1000):
        client.append([make_chunk([0], [at], width=8 * WIDTH)], capture_id)


def grows(db: Database) -> bool:
    """Tell whether a database gets larger within a time in which a copy that waits for room tries again."""
    before = db.used_bytes()
    time.sleep(2 * LOOK_SECONDS)
    return db.used_bytes() > before


def test_a_full_store_drops_once_until_the_rows_are_free(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dropper, "run", lambda _: None)  # this test asks it, and nobody else
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=48 << 20, max_bytes=64 << 20, shards=1) as (
        store,
        client,
    ):
        for at in range(24):
            capture(client, f"c{at}", width=WIDTH, prompt=64, at_once=8)
        wait_for(lambda: stats(client).captures_copied == 24, "copies")
        store._writer.stop()  # it would find that the store is not full
        dropper, eighth = store._archive._dropper, store._db.ordinary_bytes // 8
        assert dropper.excess() <= 0
        store._writer.room.why_full = "a test says so"
        assert dropper.excess() == eighth
        store._db.write(lambda txn: txn.put(Table.DOOMED, pack_number(1 << 40), b""), reserve=True)
        assert dropper.excess() <= 0, "rows are being freed"
