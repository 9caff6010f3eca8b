"""Retention by age and by size, which never affects readers or writers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, store_pb2
from store_svc.captures.capture_names import CaptureName
from store_svc.captures.catalog import Catalog
from store_svc.captures.ledger import Cells
from store_svc.captures.lifecycle import Capture
from store_svc.captures.positions import Positions
from store_svc.settings import StoreSettings
from store_svc.writing.retention import Retention, RetentionPolicy
from tests.store.support import (
    ABORTED,
    COMPLETE,
    OPEN,
    POST,
    Client,
    Process,
    describe,
    failing_with,
    grid,
    make_chunk,
    serving,
)
from tests.waiting import wait_for

PENDING, COPIED = capture_pb2.ARCHIVE_STATE_PENDING, capture_pb2.ARCHIVE_STATE_COPIED
MOVED = capture_pb2.ARCHIVE_STATE_MOVED
LAYERS = [0, 1, 2]
WIDE = 1 << 12
"""Elements of a wide row: 48 KiB in three layers."""
DEADLINE = 20.0
Start = Callable[..., Process]


def summary(name: str, num_bytes: int, ended: float) -> store_pb2.CaptureSummary:
    result = store_pb2.CaptureSummary(capture_id=name, state=COMPLETE, num_bytes=num_bytes)
    result.end_time.FromNanoseconds(int(ended * 1e9))
    return result


def catalog_of(*sizes: int) -> Catalog:
    """Make captures "1", "2", ... of these sizes that ended at 1, 2, ... seconds."""
    catalog = Catalog()
    for number, size in enumerate(sizes, start=1):
        catalog.open_ended(number, summary(str(number), size, number))
    return catalog


def names(retention: Retention) -> list[str]:
    return [item.name.capture_id for item in retention.take()]


def test_the_oldest_captures_are_deleted_until_the_rest_fits() -> None:
    catalog = catalog_of(10, 10, 10, 10)
    retention = Retention(RetentionPolicy(max_bytes=25), catalog, lambda: 100.0)
    assert retention.excess == 15
    taken = retention.take()
    assert [(item.name.capture_id, item.cause, item.age) for item in taken] == [
        ("1", "size", 99.0),
        ("2", "size", 98.0),
    ]
    assert retention.seconds_to_next() is None, "nothing to do until the next write"


def test_captures_are_deleted_in_the_order_in_which_they_ended() -> None:
    catalog = Catalog()
    for number, ended in ((1, 30.0), (2, 10.0), (3, 20.0)):
        catalog.open_ended(number, summary(str(number), 10, ended))
    assert names(Retention(RetentionPolicy(max_bytes=15), catalog, lambda: 100.0)) == ["2", "3"]


def test_old_captures_are_deleted_and_the_next_deadline_is_known() -> None:
    now = [12.0]
    retention = Retention(RetentionPolicy(max_age=10), catalog_of(1, 1, 5), lambda: now[0])
    assert retention.seconds_to_next() == 0
    assert names(retention) == ["1", "2"]
    assert retention.seconds_to_next() == 1.0
    now[0] = 13.0
    assert names(Retention(RetentionPolicy(max_age=10), catalog_of(1, 1, 5), lambda: 13.0)) == ["1", "2", "3"]


def test_a_clock_that_is_set_is_noticed_within_a_minute() -> None:
    retention = Retention(RetentionPolicy(max_age=1e6), catalog_of(1), lambda: 2.0)
    assert names(retention) == []
    assert retention.seconds_to_next() == 60.0


def test_a_clock_that_is_set_back_is_noticed_within_a_minute() -> None:
    now = [11.0 + 24 * 3600]
    retention = Retention(RetentionPolicy(max_age=10 + 24 * 3600), catalog_of(1, 5), lambda: now[0])
    assert names(retention) == ["1"]
    now[0] -= 24 * 3600
    assert retention.seconds_to_next() == 60.0


def test_captures_that_are_being_read_are_skipped() -> None:
    catalog = catalog_of(10, 10, 10)
    retention = Retention(RetentionPolicy(max_bytes=15), catalog, lambda: 100.0)
    with catalog.reading(CaptureName("", "1")), catalog.reading(CaptureName("", "1")):
        assert names(retention) == ["2", "3"]
        assert retention.seconds_to_next() == 1.0, "its reader may disconnect"
    with pytest.raises(Failure) as caught:  # although the writer has not deleted it yet
        catalog.require(CaptureName("", "2"))
    assert caught.value.reason == Reason.ERROR_REASON_UNKNOWN_CAPTURE
    with pytest.raises(Failure), catalog.reading(CaptureName("", "2")):
        pass
    catalog.cancel_expiry(2)
    assert catalog.require(CaptureName("", "2")) == (2, None)


def test_many_captures_are_deleted_in_several_passes() -> None:
    catalog = catalog_of(*[1] * 1500)
    retention = Retention(RetentionPolicy(max_bytes=0), catalog, lambda: 2000.0)
    taken = retention.take()
    assert len(taken) == 1024
    assert retention.seconds_to_next() == 0
    for item in taken:
        catalog.delete(item.name, item.number)
    assert (len(retention.take()), catalog.num_bytes) == (476, 476)


def archived(states: dict[int, int], empty: int = 0) -> Catalog:
    """Make captures of ten bytes, each with a state of the archive, that ended in the order of their numbers.

    The capture with the number `empty` has no rows.
    """
    catalog = Catalog(has_archive=True)
    catalog.is_archive_claimed = True
    for number, state in states.items():
        item = summary(str(number), 0 if number == empty else 10, number)
        item.archive_state = state
        catalog.open_ended(number, item)
    return catalog


def test_rows_that_the_archive_has_are_dropped_before_a_capture_is_deleted() -> None:
    catalog = archived({1: PENDING, 2: COPIED, 3: COPIED, 4: MOVED, 5: PENDING})
    retention = Retention(RetentionPolicy(max_bytes=15), catalog, lambda: 100.0)
    assert retention.to_drop() == [2, 3]
    assert names(retention) == [], "not before these are dropped"
    assert retention.seconds_to_next() is not None
    for number in (2, 3):
        catalog.note_archive_state(number, MOVED)
    assert (catalog.num_bytes, retention.to_drop()) == (20, [])
    assert names(retention) == ["1"], "its copy does not exist"
    assert retention.seconds_to_next() is None


def test_a_copied_capture_without_rows_does_not_switch_the_limit_off() -> None:
    catalog = archived({1: COPIED, 2: PENDING, 3: PENDING}, empty=1)
    retention = Retention(RetentionPolicy(max_bytes=15), catalog, lambda: 100.0)
    assert retention.to_drop() == []
    assert names(retention) == ["2"]
    catalog.delete(CaptureName("", "1"), 1)
    assert catalog.num_captures == 2


def test_nothing_is_dropped_before_the_archive_has_answered() -> None:
    """Nor is a capture deleted in place of rows that will be dropped."""
    catalog = archived({1: PENDING, 2: COPIED, 3: COPIED, 4: PENDING, 5: PENDING})
    catalog.is_archive_claimed = False
    retention = Retention(RetentionPolicy(max_bytes=25), catalog, lambda: 100.0)
    assert catalog.to_drop(1, 9) == retention.to_drop() == []
    assert names(retention) == ["1"], "50 bytes less 20 that will be dropped are more than 25"
    catalog.delete(CaptureName("", "1"), 1)
    assert names(retention) == []
    catalog.is_archive_claimed = True
    assert retention.to_drop() == [2, 3]


def test_captures_in_the_archive_are_deleted_when_they_are_too_old() -> None:
    catalog = archived({1: PENDING, 2: COPIED, 3: MOVED, 4: MOVED})
    assert names(Retention(RetentionPolicy(max_age=97, max_bytes=5), catalog, lambda: 100.0)) == ["1", "2", "3"]


def test_captures_that_were_not_read_for_longest_are_dropped_first() -> None:
    catalog = archived({1: COPIED, 2: COPIED, 3: COPIED})
    catalog.touch(1)
    catalog.delete(CaptureName("", "2"), 2)
    assert catalog.to_drop(1, 9) == [3]
    assert catalog.to_drop(11, 9) == [3, 1]
    assert catalog.to_drop(100, 1) == [3]
    assert catalog.to_drop(0, 9) == []


class Captures:
    """A catalog under random operations, with a plain model of its contents."""

    def __init__(self, limit: int) -> None:
        self.catalog = Catalog()
        self.retention = Retention(RetentionPolicy(max_bytes=limit), self.catalog, lambda: 1e6)
        self.limit = limit
        self.open: dict[int, int] = {}
        self.ended: list[tuple[int, int]] = []  # in the order in which they ended
        self.readers: dict[int, ExitStack] = {}
        self.next = 1
        self.now = 1

    def _capture(self, number: int, size: int, *, ended: bool = False) -> Capture:
        capture = Capture(number, describe(str(number)), Timestamp(seconds=1), 0.0)
        capture.add(Cells(0, POST, LAYERS, Positions.of([0])), size, 0.0)
        if ended:
            self.now += 1
            capture.time_out(Timestamp(seconds=self.now), 1.0)
        return capture

    def begin(self, size: int) -> None:
        self.catalog.open(self._capture(self.next, size), [])
        self.open[self.next] = size
        self.next += 1

    def end(self, size: int) -> None:
        if self.open:
            number, before = self.open.popitem()
            self.catalog.publish(self._capture(number, before + size, ended=True), [])
            self.ended.append((number, before + size))

    def read(self, size: int) -> None:
        known = [*self.open, *(number for number, _ in self.ended)]
        number = known[size % len(known)] if known else 0
        if number in self.readers:
            self.readers.pop(number).close()
        elif known:
            self.readers[number] = ExitStack()
            self.readers[number].enter_context(self.catalog.reading(CaptureName("", str(number))))

    def expire(self, _size: int) -> None:
        taken = [(item.number, item.num_bytes) for item in self.retention.take()]
        free = [item for item in self.ended if item[0] not in self.readers]
        assert taken == free[: len(taken)], "in the order in which they ended, except captures that are being read"
        for number, _ in taken:
            self.catalog.delete(CaptureName("", str(number)), number)
        kept = [item for item in self.ended if item not in taken]
        total = sum(self.open.values()) + sum(size for _, size in kept)
        assert self.catalog.num_bytes == total
        assert total <= self.limit or taken == free, "above the limit only if no other capture may be deleted"
        if taken:
            assert total + taken[-1][1] > self.limit, "deleting the newest of them was necessary"
        self.ended = kept


@given(
    limit=st.integers(0, 60),
    steps=st.lists(st.tuples(st.sampled_from(["begin", "end", "read", "expire"]), st.integers(1, 20)), max_size=60),
)
def test_retention_deletes_enough_if_it_may(limit: int, steps: list[tuple[str, int]]) -> None:
    captures = Captures(limit)
    for step, size in [*steps, ("expire", 1)]:
        getattr(captures, step)(size)
    for reader in captures.readers.values():
        reader.close()


# ------------------------------------------------------------------------------------------------- in a real store


def make(client: Client, name: str, *, sealed: bool = True, positions: int = 1) -> int:
    """Write a capture of this many wide rows. Return its bytes."""
    client.open(describe(name, prompt=positions, width=WIDE))
    client.append([make_chunk(LAYERS, [at], width=WIDE) for at in range(positions)], name)
    if sealed:
        return client.seal(name, generated=[1]).num_bytes
    return client.get(name).num_bytes


def listed(client: Client) -> list[str]:
    """Return all captures, oldest first."""
    answer = client.stub.ListCaptures(store_pb2.ListCapturesRequest(page_size=1000))
    return [item.capture_id for item in reversed(answer.captures)]


def stats_of(client: Client) -> store_pb2.GetStatsResponse:
    return client.stub.GetStats(store_pb2.GetStatsRequest())


def test_retention_by_size_keeps_the_newest_and_open_captures(start: Start) -> None:
    process = start("--retain-bytes", "200KiB")
    client = process.client
    make(client, "open", sealed=False)
    sizes = {name: make(client, name) for name in "abcdef"}
    wait_for(lambda: stats_of(client).num_bytes <= 200 << 10)
    assert listed(client) == ["open", "d", "e", "f"], "three captures of 48 KiB and the open one"
    stats = stats_of(client)
    assert stats.num_chunks >= 4
    retention = stats.retention
    assert (retention.max_bytes, retention.HasField("max_age")) == (200 << 10, False)
    assert (retention.captures_expired_by_size, retention.captures_expired_by_age) == (3, 0)
    assert retention.bytes_expired == sum(sizes[name] for name in "abc")
    with failing_with(Reason.ERROR_REASON_UNKNOWN_CAPTURE) as caught:
        client.get("a")
    assert "has expired" in caught[0].message
    assert client.read("f")[0] == grid(LAYERS, [0])
    assert process.end() == 0
    lines = [json.loads(line) for line in process.log_path.read_text().splitlines()]
    gone = [line for line in lines if line["event"] == "capture expired"]
    assert [(line["request_id"], line["cause"], line["bytes"]) for line in gone] == [
        (name, "size", sizes[name]) for name in "abc"
    ]


def test_retention_by_age_deletes_ended_captures_and_keeps_open_ones(start: Start) -> None:
    process = start("--retain-hours", "0.0008")  # about three seconds
    client = process.client
    make(client, "open", sealed=False)
    for name in "abc":
        make(client, name)
    wait_for(lambda: listed(client) == ["open"])
    retention = stats_of(client).retention
    assert (retention.captures_expired_by_age, retention.captures_expired_by_size) == (3, 0)
    assert retention.max_age.ToMilliseconds() == 2880
    client.seal("open", generated=[1])
    wait_for(lambda: not listed(client))
    wait_for(lambda: not stats_of(client).num_chunks)
    process.end()
    lines = [json.loads(line) for line in process.log_path.read_text().splitlines()]
    ages = {line["request_id"]: line["age_seconds"] for line in lines if line["event"] == "capture expired"}
    assert list(ages) == ["a", "b", "c", "open"]
    assert min(ages.values()) >= 2.8, "none is deleted earlier"


def test_captures_expire_while_the_store_is_stopped(start: Start) -> None:
    process = start()
    for name in "ba":
        make(process.client, name)
    process.end()  # the next start takes longer than the retention time
    client = start("--retain-hours", str(0.01 / 3600)).client
    wait_for(lambda: not listed(client))


def test_the_order_survives_a_restart(start: Start) -> None:
    process = start()
    make(process.client, "last", sealed=False)
    for name in "cab":
        make(process.client, name)
    process.client.seal("last", generated=[1])
    process.end()
    client = start("--retain-bytes", "100KiB").client
    wait_for(lambda: len(listed(client)) == 2)
    assert set(listed(client)) == {"b", "last"}


def test_a_capture_larger_than_the_limit_goes_when_it_has_ended(start: Start) -> None:
    process = start("--retain-bytes", "100KiB")
    client = process.client
    make(client, "large", sealed=False, positions=5)
    make(client, "next")
    wait_for(lambda: listed(client) == ["large"])
    assert client.get("large").state == OPEN
    assert client.seal("large", generated=[1]).state == COMPLETE
    wait_for(lambda: not listed(client))
    process.end()
    warnings = [line for line in process.log_path.read_text().splitlines() if "captures exceed retain-bytes" in line]
    assert len(warnings) == 1


def test_freed_pages_are_used_again(start: Start) -> None:
    """The store accepts ten times the map's size in total and refuses nothing."""
    client = start("--retain-bytes", "6MiB", "--max-bytes", "16MiB").client
    for number in range(110):
        make(client, f"c{number}", positions=32)  # 1.5 MiB
        # Retention runs after the commit, and not only once a minute.
        wait_for(lambda: stats_of(client).num_bytes <= 6 << 20, seconds=20)
    stats = stats_of(client)
    assert listed(client)[-1] == "c109"
    assert stats.disk_bytes <= 16 << 20
    assert 0 < stats.used_bytes <= stats.disk_bytes
    assert stats.free_disk_bytes > 0
    assert abs(stats.server_time.ToSeconds() - time.time()) < 60


