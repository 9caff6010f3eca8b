"""The database at its limits."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest

from residuum.rpc.errors import Reason, failure_from_rpc_error
from residuum.v1 import store_pb2
from residuum.wire.rows.frames import checksum
from store_svc.captures.capture_names import CaptureName
from store_svc.database.db import DamagedError, Database, StoreFullError, Table, Txn
from store_svc.server import Store
from store_svc.writing.changes import Batch
from store_svc.writing.write_queue import Command
from tests.store.support import (
    ABORTED,
    INCOMPLETE,
    ONE_AND_SEVERAL,
    Client,
    OpenStream,
    Process,
    describe,
    failing_with,
    make_chunk,
    message,
    serving,
)
from tests.store.wide import MIB, append_until_full, open_wide, try_to_append, wide_chunk

pytestmark = ONE_AND_SEVERAL


def put(name: bytes, size: int):
    def change(txn: Txn) -> None:
        txn.put(Table.META, name, bytes(size))

    return change


def test_ended_reads_take_no_place_of_a_reader(tmp_path: Path) -> None:
    db = Database(tmp_path / "db", 16 * MIB, sync_roots=False, max_readers=8)
    ended = [db.read() for _ in range(20)]
    for read in ended:
        with read:
            pass
    db.close()


@pytest.mark.parametrize("size", [MIB, 3 * MIB, 200_000])
def test_the_file_never_outgrows_its_limit(tmp_path: Path, size: int, shards: int) -> None:
    db = Database(tmp_path / "db", 24 * MIB, sync_roots=False, shards=shards)
    count = 0
    with suppress(StoreFullError):
        while True:
            db.write(put(b"%d" % count, size))
            count += 1
    assert 16 * MIB < count * size < 24 * MIB
    db.write(put(b"end", 10_000), reserve=True)
    db.write(lambda txn: txn.delete_some(Table.META, b"", 10_000), reserve=True)
    db.write(put(b"format", 1), reserve=True)  # LMDB reuses pages two transactions after they were freed
    for again in range(count):
        db.write(put(b"%d" % again, size))
    assert (tmp_path / "db" / "data.mdb").stat().st_size <= 24 * MIB
    db.close()


def test_a_change_that_raises_writes_nothing(tmp_path: Path, shards: int) -> None:
    db = Database(tmp_path / "db", 16 * MIB, sync_roots=False, shards=shards)

    def change(txn: Txn) -> None:
        txn.put(Table.META, b"a", b"b")
        raise KeyError

    with pytest.raises(KeyError):
        db.write(change)
    with db.read() as txn:
        assert txn.get(Table.META, b"a") is None
    db.close()


def test_a_folder_belongs_to_one_store(tmp_path: Path, shards: int) -> None:
    db = Database(tmp_path / "db", 16 * MIB, sync_roots=False, shards=shards)
    with pytest.raises(DamagedError, match="in use"):
        Database(tmp_path / "db", 16 * MIB, sync_roots=False, shards=shards)
    db.close()
    Database(tmp_path / "db", 16 * MIB, sync_roots=False, shards=shards).close()


def test_folders_that_are_made_are_synced(tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a power failure removes a file's name, the synced file is lost, so folders are synced, too."""
    synced = []

    def fsync(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        raise OSError(errno.EINVAL, "not for folders")

    monkeypatch.setattr(os, "fsync", fsync)
    Database(tmp_path / "new" / "db", 16 * MIB, sync_roots=False, shards=shards).close()
    further = {str(tmp_path / "new" / "db" / f"shard-{shard}") for shard in range(shards if shards > 1 else 0)}
    assert set(synced) == {str(tmp_path / "new" / "db"), str(tmp_path / "new"), str(tmp_path)} | further
    synced.clear()
    Database(tmp_path / "new" / "db", 16 * MIB, sync_roots=False, shards=shards).close()
    assert synced == [str(tmp_path / "new" / "db")]


def test_a_folder_that_cannot_be_synced_is_refused(
    tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "bad disk")))
    with pytest.raises(DamagedError, match="Cannot sync"):
        Database(tmp_path / "db", 16 * MIB, sync_roots=False, shards=shards)


