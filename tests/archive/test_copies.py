"""Ended captures are copied, read from the archive, listed, labelled, searched and deleted there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from residuum.rpc.objects import ArchiveRefusedError, Objects
from residuum.v1 import capture_pb2, errors_pb2, selection_pb2, store_pb2
from residuum.wire.rows.archive import CAPTURES, unpack_capture
from store_svc.archive import keeper
from store_svc.database.db import Table
from store_svc.writing.changes import Batch
from tests.archive.support import (
    COPIED,
    LAYERS,
    MOVED,
    PENDING,
    archived_ids,
    capture,
    chunk_objects,
    file_url,
    listed_states,
    state,
    stats,
    wait_for_state,
)
from tests.store.support import (
    ABORTED,
    POST,
    describe,
    failing_with,
    grid,
    make_chunk,
    row,
    serving,
    stored_frames,
    wait_request,
)
from tests.waiting import wait_for

ONE_AND_SEVERAL = pytest.mark.parametrize("shards", [1, 3], ids=["one shard", "three shards"])


@pytest.fixture
def url(tmp_path: Path) -> str:
    return file_url(tmp_path / "archive")


def test_an_ended_capture_is_copied_and_read_from_the_database(tmp_path: Path, url: str) -> None:
    with serving(tmp_path / "store", archive=url) as (_, client):
        cells = capture(client)
        wait_for_state(client, COPIED)
        assert client.read()[0] == cells
        assert archived_ids(Objects(url)) == ["a"]
        assert stats(client).bytes_fetched == 0
        wait_for(lambda: listed_states(client) == {"a": COPIED}, "state in the list")


@ONE_AND_SEVERAL
def test_rows_that_are_only_in_the_archive_are_read_from_there(tmp_path: Path, url: str, shards: int) -> None:
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0, shards=shards) as (store, client):
        cells = capture(client, prompt=40)
        wait_for_state(client, MOVED)
        wait_for(lambda: store._db.num_chunks() == 0, "empty database")
        found, manifest = client.read()
        assert found == cells
        assert manifest.archive_state == MOVED
        assert stats(client).bytes_fetched > 0
        (listed,) = client.stub.ListCaptures(store_pb2.ListCapturesRequest()).captures
        assert listed.archive_state == MOVED
        assert listed.num_bytes > 0
        assert client.stub.GetStats(store_pb2.GetStatsRequest()).num_bytes == 0
        assert client.read(layers=[1])[0] == grid([1], range(40))
        few = selection_pb2.PositionSelection()
        few.ranges.add(first=3, last=6)
        assert client.read(positions=few)[0] == grid(LAYERS, range(3, 7))


def test_several_objects_are_read_whole_and_in_parts(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects and ranges that are far smaller than usual, so that chunks spread over many."""
    monkeypatch.setattr("store_svc.archive.copying.OBJECT_BYTES", 4000)
    monkeypatch.setattr("store_svc.archive.fetching._RANGE_BYTES", 500)
    monkeypatch.setattr("store_svc.archive.fetching._AHEAD_BYTES", 3000)
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (_, client):
        cells = capture(client, prompt=300)
        wait_for_state(client, MOVED)
        assert len(chunk_objects(Objects(url))) > 5
        assert client.read()[0] == cells
        assert client.read(layers=[2])[0] == grid([2], range(300))


def test_chunks_of_eight_mebibytes_are_read_through_shared_memory_and_messages(tmp_path: Path, url: str) -> None:
    width = 1 << 17
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (_, client):
        description = describe("wide", layers=[0], prompt=8, width=width)
        client.open(description)
        client.append([make_chunk([0], [at, at + 1], width=width) for at in range(0, 8, 2)], "wide")
        client.seal("wide", generated=(1,))
        wait_for_state(client, MOVED, ["wide"])
        assert client.read("wide")[0] == grid([0], range(8))


def test_aborted_and_empty_captures_are_copied_too(tmp_path: Path, url: str) -> None:
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0, ending_timeout_seconds=0.1) as (_, client):
        client.open(describe("aborted"))
        client.append([make_chunk(LAYERS, [0])], "aborted")
        client.seal("aborted", outcome=ABORTED)
        client.open(describe("empty"))
        client.seal("empty", outcome=ABORTED)
        wait_for_state(client, MOVED, ["aborted"])
        wait_for_state(client, COPIED, ["empty"])  # it has no rows that could be dropped
        assert client.read("aborted")[0] == grid(LAYERS, [0])
        assert client.read("empty")[0] == set()