def test_a_reader_keeps_what_it_reads(tmp_path: Path) -> None:
    """The reader takes one message and stalls. The capture is larger than gRPC's read-ahead."""
    with serving(tmp_path / "store", retain_bytes=20 << 20) as (_, client):
        make(client, "slow", positions=400)
        answers = client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="slow"), timeout=60)
        next(answers)
        for number in range(10):
            make(client, f"c{number}", positions=10)
        wait_for(lambda: stats_of(client).num_bytes <= 20 << 20)
        assert listed(client)[0] == "slow"
        assert "c0" not in listed(client), "captures that are being read count, too"
        assert sum(len(answer.chunk.header.positions) for answer in answers) == 400
        make(client, "after")
        make(client, "more", positions=10)
        wait_for(lambda: "slow" not in listed(client))
        assert "after" in listed(client)


def test_a_follower_gets_every_row_of_a_capture_that_expires_when_it_ends(tmp_path: Path) -> None:
    with serving(tmp_path / "store", retain_bytes=1) as (_, client):
        client.open(describe("a", prompt=50, width=WIDE))
        found: list[object] = []
        follower = threading.Thread(target=lambda: found.append(client.read("a", follow=True)))
        follower.start()
        client.append([make_chunk(LAYERS, [0], width=WIDE)])
        wait_for(lambda: client.get().num_rows)
        client.append([make_chunk(LAYERS, [at], width=WIDE) for at in range(1, 50)])
        client.seal(generated=[1])
        follower.join(DEADLINE)
        ((cells, manifest),) = found
        assert cells == grid(LAYERS, range(50))
        assert manifest.state == COMPLETE
        wait_for(lambda: not listed(client))


def test_a_capture_that_is_being_read_can_be_deleted_and_its_reader_fails(tmp_path: Path) -> None:
    with serving(tmp_path / "store", retain_hours=1) as (_, client):
        make(client, "a", positions=400)  # more than gRPC's read-ahead
        answers = client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="a"), timeout=60)
        next(answers)
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
        with failing_with(Reason.ERROR_REASON_UNKNOWN_CAPTURE):
            list(answers)


def test_an_id_is_free_again_when_its_capture_has_expired(tmp_path: Path) -> None:
    with serving(tmp_path / "store", retain_bytes=1) as (_, client):
        for _ in range(2):
            make(client, "a")
            wait_for(lambda: not listed(client))
        client.open(describe("a"))
        client.seal("a", generated=[1], outcome=ABORTED)


@pytest.mark.parametrize("size", ["0", "15MiB", "-1"])
def test_an_impossible_limit_is_refused(tmp_path: Path, size: str) -> None:
    with pytest.raises(ValueError, match="retain_bytes"):
        StoreSettings(path=tmp_path, max_bytes="16MiB", retain_bytes=size)
    assert StoreSettings(path=tmp_path, max_bytes="16MiB", retain_bytes="14MiB").retain_bytes == 14 << 20
