"""Captures that clients read from the archive itself: every row, without the store."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import residuum
from residuum.cli import main
from residuum.rpc.objects import Objects
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.rows.archive import CAPTURES, CHUNKS
from store_svc.reading import responses
from tests.archive.s3 import Proxy
from tests.archive.support import COPIED, capture, chunk_objects, file_url, wait_for_state
from tests.store.support import INCOMPLETE, POST, Client, describe, make_chunk, row, serving
from tests.waiting import wait_for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def store(tmp_path: Path, folder: Path) -> Iterator[Client]:
    with serving(tmp_path / "store", archive=file_url(folder)) as (_, client):
        yield client


@pytest.fixture
def archive(folder: Path) -> residuum.Archive:
    folder.mkdir(exist_ok=True)
    return residuum.Archive(file_url(folder))


def archived(store: Client, *names: str, **fields: object) -> None:
    for name in names:
        capture(store, name, **fields)
    wait_for_state(store, COPIED, names)


def expected(layer: int, positions: range) -> np.ndarray:
    return np.stack([row((0, POST, layer, at)) for at in positions])


def test_every_row_of_a_capture_is_read_without_the_store(
    tmp_path: Path, store: Client, archive: residuum.Archive
) -> None:
    archived(store, "a", prompt=100)
    with residuum.Client("127.0.0.1:1", store=store.target) as client:
        from_store = client.activations("a")
    acts = archive.activations("a")
    assert acts.layers == (0, 1, 2)
    for layer in acts.layers:
        np.testing.assert_array_equal(acts[layer], expected(layer, range(100)))
        np.testing.assert_array_equal(acts[layer], from_store[layer])
    assert acts.manifest.to_json() == from_store.manifest.to_json()


def test_chunks_without_chosen_rows_are_not_fetched(
    store: Client, archive: residuum.Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived(store, "a", prompt=100)
    fetched = []
    whole = Objects.get_range

    def get_range(self: Objects, path: str, start: int, length: int) -> memoryview:
        fetched.append(length)
        return whole(self, path, start, length)

    monkeypatch.setattr(Objects, "get_range", get_range)
    acts = archive.activations("a", layers=[1], positions="last_prompt")
    np.testing.assert_array_equal(acts[1], expected(1, range(99, 100)))
    one = sum(fetched)
    fetched.clear()
    archive.activations("a")
    assert one * 50 < sum(fetched)


def test_lists_filters_and_rows_of_many_captures(store: Client, archive: residuum.Archive) -> None:
    archived(store, "train-1", "train-2", "test-1")
    with residuum.Client("127.0.0.1:1", store=store.target) as client:
        client.label("train-2", {"y": 1})
        from_store = {item.capture_id: item for item in client.captures()}
    wait_for_label(archive, "train-2")
    assert [item.capture_id for item in archive.captures()] == ["test-1", "train-2", "train-1"]
    assert [item.capture_id for item in archive.captures(prefix="train-", where="y = 1")] == ["train-2"]
    assert list(archive.captures(states="incomplete")) == []
    for item in archive.captures():
        other = from_store[item.capture_id]
        assert (item.num_rows, item.num_bytes, item.state) == (other.num_rows, other.num_bytes, other.state)
    rows = archive.rows(prefix="train-", layer=2)
    np.testing.assert_array_equal(rows.values, np.concatenate([expected(2, range(4))] * 2))
    assert rows.labels("y") == [None] * 4 + [1] * 4
    both = archive.activations(["train-2", "test-1"])
    assert [acts.manifest.capture_id for acts in both] == ["train-2", "test-1"]


def test_the_warning_of_empty_captures_is_where_the_user_asks(store: Client, archive: residuum.Archive) -> None:
    archived(store, "a", "b")
    for wanted, count in (("a", 1), (["a", "b"], 2)):
        with pytest.warns(residuum.EmptyCaptureWarning) as warned:
            archive.activations(wanted, positions=5000)
        assert [item.filename for item in warned] == [__file__] * count


def wait_for_label(archive: residuum.Archive, name: str) -> None:
    def is_there() -> bool:
        archive.refresh()
        # The list, as `manifest` reads the object again and can see a label that the list does not have yet.
        return any("y" in item.labels for item in archive.captures(prefix=name))

    wait_for(is_there, "label in the archive")


def test_an_unknown_capture_is_named_and_refresh_finds_new_ones(store: Client, archive: residuum.Archive) -> None:
    assert list(archive.captures()) == []
    archived(store, "late")
    with pytest.raises(residuum.UnknownCapture, match=r"There is no capture late in file://.*refresh"):
        archive.activations("late")
    archive.refresh()
    assert archive.manifest("late").state == "complete"
    with pytest.raises(residuum.UnknownCapture, match="no capture gone"):
        archive.activations(["late", "gone"])


def test_a_replaced_capture_is_not_read_although_its_objects_are_left(
    store: Client, archive: residuum.Archive, folder: Path
) -> None:
    archived(store, "a")
    copies = {path: (folder / path).read_bytes() for path in chunk_objects(Objects(archive.url))}
    old = {path: path.read_bytes() for path in (folder / "captures").iterdir()}
    objects = Objects(archive.url)
    store.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
    # Otherwise, the store could delete them again once they are back.
    wait_for(lambda: not [*objects.list(CAPTURES), *objects.list(CHUNKS)], "deletion")
    archived(store, "a", prompt=7)
    for path, content in {**{folder / path: data for path, data in copies.items()}, **old}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert len(list((folder / "captures").iterdir())) == 2
    assert archive.activations("a")[0].shape[0] == 7


def test_damage_is_found(store: Client, archive: residuum.Archive, folder: Path) -> None:
    archived(store, "a", "b")
    archive.activations("a")
    for path in chunk_objects(Objects(archive.url)):
        data = bytearray((folder / path).read_bytes())
        data[-1] ^= 1
        (folder / path).write_bytes(data)
    with pytest.raises(residuum.DamagedCapture, match="chunk of the capture a in the archive is damaged"):
        archive.activations("a")
    for path in chunk_objects(Objects(archive.url)):
        (folder / path).unlink()
    with pytest.raises(residuum.DamagedCapture, match="lacks rows of the capture a"):
        archive.activations("a")
    for path in (folder / "captures").iterdir():
        path.write_bytes(b"residuum archive 1\n....")
    archive.refresh()
    with pytest.warns(residuum.LeftOutWarning, match="cannot be read: its checksum") as warned:
        assert list(archive.captures()) == []
    assert {item.filename for item in warned} == {__file__}


def test_partial_captures_are_refused_or_read_in_part(store: Client, archive: residuum.Archive) -> None:
    store.open(describe("part"))
    store.append([make_chunk([0, 1], [0, 1, 2, 3])], "part")
    store.seal("part", outcome=INCOMPLETE, incomplete_reason=capture_pb2.INCOMPLETE_REASON_ENGINE_DIED)
    wait_for_state(store, COPIED, ["part"])
    with pytest.raises(residuum.IncompleteCapture):
        archive.activations("part")
    acts = archive.activations("part", allow_partial=True)
    np.testing.assert_array_equal(acts[1], expected(1, range(4)))
    assert not acts.present[2].any()
    with pytest.warns(residuum.LeftOutWarning, match="part"):
        assert not len(archive.rows(prefix="", layer=0).values)


def test_exports_and_the_command_read_it(
    store: Client, archive: residuum.Archive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archived(store, "a", prompt=50)
    made = archive.export("a", tmp_path / "a.safetensors", layers=[1])
    assert made.num_rows == 50
    np.testing.assert_array_equal(residuum.Activations.from_safetensors(made.path)[1], expected(1, range(50)))
    assert main(["pull", "a", "--store", archive.url, "--out", str(tmp_path / "b.npz")]) == 0
    with np.load(tmp_path / "b.npz") as arrays:
        np.testing.assert_array_equal(arrays["resid_post.2"], expected(2, range(50)))
    assert main(["ls", "--store", archive.url]) == 0
    assert main(["manifest", "a", "--store", archive.url, "--json"]) == 0
    assert '"capture_id"' in capsys.readouterr().out


def test_a_copy_in_another_process_looks_nothing_up(
    store: Client, archive: residuum.Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived(store, "a")
    archive.manifest("a")
    copy = pickle.loads(pickle.dumps(archive))
    monkeypatch.setattr(Objects, "list", lambda *_: pytest.fail("it lists the archive again"))
    assert copy.activations("a")[0].shape == (4, 4)


def test_torch_reads_an_archive(store: Client, archive: residuum.Archive) -> None:
    pytest.importorskip("torch")
    from residuum.torch import ActivationDataset

    archived(store, "t-1", "t-2")
    for aligned in (False, True):
        data = ActivationDataset("", prefix="t-", store=archive.url, layers=[0, 2], batch_size=5, aligned=aligned)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            batches = list(data)
        total = sum(batch.activations.double().sum().item() for batch in batches)
        assert total == 2 * float(sum(expected(layer, range(4)).sum(dtype=np.float64) for layer in (0, 2)))


def test_the_order_does_not_depend_on_how_the_rows_come(
    store: Client, archive: residuum.Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An iteration resumes from the archive, or from a busy store, where it stopped."""
    pytest.importorskip("torch")
    from residuum.torch import ActivationDataset

    names = [f"c-{number}" for number in range(5)]
    archived(store, *names, prompt=200)

    def made(source: str) -> ActivationDataset:
        return ActivationDataset(store=source, captures=names, layers=[1], batch_size=16, shuffle_buffer=64)

    def places(batches: ActivationDataset) -> list[tuple[int, int]]:
        return [
            place for batch in batches for place in zip(batch.captures.tolist(), batch.positions.tolist(), strict=True)
        ]

    first = places(made(store.target))
    assert len(set(first)) == len(names) * 200
    assert places(made(archive.url)) == first
    monkeypatch.setattr(responses, "_MAX_WAIT_SECONDS", 0)  # the store sends fewer rows at once
    assert places(made(store.target)) == first


