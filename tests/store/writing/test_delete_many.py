"""DeleteCaptures: many captures with one call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from residuum.rpc.errors import Reason
from residuum.v1 import store_pb2
from residuum.wire.limits import MAX_CAPTURES_PER_DELETION, MAX_MESSAGE_BYTES
from store_svc.database.db import DamagedError, Table, Txn
from store_svc.writing.changes import Batch, purge_some
from tests.store.support import (
    ABORTED,
    COMPLETE,
    ONE_AND_SEVERAL,
    OPEN,
    Client,
    OpenStream,
    busy_writer,
    call_errors,
    describe,
    failing_with,
    grid,
    make_chunk,
    rejections,
    serving,
)
from tests.waiting import wait_for

LAYERS = [0, 1, 2]
UNKNOWN, NONE = Reason.ERROR_REASON_UNKNOWN_CAPTURE, Reason.ERROR_REASON_UNSPECIFIED


def put(client: Client, name: str, *, seal: bool = True) -> int:
    """Write a capture. Return its bytes."""
    client.open(describe(name))
    client.append([make_chunk(LAYERS, range(5))], name)
    if seal:
        assert client.seal(name).state == COMPLETE
    return client.get(name).num_bytes


def delete(client: Client, names: Iterable[str]) -> list[tuple[int, int]]:
    """Delete captures. Return the freed bytes and the reason of the error of each."""
    response = client.stub.DeleteCaptures(store_pb2.DeleteCapturesRequest(capture_ids=names), timeout=60)
    return [(result.freed_bytes, result.error.reason) for result in response.results]


def listed(client: Client) -> list[str]:
    return [item.capture_id for item in client.stub.ListCaptures(store_pb2.ListCapturesRequest()).captures]


@ONE_AND_SEVERAL
def test_each_capture_has_its_result_and_only_the_named_ones_are_deleted(client: Client) -> None:
    sizes = {name: put(client, name) for name in ("a", "kept", "b")}
    client.open(describe("empty"))
    client.seal("empty", outcome=ABORTED)
    results = delete(client, ["b", "gone", "empty", "a", "b", ""])
    assert results == [(sizes["b"], NONE), (0, UNKNOWN), (0, NONE), (sizes["a"], NONE), (0, UNKNOWN), (0, UNKNOWN)]
    assert listed(client) == ["kept"]
    assert client.read("kept")[0] == grid(LAYERS, range(5))
    for name in ("a", "b", "empty"):
        with failing_with(UNKNOWN):
            client.get(name)
    assert put(client, "a") == sizes["a"], "its name is free"


def test_the_error_of_a_capture_is_that_of_one_deletion(client: Client) -> None:
    with failing_with(UNKNOWN) as caught:
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="gone"))
    response = client.stub.DeleteCaptures(store_pb2.DeleteCapturesRequest(capture_ids=["gone"]))
    assert response.results[0].error.message == caught[0].message


def test_an_open_capture_is_deleted_and_its_rows_are_rejected(client: Client) -> None:
    ended, num_bytes = put(client, "ended"), put(client, "open", seal=False)
    stream, followed = OpenStream(client), []

    def follow() -> None:
        with failing_with(UNKNOWN) as caught:
            for answer in client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="open", follow=True)):
                followed.append(answer)
                has_begun.set()
        followed.append(caught[0])

    has_begun = threading.Event()
    follower = threading.Thread(target=follow)
    follower.start()
    assert has_begun.wait(30)
    assert client.get("open").state == OPEN
    assert delete(client, ["open", "ended"]) == [(num_bytes, NONE), (ended, NONE)]
    follower.join(30)
    assert not follower.is_alive(), "whoever follows a deleted capture is told"
    stream.send(make_chunk(LAYERS, [0]), "open")
    stream.half_close()
    assert rejections(stream.answers) == {1: UNKNOWN}
    with failing_with(UNKNOWN):
        client.seal("open")


def test_captures_of_one_call_share_a_transaction(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (store, client):
        names = [f"c{number}" for number in range(50)]
        for name in names:
            put(client, name)
        before = store._writer.counters.commits
        assert [reason for _, reason in delete(client, [*names, "gone"])] == [NONE] * 50 + [UNKNOWN]
        assert store._writer.counters.commits == before + 1
        assert listed(client) == []


def test_frames_of_many_captures_are_freed_together_but_not_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each transaction is synced. So one for each capture takes long, and a large one holds up writers."""
    freed = []

    def counted(txn: Txn, limit: int) -> bool:
        before = txn.count(Table.FRAMES)
        is_more = purge_some(txn, limit)
        freed.append(before - txn.count(Table.FRAMES))
        return is_more

    with serving(tmp_path / "store") as (store, client):
        names = [f"c{number}" for number in range(40)]
        for name in [*names, "kept"]:
            client.open(describe(name))
            client.append([make_chunk(LAYERS, [position]) for position in range(5)], name)
        monkeypatch.setattr("store_svc.writing.writer.purge_some", counted)
        monkeypatch.setattr("store_svc.writing.writer._PURGE_FRAMES", 9)
        assert store._db.num_chunks() == 205
        delete(client, names)
        end = time.monotonic() + 30
        while store._writer._purging or store._db.num_chunks() > 5:
            assert time.monotonic() < end, "the frames are not freed"
            time.sleep(0.01)
        assert sum(freed) == 200
        assert max(freed) <= 9
        assert len(freed) < 35
        with store._db.read() as txn:
            assert txn.count(Table.DOOMED) == 0
        assert client.read("kept")[0] == grid(LAYERS, range(5))