def test_another_format_is_refused(tmp_path: Path, shards: int) -> None:
    db = Database(tmp_path / "db", 16 * MIB, sync_roots=False, shards=shards)
    db.write(lambda txn: txn.put(Table.META, b"format", b"99"))
    db.close()
    with pytest.raises(DamagedError, match="format"):
        Database(tmp_path / "db", 16 * MIB, sync_roots=False, shards=shards)


def test_room_is_tried_in_one_shard_after_another(tmp_path: Path) -> None:
    db = Database(tmp_path / "db", 16 * MIB, sync_roots=False, shards=16)
    db.try_room(2 * MIB)  # in all shards at once, it would be twice the limit
    assert db.used_bytes() < 2 * MIB
    with pytest.raises(StoreFullError):
        db.try_room(20 * MIB)
    db.close()


def append_when_there_is_room(client: Client, name: str) -> None:
    """Retry as the contract says: LMDB reuses freed pages only two transactions later."""
    for _ in range(20):
        failure = try_to_append(client, name, 0)
        if failure is None:
            return
        assert failure.reason == Reason.ERROR_REASON_STORE_FULL
    pytest.fail("there is no room although everything was deleted")


def positions_of(client: Client, name: str) -> list[int]:
    answers = list(client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id=name)))[1:-1]
    for answer in answers:
        assert checksum(answer.chunk.payload) == answer.chunk.crc32c
    return [position for answer in answers for position in answer.chunk.header.positions]


def test_a_full_map_loses_nothing_and_recovers(tmp_path: Path) -> None:
    with serving(tmp_path / "store", max_bytes=32 * MIB, ending_timeout_seconds=0.05) as (_, client):
        open_wide(client, "a")
        count = append_until_full(client, "a")
        assert count >= 24
        assert positions_of(client, "a") == list(range(count))
        assert client.get("a").num_rows == count
        client.seal("a", generated=[1], outcome=ABORTED)
        assert client.get("a", wait=20).state == ABORTED, "a full store can end captures"
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
        open_wide(client, "b")
        append_when_there_is_room(client, "b")
        assert append_until_full(client, "b") >= count - 2
    assert (tmp_path / "store" / "data.mdb").stat().st_size <= 33 * MIB


def test_a_stream_to_a_full_store_gets_its_last_acknowledgement(tmp_path: Path) -> None:
    with serving(tmp_path / "store", max_bytes=32 * MIB) as (_, client):
        open_wide(client, "a")
        acked = 0
        messages = (message(at + 1, "a", wide_chunk(at)) for at in range(200))
        with failing_with(Reason.ERROR_REASON_STORE_FULL) as caught:
            for answer in client.raw_append(messages, timeout=30):
                acked = answer.committed_through
        assert caught[0].metadata == {"capture_id": "a"}
        assert positions_of(client, "a") == list(range(acked))


def append_as_one_group(store: Store, client: Client, name: str, count: int) -> int:
    """Append rows that wait for the writer together. Return how many were acknowledged."""
    waiting, gate = threading.Event(), threading.Event()

    def hold_up(_: Batch) -> None:
        waiting.set()
        assert gate.wait(20)

    store._writer.queue.call(Command(hold_up, "", reserve=False))
    assert waiting.wait(20)
    stream, acked = OpenStream(client), 0
    for position in range(count):
        stream.send(wide_chunk(position), name)
    stream.half_close()
    end = time.monotonic() + 20
    while len(store._writer.queue._messages) <= count:  # the stream's end is also queued as a message
        assert time.monotonic() < end
        time.sleep(0.01)
    gate.set()
    try:
        for answer in stream.answers:
            acked = answer.committed_through
    except grpc.RpcError as error:
        failure = failure_from_rpc_error(error)
        assert failure is not None
        assert failure.reason == Reason.ERROR_REASON_STORE_FULL
    return acked