def test_an_archive_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(residuum.ArchiveUnreachable, match="cannot be read"):
        list(residuum.Archive(file_url(tmp_path / "nothing")).captures())
    assert not (tmp_path / "nothing").exists(), "reading creates nothing"
    with pytest.raises(residuum.InvalidRequest, match="not the URL of an archive"):
        residuum.Archive("localhost:50052")


def test_s3_with_faults(tmp_path: Path, s3: Proxy, url: str) -> None:
    with serving(tmp_path / "store", archive=url) as (_, store):
        archived(store, "a", prompt=64)
    fails = iter([True, False] * 1000)
    s3.before = lambda call: call.answer(503, "SlowDown") if next(fails) else None
    archive = residuum.Archive(url)
    np.testing.assert_array_equal(archive.activations("a")[1], expected(1, range(64)))
    s3.before = lambda call: call.answer(403, "AccessDenied")
    with pytest.raises(residuum.ArchiveUnreachable, match=r"403 Forbidden.*credentials"):
        archive.activations("a")


def test_a_chunk_without_positions_of_another_one_keeps_its_rows_in_place(
    store: Client, archive: residuum.Archive
) -> None:
    """The store keeps the first write of a row: of the third chunk, it keeps the positions 2, 3, 5 and 6."""
    store.open(describe("a", layers=(1,), prompt=7))
    store.append([make_chunk([1], positions) for positions in ([0], [1, 4], range(1, 7))], "a")
    store.seal("a", generated=(1,))
    wait_for_state(store, COPIED)
    acts = archive.activations("a", positions=[2, 4, 5, 6])
    np.testing.assert_array_equal(acts[1], np.stack([row((0, POST, 1, at)) for at in (2, 4, 5, 6)]))