def test_a_call_deletes_as_many_captures_as_the_limit_and_no_more(client: Client) -> None:
    put(client, "a")
    for names in ([], ["a"] * (MAX_CAPTURES_PER_DELETION + 1)):
        with failing_with(Reason.ERROR_REASON_INVALID_FIELD) as caught:
            delete(client, names)
        assert caught[0].metadata == {"field": "capture_ids"}
        assert f"1 to {MAX_CAPTURES_PER_DELETION} captures, not {len(names)}" in caught[0].message
    assert listed(client) == ["a"]
    names = [f"c{number}" for number in range(MAX_CAPTURES_PER_DELETION - 1)]
    for name in names:
        client.open(describe(name))
    assert [reason for _, reason in delete(client, [*names, "a"])] == [NONE] * MAX_CAPTURES_PER_DELETION


def test_the_answer_fits_into_a_message_whatever_the_ids(client: Client) -> None:
    """The errors name IDs, and unprintable characters take the most room there."""
    request = store_pb2.DeleteCapturesRequest(capture_ids=["\U000e0001" * 250] * MAX_CAPTURES_PER_DELETION)
    assert request.ByteSize() < MAX_MESSAGE_BYTES
    assert {item.error.reason for item in client.stub.DeleteCaptures(request, timeout=60).results} == {UNKNOWN}


def test_one_that_fails_does_not_keep_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a bug, which fails the whole transaction."""
    whole = Batch.delete

    def fragile(batch: Batch, name: tuple[str, str]) -> int:
        freed = whole(batch, name)
        if name[1] == "b":
            raise ValueError("a bug")
        return freed

    with serving(tmp_path / "store") as (_, client):
        sizes = {name: put(client, name) for name in "abc"}
        monkeypatch.setattr(Batch, "delete", fragile)
        assert delete(client, "abc") == [
            (sizes["a"], NONE), (0, Reason.ERROR_REASON_INTERNAL), (sizes["c"], NONE)
        ]  # fmt: skip
        assert listed(client) == ["b"]


def test_captures_that_wait_for_a_busy_writer_are_deleted_in_order(tmp_path: Path) -> None:
    """A capture that is opened after the deletion was queued stays."""
    with serving(tmp_path / "store") as (store, client):
        num_bytes = put(client, "a")
        found: list[tuple[int, int]] = []
        deleting = threading.Thread(target=lambda: found.extend(delete(client, ["a", "b"])))
        with busy_writer(store):
            deleting.start()
            wait_for(lambda: store._writer.queue._commands)
            assert all(command.reserve for command in store._writer.queue._commands), "a full store deletes, too"
            opened = client.stub.OpenCapture.future(store_pb2.OpenCaptureRequest(description=describe("b")))
            wait_for(lambda: len(store._writer.queue._commands) == 3)
        deleting.join(30)
        opened.result(30)
        assert found == [(num_bytes, NONE), (0, UNKNOWN)]
        assert listed(client) == ["b"]


def test_a_stopping_store_deletes_nothing_more(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (store, client):
        put(client, "a")
        store._writer.queue.close()
        with failing_with(Reason.ERROR_REASON_NOT_SERVING):
            delete(client, ["a", "b"])
        assert {"method": "DeleteCaptures", "reason": "NOT_SERVING"} in call_errors(store)
        assert listed(client) == ["a"]


def test_the_call_fails_as_a_whole_if_the_store_stops_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the other calls about many captures, so callers handle a store that does not answer in one way."""

    def dies(*_: object, **__: object) -> object:
        raise DamagedError("scripted")

    with serving(tmp_path / "store") as (store, client), ThreadPoolExecutor(1) as pool:
        put(client, "a")
        with busy_writer(store):
            deleting = pool.submit(delete, client, ["gone", "a"])
            wait_for(lambda: store._writer.queue._commands)
            monkeypatch.setattr(store._db, "write", dies)
        with failing_with(Reason.ERROR_REASON_NOT_SERVING):
            deleting.result(30)
        assert {"method": "DeleteCaptures", "reason": "NOT_SERVING"} in call_errors(store)
        assert listed(client) == ["a"]
