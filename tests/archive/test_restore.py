"""A store whose disk is lost is made again from its archive."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import residuum
from residuum.rpc.objects import ArchiveError, ArchiveRefusedError, Objects
from residuum.v1 import archive_pb2, capture_pb2, errors_pb2, store_pb2
from residuum.wire.rows.archive import CAPTURES, pack, unpack_capture
from store_svc.archive import records
from store_svc.archive.restore import Restore
from store_svc.archive.restore import main as restore_main
from store_svc.captures.capture_names import CaptureName
from store_svc.database.db import DamagedError, Database, Table
from store_svc.server import Store
from tests.archive.support import (
    COPIED,
    LAYERS,
    MOVED,
    archived_ids,
    capture,
    chunk_objects,
    file_url,
    state,
    stats,
    wait_for_state,
)
from tests.store.support import failing_with, grid, seal_request, serving
from tests.waiting import wait_for


@pytest.fixture
def url(tmp_path: Path) -> str:
    return file_url(tmp_path / "archive")


def restore(url: str, path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "store_svc", "restore", "--archive", url, "--path", str(path), *flags]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


@pytest.mark.parametrize("shards", ["1", "3"])
def test_a_store_is_made_again_from_its_archive(tmp_path: Path, url: str, shards: str) -> None:
    with serving(tmp_path / "store", archive=url) as (_, client):
        for capture_id, prompt in (("a", 4), ("b", 40), ("deleted", 4)):
            capture(client, capture_id, prompt=prompt)
        label = capture_pb2.Label(name="split", text="train")
        client.stub.LabelCapture(store_pb2.LabelCaptureRequest(capture_id="a", labels=[label]))
        wait_for_state(client, COPIED, ["a", "b", "deleted"])
        wait_for_label(Objects(url), label)
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="deleted"))
        wait_for(lambda: archived_ids(Objects(url)) == ["a", "b"], "deletion")
        before = {name: client.get(name) for name in ("a", "b")}
    shutil.rmtree(tmp_path / "store")
    done = restore(url, tmp_path / "store", "--shards", shards)
    assert done.returncode == 0, done.stderr
    with serving(tmp_path / "store", archive=url) as (_, client):
        listed = client.stub.ListCaptures(store_pb2.ListCapturesRequest(where="split=train")).captures
        assert [item.capture_id for item in listed] == ["a"]
        for name, manifest in before.items():
            after = client.get(name)
            assert after.archive_state == MOVED
            after.archive_state = manifest.archive_state
            assert after == manifest
        assert client.read("a")[0] == grid(LAYERS, range(4))
        assert client.read("b")[0] == grid(LAYERS, range(40))
        with failing_with(errors_pb2.ERROR_REASON_UNKNOWN_CAPTURE):
            client.get("deleted")
        client.stub.SealCapture(seal_request("a", generated=(1,)))  # a repeat is recognised, as before
        capture(client, "new")
        wait_for_state(client, COPIED, ["new"])
        assert archived_ids(Objects(url)) == ["a", "b", "new"]


def test_what_was_not_in_the_archive_is_not_restored(tmp_path: Path, url: str) -> None:
    """An open capture is lost with the disk. Its number is used again, which mixes nothing up."""
    with serving(tmp_path / "store", archive=url) as (_, client):
        capture(client, "kept")
        wait_for_state(client, COPIED, ["kept"])
    with serving(tmp_path / "store", archive=url) as (store, client):
        store._archive.link.stop()  # nothing is copied any more
        capture(client, "lost")
    shutil.rmtree(tmp_path / "store")
    assert restore_main(["--archive", url, "--path", str(tmp_path / "store")]) == 0
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (_, client):
        capture(client, "next", prompt=6)
        wait_for_state(client, MOVED, ["next"])
        assert client.read("kept")[0] == grid(LAYERS, range(4))
        assert client.read("next")[0] == grid(LAYERS, range(6))


def test_chunks_without_their_capture_are_deleted_after_a_restore(tmp_path: Path, url: str) -> None:
    objects = Objects(url)
    with serving(tmp_path / "store", archive=url) as (_, client):
        capture(client)
        wait_for_state(client, COPIED)
    objects.put("chunks/00000000000000ff-0123456789abcdef/00000", b"half a copy")
    shutil.rmtree(tmp_path / "store")
    assert restore_main(["--archive", url, "--path", str(tmp_path / "store")]) == 0
    with serving(tmp_path / "store", archive=url) as (_, client):
        wait_for(lambda: len(chunk_objects(objects)) == 1, "deletion")
        assert client.read()[0] == grid(LAYERS, range(4))


def test_a_restore_leaves_foreign_objects_alone(tmp_path: Path, url: str) -> None:
    """Somebody keeps other things in the archive: backups, a copy of a capture, a name that is a number."""
    objects = Objects(url)
    with serving(tmp_path / "store", archive=url) as (_, client):
        capture(client)
        wait_for_state(client, COPIED)
    (path,) = objects.list(CAPTURES)
    key = path.removeprefix("captures/")
    data = objects.get(path)
    foreign = {f"captures/{name}" for name in (f"{key}.bak", f"backup/{key}", "dead-beef", "f" * 17 + "-0", f"{key}0")}
    folders = ("backup-2025", "dead-beef", "f" * 17 + "-0123456789abcdef", f"{key}.bak", key.upper(), "x" * 600)
    foreign |= {f"chunks/{name[:200]}/{'x' * 200}" for name in folders} | {"chunks/a file"}
    for other in foreign:
        objects.put(other, data)
    objects.put("chunks/00000000000000ff-0123456789abcdef/00000", b"half a copy")
    shutil.rmtree(tmp_path / "store")
    assert restore_main(["--archive", url, "--path", str(tmp_path / "store")]) == 0
    with serving(tmp_path / "store", archive=url) as (store, client):
        assert client.read()[0] == grid(LAYERS, range(4))
        capture(client, "next")
        number = store._catalog.number_of(CaptureName("", "next"))
        assert number is not None
        assert number < 0xDEAD, "a foreign name uses no number"
        wait_for_state(client, COPIED, ["next"])
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
        wait_for(lambda: not objects_to_delete(store), "deletion")
        (left,) = {path for path in objects.list(CAPTURES) if path not in foreign}
        (chunks,) = {path for path in objects.list("chunks") if path not in foreign}
        assert chunks.split("/")[1] == left.split("/")[1]
    assert foreign <= {*objects.list("captures"), *objects.list("chunks")}


def objects_to_delete(store: Store) -> list[str]:
    """Return what the archive must still delete."""
    with store._db.read() as txn:
        return records.deletions(txn, 100)


def test_the_newer_of_two_captures_with_one_name_is_restored(tmp_path: Path, url: str) -> None:
    """The older one was replaced, and the disk was lost before its objects were deleted."""
    objects = Objects(url)
    with serving(tmp_path / "store", archive=url) as (_, client):
        capture(client, prompt=4)
        wait_for_state(client, COPIED)
    (path,) = objects.list(CAPTURES)
    old, key = objects.get(path), path.removeprefix("captures/")
    chunk = objects.get(f"chunks/{key}/00000")
    with serving(tmp_path / "store", archive=url) as (_, client):
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
        wait_for(lambda: not archived_ids(objects), "deletion")
        capture(client, prompt=6)
        wait_for_state(client, COPIED)
    objects.put(path, old)
    objects.put(f"chunks/{key}/00000", chunk)
    shutil.rmtree(tmp_path / "store")
    assert restore_main(["--archive", url, "--path", str(tmp_path / "store")]) == 0
    with serving(tmp_path / "store", archive=url) as (_, client):
        assert client.read()[0] == grid(LAYERS, range(6))
        wait_for(lambda: len(archived_ids(objects)) == len(chunk_objects(objects)) == 1, "deletion")


def test_a_restore_that_is_killed_can_be_run_again(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path / "store", archive=url) as (_, client):
        for at in range(6):
            capture(client, f"c{at}")
        wait_for(lambda: stats(client).captures_copied == 6, "copies")
    shutil.rmtree(tmp_path / "store")
    monkeypatch.setattr("store_svc.archive.restore._AT_ONCE", 2)
    writes = 0

    def dying(self: Restore, *arguments: object, original: object = Restore._write) -> None:
        nonlocal writes
        writes += 1
        if writes == 3:
            raise KeyboardInterrupt
        original(self, *arguments)  # type: ignore[operator]

    with monkeypatch.context() as patched:
        patched.setattr(Restore, "_write", dying)
        with pytest.raises(KeyboardInterrupt):
            restore_main(["--archive", url, "--path", str(tmp_path / "store")])
    with pytest.raises(DamagedError, match="half restored"), serving(tmp_path / "store", archive=url):
        pass
    done = restore(url, tmp_path / "store")
    assert done.returncode == 0, done.stderr
    with serving(tmp_path / "store", archive=url) as (_, client):
        for at in range(6):
            assert client.read(f"c{at}")[0] == grid(LAYERS, range(4))
            assert state(client, f"c{at}") == MOVED


def test_a_restore_writes_into_no_other_database(tmp_path: Path, url: str) -> None:
    with serving(tmp_path / "store", archive=url) as (_, client):
        capture(client)
        wait_for_state(client, COPIED)
    done = restore(url, tmp_path / "store")
    assert done.returncode == 1
    assert "has a database already" in done.stderr
    with serving(tmp_path / "store", archive=url) as (_, client):
        assert client.read()[0] == grid(LAYERS, range(4))


def test_a_restore_needs_an_archive(tmp_path: Path) -> None:
    done = restore(file_url(tmp_path / "nothing"), tmp_path / "store")
    assert done.returncode == 1
    assert "is not the archive of a store" in done.stderr
    assert restore("ftp://x", tmp_path / "store").returncode != 0


def test_a_damaged_capture_is_left_out_and_named(tmp_path: Path, url: str) -> None:
    objects = Objects(url)
    with serving(tmp_path / "store", archive=url) as (_, client):
        capture(client, "a")
        capture(client, "b")
        wait_for_state(client, COPIED, ["a", "b"])
    paths = {unpack_capture(objects.get(path)).manifest.description.capture_id: path for path in objects.list(CAPTURES)}
    objects.put(paths["a"], objects.get(paths["a"])[:-1])
    shutil.rmtree(tmp_path / "store")
    done = restore(url, tmp_path / "store")
    assert done.returncode == 1
    assert paths["a"].removeprefix("captures/") in done.stderr
    with serving(tmp_path / "store", archive=url) as (store, client):
        assert client.read("b")[0] == grid(LAYERS, range(4))
        assert not objects_to_delete(store)
        assert len(chunk_objects(objects)) == 2, "the rows of a damaged capture are kept"


def life_after_an_old_copy(
    tmp_path: Path, url: str, name: str, first: int, second: int, before: Sequence[str] = ()
) -> None:
    """Write a capture, go back to an older copy of the folder, and write another one.

    The other one gets the same number, or a lower one if the first life writes captures `before` its own.
    """
    store, copy = tmp_path / "store", tmp_path / "copy"
    with serving(store, archive=url) as (_, client):
        capture(client, "zero")
        wait_for_state(client, COPIED, ["zero"])
    shutil.copytree(store, copy)
    with serving(store, archive=url) as (_, client):
        for other in before:
            capture(client, other)
        wait_for_state(client, COPIED, before)
        capture(client, "a", prompt=8, at_once=first)
        label = capture_pb2.Label(name="split", text="train")
        client.stub.LabelCapture(store_pb2.LabelCaptureRequest(capture_id="a", labels=[label]))
        wait_for_label(Objects(url), label)
    shutil.rmtree(store)
    shutil.copytree(copy, store)
    with serving(store, archive=url) as (_, client):
        capture(client, name, prompt=6, at_once=second)
        wait_for_state(client, COPIED, [name])
    shutil.rmtree(store)


def wait_for_label(objects: Objects, label: capture_pb2.Label) -> None:
    wait_for(lambda: [item.manifest.labels for item in captures(objects).values()].count([label]) == 1, "label")


def captures(objects: Objects) -> dict[str, archive_pb2.ArchivedCapture]:
    return {path: unpack_capture(objects.get(path)) for path in objects.list(CAPTURES)}


@pytest.mark.parametrize(("first", "second"), [(1, 4), (4, 1)])
def test_captures_with_one_number_are_both_restored(tmp_path: Path, url: str, first: int, second: int) -> None:
    life_after_an_old_copy(tmp_path, url, "b", first, second)
    assert len({item.number for item in captures(Objects(url)).values()}) == 2, "two of three share a number"
    assert restore_main(["--archive", url, "--path", str(tmp_path / "store")]) == 0
    with serving(tmp_path / "store", archive=url) as (_, client):
        for name, prompt in (("zero", 4), ("a", 8), ("b", 6)):
            assert client.read(name)[0] == grid(LAYERS, range(prompt))
        listed = client.stub.ListCaptures(store_pb2.ListCapturesRequest(where="split=train")).captures
        assert [item.capture_id for item in listed] == ["a"]
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
        wait_for(lambda: len(archived_ids(Objects(url))) == 2, "deletion")
        assert client.read("b")[0] == grid(LAYERS, range(6))


@pytest.mark.parametrize("before", [(), ("x", "y")], ids=["one number", "a lower number"])
def test_the_newer_capture_of_one_name_is_restored(tmp_path: Path, url: str, before: tuple[str, ...]) -> None:
    """Its number is not greater than that of the older one, which an earlier life of the store has left behind."""
    life_after_an_old_copy(tmp_path, url, "a", 1, 1, before)
    numbers = [item.number for item in captures(Objects(url)).values() if item.manifest.num_rows == 6 * len(LAYERS)]
    assert numbers == [2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert residuum.Archive(url).activations("a")[0].shape[0] == 6
    assert restore_main(["--archive", url, "--path", str(tmp_path / "store")]) == 0
    with serving(tmp_path / "store", archive=url) as (store, client):
        assert client.read("a")[0] == grid(LAYERS, range(6))
        wait_for(lambda: archived_ids(Objects(url)) == sorted(["a", "zero", *before]), "deletion")
        wait_for(lambda: not doomed(store), "end of the purge, which frees the older one's rows under its number")
        assert client.read("a")[0] == grid(LAYERS, range(6))


def doomed(store: Store) -> bool:
    """Return whether a deleted capture still has rows in the database."""
    with store._db.read() as txn:
        return txn.next_key(Table.DOOMED, b"") is not None


def test_the_number_of_a_damaged_capture_is_not_used_again(tmp_path: Path, url: str) -> None:
    objects = Objects(url)
    with serving(tmp_path / "store", archive=url) as (_, client):
        capture(client)
        wait_for_state(client, COPIED)
    ((path, found),) = captures(objects).items()
    objects.put(path, b"damaged")
    shutil.rmtree(tmp_path / "store")
    assert restore_main(["--archive", url, "--path", str(tmp_path / "store")]) == 1
    with serving(tmp_path / "store", archive=url) as (store, client):
        capture(client, "next")
        assert store._catalog.number_of(CaptureName("", "next")) > found.number


def test_a_restore_waits_for_the_archive_and_fetches_each_capture_once(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store_svc.archive.restore._AT_ONCE", 2)
    with serving(tmp_path / "store", archive=url) as (_, client):
        for at in range(6):
            capture(client, f"c{at}")
        wait_for(lambda: stats(client).captures_copied == 6, "copies")
    shutil.rmtree(tmp_path / "store")
    calls: list[str] = []
    numbers = itertools.count(1)
    error = ArchiveError("503 for a moment")

    def failing(self: Objects, path: str, original: Callable[..., bytes] = Objects.get) -> bytes:
        calls.append(path)
        if next(numbers) == 6:
            raise error
        return original(self, path)

    monkeypatch.setattr(Objects, "get", failing)
    assert restore_main(["--archive", url, "--path", str(tmp_path / "store")]) == 0
    assert len(calls) == 1 + 6 + 1, "the owner, each capture, and one again"
    shutil.rmtree(tmp_path / "store")
    calls.clear()
    numbers = itertools.count(1)
    error = ArchiveRefusedError("403 ExpiredToken")
    assert restore_main(["--archive", url, "--path", str(tmp_path / "store")]) == 1
    assert restore_main(["--archive", url, "--path", str(tmp_path / "store")]) == 0
    seen = [path for path in calls if path != "owner"]
    assert max(seen.count(path) for path in seen) <= 2
    assert len(set(seen)) == 6
    assert len(seen) <= 8, "the second run fetches only what the first one did not write"


class TestOwner:
    """An archive belongs to one store."""

    def test_a_second_store_is_refused(self, tmp_path: Path, url: str) -> None:
        with serving(tmp_path / "one", archive=url):
            pass
        with (
            pytest.raises(ArchiveRefusedError, match="belongs to another store"),
            serving(tmp_path / "two", archive=url),
        ):
            pass
        with serving(tmp_path / "one", archive=url):
            pass

    def test_an_archive_that_has_gone_is_noticed(self, tmp_path: Path, url: str) -> None:
        with serving(tmp_path / "one", archive=url):
            pass
        shutil.rmtree(tmp_path / "archive")
        with (
            pytest.raises(ArchiveRefusedError, match="is empty, but this store has an archive"),
            serving(tmp_path / "one", archive=url),
        ):
            pass

    def test_objects_of_something_else_are_left_alone(self, tmp_path: Path, url: str) -> None:
        Objects(url).put("owner", b"something else")
        with (
            pytest.raises(ArchiveRefusedError, match="is not of a store's archive"),
            serving(tmp_path / "one", archive=url),
        ):
            pass

    def test_a_store_without_its_archive_does_not_start(self, tmp_path: Path, url: str) -> None:
        with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (_, client):
            capture(client)
            wait_for_state(client, MOVED)
        with pytest.raises(ArchiveRefusedError, match="only in the archive"), serving(tmp_path / "store"):
            pass

    def test_the_owner_of_a_newer_version_is_refused(self, tmp_path: Path, url: str) -> None:
        data = pack(archive_pb2.ArchiveOwner(store_id=b"x" * 16)).replace(b"archive 1", b"archive 2")
        Objects(url).put("owner", data)
        with (
            pytest.raises(ArchiveRefusedError, match="is not of a store's archive"),
            serving(tmp_path / "store", archive=url),
        ):
            pass
        with pytest.raises(ArchiveRefusedError):
            Restore(Database(tmp_path / "new", 64 << 20, sync_roots=False), Objects(url)).run()