def test_a_deleted_capture_is_deleted_in_the_archive(tmp_path: Path, url: str) -> None:
    objects = Objects(url)
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (store, client):
        capture(client, "a")
        capture(client, "b")
        wait_for_state(client, MOVED, ["a", "b"])
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
        with failing_with(errors_pb2.ERROR_REASON_UNKNOWN_CAPTURE):
            client.read("a")
        wait_for(lambda: archived_ids(objects) == ["b"], "deletion")
        wait_for(lambda: len(chunk_objects(objects)) == 1, "deletion of chunks")
        assert client.read("b")[0] == grid(LAYERS, range(4))
        assert store._catalog.num_bytes == 0


def test_many_captures_are_deleted_in_both(tmp_path: Path, url: str) -> None:
    """Captures whose rows are only in the archive, one whose rows are in both, and one that is still open."""
    objects = Objects(url)
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (store, client):
        moved = [f"moved{at}" for at in range(5)]
        for name in (*moved, "kept"):
            capture(client, name)
        wait_for_state(client, MOVED, [*moved, "kept"])
        num_bytes = client.get("kept").num_bytes
        store._archive._dropper.keep_bytes = 1 << 30
        capture(client, "copied")
        wait_for_state(client, COPIED, ["copied"])
        client.open(describe("open"))
        request = store_pb2.DeleteCapturesRequest(capture_ids=[*moved, "none", "copied", "open"])
        results = client.stub.DeleteCaptures(request).results
        assert [result.freed_bytes for result in results] == [*[num_bytes] * 5, 0, num_bytes, 0]
        assert [result.error.reason for result in results] == [0] * 5 + [errors_pb2.ERROR_REASON_UNKNOWN_CAPTURE, 0, 0]
        wait_for(lambda: archived_ids(objects) == ["kept"], "deletion")
        wait_for(lambda: len(chunk_objects(objects)) == 1, "deletion of chunks")
        assert client.read("kept")[0] == grid(LAYERS, range(4))
        assert store._catalog.num_bytes == 0
        wait_for(lambda: store._db.num_chunks() == 0, "the frames are freed")


@pytest.mark.parametrize("at_once", [1, 64])
def test_an_object_that_cannot_be_deleted_keeps_nothing_else_from_being_done(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(keeper, "_DELETED_AT_ONCE", at_once)
    objects, whole = Objects(url), Objects.delete
    names = [f"c{at}" for at in range(5)]
    with serving(tmp_path / "store", archive=url) as (store, client):
        for name in names:
            capture(client, name)
        wait_for_state(client, COPIED, names)
        manifests = {path: unpack_capture(objects.get(path)).manifest for path in objects.list(CAPTURES)}
        (locked,) = [path for path, manifest in manifests.items() if manifest.description.capture_id == "c0"]

        def delete(self: Objects, paths: list[str]) -> None:
            if locked in paths:
                raise ArchiveRefusedError("AccessDenied: the object is locked")
            whole(self, paths)

        with monkeypatch.context() as patched:
            patched.setattr(Objects, "delete", delete)
            store._writer.call("", lambda batch: batch.begin_deletions(["a-foreign-folder"]))
            for name in names[:4]:
                client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=name))
            label = capture_pb2.Label(name="split", text="train")
            client.stub.LabelCapture(store_pb2.LabelCaptureRequest(capture_id="c4", labels=[label]))
            wait_for(lambda: archived_ids(objects) == ["c0", "c4"], "deletion of the others")
            wait_for(lambda: [1 for path in objects.list(CAPTURES) if b"split" in objects.get(path)], "label")
            wait_for(lambda: "locked" in stats(client).why_behind, "why")
        wait_for(lambda: archived_ids(objects) == ["c4"], "deletion once it is not locked")
        wait_for(lambda: len(chunk_objects(objects)) == 1, "deletion of chunks")


def test_a_replaced_capture_leaves_only_the_new_one(tmp_path: Path, url: str) -> None:
    objects = Objects(url)
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (_, client):
        capture(client, prompt=4)
        wait_for_state(client, MOVED)
        client.stub.OpenCapture(
            store_pb2.OpenCaptureRequest(
                description=describe("a", prompt=6, layers=LAYERS), if_exists=capture_pb2.IF_EXISTS_REPLACE
            )
        )
        client.append([make_chunk(LAYERS, range(6))])
        client.seal(generated=(1,))
        wait_for_state(client, MOVED)
        assert client.read()[0] == grid(LAYERS, range(6))
        wait_for(lambda: len(chunk_objects(objects)) == 1 and len(archived_ids(objects)) == 1, "deletion")


