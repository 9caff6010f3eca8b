"""A full store reports it to every caller, ends captures that wait for too long, and continues when it has room."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import generate_latest

import residuum
from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, store_pb2
from store_svc.captures.lifecycle import Wait
from store_svc.server import Store
from tests.small_disk import fill, small_disk
from tests.store.support import (
    ABORTED,
    COMPLETE,
    INCOMPLETE,
    ONE_AND_SEVERAL,
    OPEN,
    Client,
    describe,
    failing_with,
    rejections,
    serving,
    set_wait,
)
from tests.store.wide import MIB, append_until_full, open_wide, try_to_append, wide_chunk
from tests.waiting import wait_for

pytestmark = ONE_AND_SEVERAL

STORE_FULL = capture_pb2.INCOMPLETE_REASON_STORE_FULL
TIMED_OUT = capture_pb2.INCOMPLETE_REASON_TIMED_OUT

Serve = Callable[..., Iterator[tuple[Store, Client]]]


@pytest.fixture(params=["the disk is full", "the limit is reached"])
def small_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Serve]:
    """Serves a store with room for about 20 rows of `wide`. Its disk or --max-bytes is the limit."""
    if request.param == "the limit is reached":
        yield contextmanager(lambda **fields: serving_within(tmp_path / "store", max_bytes=28 * MIB, **fields))
        return
    with small_disk(tmp_path / "disk", 28 * MIB) as disk:
        yield contextmanager(lambda **fields: serving_within(disk / "store", **fields))


def serving_within(path: Path, **fields: object) -> Iterator[tuple[Store, Client]]:
    with serving(path, **fields) as running:
        yield running


def delete(client: Client, name: str) -> None:
    client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=name))


def stats(client: Client) -> store_pb2.GetStatsResponse:
    return client.stub.GetStats(store_pb2.GetStatsRequest())


def metric(store: Store, name: str) -> float:
    (line,) = (line for line in generate_latest(store._metrics.registry).decode().splitlines() if line.startswith(name))
    return float(line.rpartition(" ")[2])


def test_a_full_store_refuses_new_captures_until_one_is_deleted(small_store: Serve) -> None:
    with small_store() as (store, client):
        assert (metric(store, "residuum_store_full "), stats(client).why_full) == (0, "")
        open_wide(client, "a")
        count = append_until_full(client, "a")
        assert 12 <= count <= 26
        with failing_with(Reason.ERROR_REASON_STORE_FULL) as caught:
            client.open(describe("b"))
        assert "residuum rm" in caught[0].message
        open_wide(client, "a")  # a caller that got no answer may repeat the call
        assert metric(store, "residuum_store_full ") == 1
        assert metric(store, 'residuum_store_appended_chunks_total{outcome="refused"}') == 1
        assert stats(client).why_full
        delete(client, "a")
        client.open(describe("b"))
        assert (metric(store, "residuum_store_full "), stats(client).why_full) == (0, "")


def test_ending_and_deleting_need_no_room(small_store: Serve) -> None:
    """Many records are written to a full store, each in a separate transaction. Afterwards nothing is left."""
    with small_store(ending_timeout_seconds=0.05) as (_, client):
        names = [f"c{number}" for number in range(60)]
        for name in names:
            client.open(describe(name, prompt=500))
        open_wide(client, "a")
        append_until_full(client, "a")
        for name in names:
            client.seal(name, generated=[500], outcome=ABORTED)
        assert all(client.get(name, wait=20).state == ABORTED for name in names)
        for name in [*names, "a"]:
            delete(client, name)
        wait_for(lambda: stats(client).num_chunks == 0)
        wait_for(lambda: not stats(client).why_full)  # the store looks for room after it has freed the last chunk


def test_many_captures_of_a_full_store_are_deleted_with_one_call(small_store: Serve) -> None:
    with small_store(ending_timeout_seconds=0.05) as (_, client):
        names = [f"c{number}" for number in range(60)]
        for name in names:
            client.open(describe(name, prompt=500))
        open_wide(client, "a")
        append_until_full(client, "a")
        request = store_pb2.DeleteCapturesRequest(capture_ids=[*names, "a"])
        results = client.stub.DeleteCaptures(request, timeout=60).results
        assert not any(result.HasField("error") for result in results)
        assert results[-1].freed_bytes > MIB
        wait_for(lambda: stats(client).num_chunks == 0)
        wait_for(lambda: not stats(client).why_full)
        open_wide(client, "b")


def test_captures_are_deleted_after_a_restart_with_a_smaller_limit(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(60)]
    with serving(tmp_path / "store", max_bytes=96 * MIB) as (_, client):
        for name in names:
            open_wide(client, name)
            client.append([wide_chunk(0)], name)
            client.seal(name, generated=[0], outcome=ABORTED)
    with serving(tmp_path / "store", max_bytes=16 * MIB) as (_, client):
        with failing_with(Reason.ERROR_REASON_STORE_FULL):
            client.open(describe("d"))
        for name in names:
            delete(client, name)
        wait_for(lambda: stats(client).num_chunks == 0)
        wait_for(lambda: not stats(client).why_full)
        client.open(describe("d"))


def test_captures_that_wait_for_a_full_store_end_after_a_time(small_store: Serve) -> None:
    with small_store(full_timeout_seconds=1.0) as (_, client):
        for name in ("sealed", "unsealed"):
            open_wide(client, name)
        client.seal("sealed", generated=[2])
        filled, before = 0, time.time()
        while (failure := try_to_append(client, "unsealed", filled)) is None:
            filled, before = filled + 1, time.time()
        assert failure.reason == Reason.ERROR_REASON_STORE_FULL
        for name in ("sealed", "unsealed"):
            ended = client.get(name, wait=20)
            assert ended.end_time.ToNanoseconds() / 1e9 - before >= 0.9, "the store was not full before that"
            assert (ended.state, ended.incomplete_reason) == (INCOMPLETE, STORE_FULL)
            assert "the store was full" in ended.incomplete_detail
        assert client.get("unsealed").num_rows == filled
        with residuum.Client("127.0.0.1:1", store=client.target) as reader:
            for expected in (residuum.StoreFull, residuum.IncompleteCapture):
                with pytest.raises(expected, match="the store was full") as raised:
                    reader.activations("sealed")
            assert raised.value.reason == "STORE_FULL"
            assert raised.value.missing
        # Its rows no longer wait in the ring of the inference service, because they are rejected and not refused.
        assert rejections(client.append([wide_chunk(999)], "unsealed")) == {1: Reason.ERROR_REASON_CAPTURE_ENDED}
        assert stats(client).why_full


def test_captures_that_waited_continue_when_there_is_room(small_store: Serve) -> None:
    """The time while the store is full does not count towards the timeout for rows."""
    with small_store(seal_timeout_seconds=1.0, ending_timeout_seconds=1.0, full_timeout_seconds=60.0) as (
        store,
        client,
    ):
        for name in ("doomed", "waiting", "aborted"):
            open_wide(client, name)
        append_until_full(client, "doomed")
        assert try_to_append(client, "waiting", 0) is not None
        client.seal("waiting", generated=[0])
        client.seal("aborted", generated=[0], outcome=ABORTED)
        # It waits for no room, so it ends after a timeout that began later than that of the other and is as long.
        assert client.get("aborted", wait=20).state == ABORTED
        assert client.get("waiting").state == OPEN
        set_wait(store, Wait.ROWS, 60.0)
        delete(client, "doomed")
        wait_for(lambda: try_to_append(client, "waiting", 1) is None)
        set_wait(store, Wait.ROWS, 1.0)
        ended = client.get("waiting", wait=20)
        assert (ended.state, ended.incomplete_reason) == (INCOMPLETE, TIMED_OUT), "the timeout runs again"


def test_a_store_on_a_disk_that_others_filled(tmp_path: Path) -> None:
    """The store's reserve is allocated, so other programs cannot use it."""
    with small_disk(tmp_path / "disk", 28 * MIB) as disk, serving(disk / "store") as (_, client):
        open_wide(client, "a")
        client.append([wide_chunk(0), wide_chunk(1)], "a")
        fill(disk / "filler")
        assert append_until_full(client, "a") <= 2, "repeats are acknowledged, new rows are not"
        client.seal("a", generated=[1], outcome=ABORTED)
        with failing_with(Reason.ERROR_REASON_STORE_FULL):
            client.open(describe("b"))
        (disk / "filler").unlink()
        wait_for(lambda: not stats(client).why_full)  # without any write, the store notices that it has room
        client.open(describe("b", layers=[0], prompt=1))
        client.seal("b", generated=[1], outcome=COMPLETE)


def test_large_rows_are_freed_although_the_list_of_their_pages_exceeds_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB writes such a list for each transaction. 100 rows of 1 MiB take one of 200 KiB."""
    monkeypatch.setattr("store_svc.database.db._DISK_RESERVE", 128 << 10)
    monkeypatch.setattr("store_svc.database.db._LEAST_SHARD_RESERVE", 32 << 10)
    monkeypatch.setattr("store_svc.database.lmdb_file._GROWTH_STEP", 4 << 10)
    with small_disk(tmp_path / "disk", 112 * MIB) as disk, serving(disk / "store") as (store, client):
        open_wide(client, "a")
        assert append_until_full(client, "a") > 90
        fill(disk / "filler")
        delete(client, "a")
        wait_for(lambda: store._db.num_chunks() == 0, "free rows")
        wait_for(lambda: not stats(client).why_full, "room")
        open_wide(client, "b")
        assert append_until_full(client, "b") > 90