def test_as_much_of_a_large_group_is_written_as_fits(tmp_path: Path) -> None:
    with serving(tmp_path / "store", max_bytes=32 * MIB) as (store, client):
        open_wide(client, "a")
        acked = append_as_one_group(store, client, "a", 40)
        assert 12 <= acked < 28
        assert positions_of(client, "a") == list(range(acked))


def test_a_large_group_reuses_the_space_of_deleted_captures(tmp_path: Path) -> None:
    """LMDB reuses freed pages only two transactions later, and the first of these must fit into the remaining space."""
    with serving(tmp_path / "store", max_bytes=32 * MIB) as (store, client):
        for name in ("a", "b"):
            open_wide(client, name)
        append_until_full(client, "a")
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
        acked = [append_as_one_group(store, client, "b", 16) for _ in range(4)]
        assert acked[-1] == 16, acked
        assert positions_of(client, "b") == list(range(16))


def test_a_full_disk_loses_nothing_and_recovers(start: Callable[..., Process], shards: int) -> None:
    process = start()
    client, pid = process.client, process.process.pid
    open_wide(client, "a")
    client.append([wide_chunk(900)], "a")
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (8 * MIB, limits[1]))  # writes beyond it fail as on a full disk
    count = append_until_full(client, "a")
    assert 3 <= count <= 8 * shards
    assert sorted(positions_of(client, "a")) == [*range(count), 900]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    client.append([wide_chunk(position) for position in range(count, 36)], "a")
    assert sorted(positions_of(client, "a")) == [*range(36), 900]
    assert process.end() == 0
    client = start().client
    assert sorted(positions_of(client, "a")) == [*range(36), 900]


def test_housekeeping_waits_for_room_without_spinning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store_svc.writing.writer._RETRY_SECONDS", 0.1)
    with serving(tmp_path / "store", seal_timeout_seconds=0.2) as (store, client):
        client.open(describe("a"))
        client.seal("a", generated=[2])
        write, refused = store._db.write, []

        def refuse(*_: object, **__: object) -> None:
            refused.append(time.monotonic())
            if refused[-1] - refused[0] > 0.5:
                monkeypatch.setattr(store._db, "write", write)
            raise StoreFullError("for a while")

        monkeypatch.setattr(store._db, "write", refuse)
        assert client.get("a", wait=20).state == INCOMPLETE
        assert 2 <= len(refused) <= 30


def test_a_store_that_cannot_write_any_more_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died = threading.Event()
    with serving(tmp_path / "store", on_death=died.set) as (store, client):
        client.open()
        idle, busy = OpenStream(client), OpenStream(client)
        idle.until_acked(idle.send(make_chunk([0], [0])))

        def break_down(*_: object, **__: object) -> None:
            raise DamagedError("gone")

        monkeypatch.setattr(store._db, "write", break_down)
        busy.send(make_chunk([0], [1]))
        with failing_with(Reason.ERROR_REASON_NOT_SERVING):
            list(busy.answers)
        assert died.wait(10)
        assert store.died
        with failing_with(Reason.ERROR_REASON_NOT_SERVING):
            client.append([make_chunk([0], [2])])
        store.stop()
        with failing_with(Reason.ERROR_REASON_NOT_SERVING):
            list(idle.answers)


def test_a_bug_fails_only_the_work_that_triggers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Batch.append

    def stumble(self: Batch, name: CaptureName, *content: object) -> bool:
        if name.capture_id == "b":
            raise ZeroDivisionError
        return append(self, name, *content)

    monkeypatch.setattr(Batch, "append", stumble)
    with serving(tmp_path / "store") as (_, client):
        for name in ("a", "b"):
            client.open(describe(name))
        good, bad = OpenStream(client), OpenStream(client)
        bad.send(make_chunk([0], [0]), "b")
        number = good.send(make_chunk([0], [0]), "a")
        good.until_acked(number)
        with failing_with(Reason.ERROR_REASON_INTERNAL) as caught:
            list(bad.answers)
        assert caught[0].metadata["incident"]
        good.half_close()
        assert list(good.answers)[-1].synced_through == number