def test_labels_that_change_later_reach_the_archive(tmp_path: Path, url: str) -> None:
    objects = Objects(url)

    def labels() -> list[str]:
        (path,) = objects.list(CAPTURES)
        return [item.name for item in unpack_capture(objects.get(path)).manifest.labels]

    with serving(tmp_path / "store", archive=url) as (_, client):
        capture(client)
        wait_for_state(client, COPIED)
        assert labels() == []
        client.stub.LabelCapture(
            store_pb2.LabelCaptureRequest(capture_id="a", labels=[capture_pb2.Label(name="split", text="train")])
        )
        wait_for(lambda: labels() == ["split"], "label in the archive")


def test_a_search_finds_rows_that_are_only_in_the_archive(tmp_path: Path, url: str) -> None:
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (_, client):
        capture(client, "moved", prompt=50)
        wait_for_state(client, MOVED, ["moved"])
        vector = np.ones(4, "<f4")
        request = store_pb2.SearchRequest(vector=vector.tobytes(), layer=1, max_hits=3)
        *_, last = client.stub.Search(request)
        assert [(hit.capture_id, hit.position) for hit in last.hits] == [("moved", 49), ("moved", 48), ("moved", 47)]
        expected = [float(row((0, POST, 1, at)).astype("f8") @ vector) for at in (49, 48, 47)]
        np.testing.assert_allclose([hit.score for hit in last.hits], expected, rtol=1e-6)
        assert last.progress.rows_scanned == 50


def test_hostile_ids_become_no_paths(tmp_path: Path, url: str) -> None:
    accepted = ["a.b_c-d", "x" * 128, "a..b"]
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (_, client):
        for capture_id in ("..", "../owner", "a/b"):
            with failing_with(errors_pb2.ERROR_REASON_INVALID_FIELD):
                capture(client, capture_id)
        for capture_id in accepted:
            capture(client, capture_id)
        wait_for_state(client, MOVED, accepted)
        for capture_id in accepted:
            assert client.read(capture_id)[0] == grid(LAYERS, range(4))
    names = {path.name for path in (tmp_path / "archive" / "captures").iterdir()}
    assert len(names) == len(accepted)
    assert all(len(name) == 33 and name.replace("-", "").isalnum() for name in names)


def test_a_capture_of_another_tenant_stays_hidden(tmp_path: Path, url: str) -> None:
    """The same ID in two tenants: two captures in the archive, each with its own rows."""
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (_, client):
        for tenant, prompt in (("one", 4), ("two", 6)):
            description = describe("same", layers=LAYERS, prompt=prompt)
            description.tenant = tenant
            client.stub.OpenCapture(store_pb2.OpenCaptureRequest(description=description))
            frames = store_pb2.AppendChunksRequest(number=1, capture_id="same", tenant=tenant)
            frames.chunk.ParseFromString(make_chunk(LAYERS, range(prompt)))
            client.send([frames.SerializeToString()])
            seal = store_pb2.SealCaptureRequest(
                capture_id="same",
                tenant=tenant,
                sequences=[capture_pb2.SequenceOutcome(generated_token_ids=[1], finish_reason="stop")],
                outcome=capture_pb2.CAPTURE_STATE_COMPLETE,
            )
            client.stub.SealCapture(seal)
        wait_for(lambda: stats(client).captures_moved == 2, "copies")
        assert client.read("same", tenant="one")[0] == grid(LAYERS, range(4))
        assert client.read("same", tenant="two")[0] == grid(LAYERS, range(6))
        with failing_with(errors_pb2.ERROR_REASON_UNKNOWN_CAPTURE):
            client.read("same")


def test_a_restarted_store_knows_what_is_in_the_archive(tmp_path: Path, url: str) -> None:
    with serving(tmp_path / "store") as (_, client):
        capture(client, "before")
        assert state(client, "before") == capture_pb2.ARCHIVE_STATE_UNSPECIFIED
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (_, client):
        capture(client, "after")
        wait_for_state(client, MOVED, ["before", "after"])
    with serving(tmp_path / "store", archive=url) as (_, client):
        assert state(client, "before") == MOVED
        assert client.read("before")[0] == client.read("after")[0] == grid(LAYERS, range(4))
        assert stats(client).captures_moved == 2


def test_a_call_can_wait_for_the_copy(tmp_path: Path, url: str) -> None:
    with serving(tmp_path / "store", archive=url) as (_, client):
        capture(client)
        request = store_pb2.GetCaptureRequest(capture_id="a", wait_for_archive=True)
        request.wait.FromSeconds(30)
        assert client.stub.GetCapture(request).manifest.archive_state == COPIED
    with serving(tmp_path / "plain") as (_, client):
        capture(client)
        assert client.stub.GetCapture(request).manifest.archive_state == capture_pb2.ARCHIVE_STATE_UNSPECIFIED


def test_damaged_objects_are_noticed(tmp_path: Path, url: str) -> None:
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (store, client):
        capture(client)
        wait_for_state(client, MOVED)
        wait_for(lambda: store._db.num_chunks() == 0, "empty database")
        (path,) = (tmp_path / "archive" / "chunks").glob("*/*")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with failing_with(errors_pb2.ERROR_REASON_CHECKSUM_MISMATCH):
            client.read()
        path.write_bytes(data[:-1])
        with failing_with(errors_pb2.ERROR_REASON_CHECKSUM_MISMATCH):
            client.read()
        path.write_bytes(b"")
        with failing_with(errors_pb2.ERROR_REASON_CHECKSUM_MISMATCH) as failures:
            client.read()
        assert "lacks rows" in failures[0].message
        path.unlink()
        with failing_with(errors_pb2.ERROR_REASON_CHECKSUM_MISMATCH) as failures:
            client.read()
        assert "lacks rows" in failures[0].message


def test_a_damaged_chunk_is_not_copied(tmp_path: Path, url: str) -> None:
    with serving(tmp_path / "store") as (store, client):
        capture(client, "bad")
        capture(client, "good")
        with store._db.read() as txn:
            key, value = next(iter(stored_frames(txn)))
            damaged = bytes(value[:-1]) + bytes([value[-1] ^ 1])
        store._db.write(lambda txn: txn.put(Table.FRAMES, key, damaged))
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (store, client):
        wait_for_state(client, MOVED, ["good"])
        wait_for(lambda: stats(client).captures_not_copied == 1, "refusal")
        request = wait_request(30, "bad")
        request.wait_for_archive = True
        with failing_with(errors_pb2.ERROR_REASON_CHECKSUM_MISMATCH):
            client.stub.GetCapture(request, timeout=10)
        assert state(client, "bad") == PENDING
        assert archived_ids(Objects(url)) == ["good"]
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="bad"))
        wait_for(lambda: stats(client).captures_not_copied == 0, "it does not count once it is deleted")


def test_a_copy_that_a_bug_prevents_is_tried_again(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store_svc.archive.copier._RETRY_SECONDS", 0.5)
    with serving(tmp_path / "store", archive=url) as (store, client):
        with monkeypatch.context() as patched:
            patched.setattr(Batch, "note_copied", lambda *_, **__: 1 / 0)
            capture(client)
            wait_for(lambda: store._archive._copier._failed, "failure")
            assert state(client) == PENDING
            assert store._archive.seconds_behind > 0
        wait_for_state(client, COPIED)
        wait_for(lambda: store._archive.seconds_behind == 0, "end of the copy")  # it notes that after the state


def test_a_capture_of_many_small_chunks_is_copied_in_parts(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its places are noted object by object. A copy that begins again in between writes the same."""
    monkeypatch.setattr("store_svc.archive.copying._OBJECT_FRAMES", 8)
    monkeypatch.setattr("store_svc.archive.copier._PLACES_AT_ONCE", 3)
    monkeypatch.setattr("store_svc.archive.copier._RETRY_SECONDS", 0.1)
    writes = 0

    def failing(
        self: Batch, *arguments: object, original: Callable[..., bool] = Batch.note_copied, **named: bool
    ) -> bool:
        nonlocal writes
        writes += 1
        if writes == 5:
            raise ZeroDivisionError
        return original(self, *arguments, **named)

    monkeypatch.setattr(Batch, "note_copied", failing)
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (store, client):
        capture(client, prompt=30)
        wait_for_state(client, MOVED)
        wait_for(lambda: store._db.num_chunks() == 0, "empty database")
        assert writes > 10
        assert len(chunk_objects(Objects(url))) == 4
        (path,) = Objects(url).list(CAPTURES)
        assert len(unpack_capture(Objects(url).get(path)).chunks) == 30
        assert client.read()[0] == grid(LAYERS, range(30))
