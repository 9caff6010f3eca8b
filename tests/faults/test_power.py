"""Acknowledgements and power failures: power cuts at every moment of a recorded run, with unsynced writes undone.

*Committed* rows survive the death of the process, which test_kills.py tests. *Synced* rows also survive a power
failure. `--ack` selects which of the two an acknowledgement waits for.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.rows.frames import parse_read
from store_svc.captures.capture_names import CaptureName
from store_svc.captures.catalog_loading import load_catalog
from store_svc.database.db import Database
from store_svc.reading.reader import Reader
from tests.faults import power
from tests.faults.power import Recording
from tests.faults.support import Store
from tests.store.support import Cell, Client, OpenStream, Rows, describe, grid, make_chunk, seal_request
from tests.waiting import wait_for

LAYERS = [0, 1, 2]
WIDTH = 1024
"""Elements of a row, so that a chunk of one position is 12 KiB, more than a page."""
NEVER = ("--sync-interval-seconds", "3600")
"""A sync interval that never expires during a test."""
MAP_BYTES = 16 << 20


@pytest.fixture(scope="module", autouse=True)
def _strace(tmp_path_factory: pytest.TempPathFactory) -> None:
    why = power.unavailable(tmp_path_factory.mktemp("strace"))
    if why is not None:
        pytest.skip(why)


@dataclass
class Answers:
    """The store's answers, with their times."""

    committed: list[tuple[float, set[Cell]]] = field(default_factory=list)
    """Each row's first acknowledgement time."""
    synced: list[tuple[float, set[Cell]]] = field(default_factory=list)
    ended: float = float("inf")
    """When the store first reported the capture as COMPLETE."""

    def before(self, kind: str, moment: float) -> set[Cell]:
        return {cell for told, cells in getattr(self, kind) if told < moment for cell in cells}


class Watched:
    """A store of which every write is recorded. It can be killed and restarted."""

    def __init__(self, folder: Path, shards: int) -> None:
        self.answers = Answers()
        self.data = folder / "data"
        """The database's folder."""
        self._folder = folder
        self._shards = shards
        folders = [self.data, *(self.data / f"shard-{shard}" for shard in range(shards if shards > 1 else 0))]
        self._files = [folder / "data.mdb" for folder in folders]
        self.main = self._files[0]
        self._logs: list[Path] = []
        self._store: Store | None = None

    def start(self, *flags: str) -> Client:
        self._logs.append(self._folder / f"{len(self._logs)}.log")
        flags = (*NEVER, "--max-bytes", str(MAP_BYTES), "--ending-timeout-seconds", "600", *flags)
        flags = (*flags, "--shards", str(self._shards))
        before = power.watched(self._files, self._logs[-1])
        self._store = Store(self._folder, *flags, before=before)
        return Client(self._store.port)

    def append(self, client: Client, positions: range) -> None:
        """Append one position at a time, each after the previous acknowledgement. Record every answer."""
        stream = OpenStream(client)
        committed = synced = 0
        sent = [grid(LAYERS, [position]) for position in positions]

        def note(answer: store_pb2.AppendChunksResponse) -> None:
            nonlocal committed, synced
            now = time.time()  # strace's clock
            self.answers.committed += [(now, cells) for cells in sent[committed : answer.committed_through]]
            self.answers.synced += [(now, cells) for cells in sent[synced : answer.synced_through]]
            committed, synced = answer.committed_through, answer.synced_through

        for position in positions:
            number = stream.send(make_chunk(LAYERS, [position], width=WIDTH))
            while committed < number:
                note(next(stream.answers))
        stream.half_close()
        for answer in stream.answers:
            note(answer)

    def kill(self) -> None:
        if self._store is not None:
            self._store.close()
            assert power.has_ended(self._logs[-1], self._store.process.pid)

    def recording(self) -> Recording:
        recording = Recording(self._logs)
        assert recording.everything() == {file: file.read_bytes() for file in self._files}, (
            "the recording is incomplete"
        )
        return recording


@pytest.fixture(params=[1, 3], ids=["one shard", "three shards"])
def watched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path, request.param)
    yield watched
    watched.kill()


@contextmanager
def reopened(folder: Path, images: dict[Path, bytes]) -> Iterator[tuple[set[Cell], capture_pb2.CaptureManifest | None]]:
    """Open files after a power cut as a store does. Yields the checked rows of capture `a`, and its manifest.

    Args:
        folder: A folder for the files.
        images: The files, by their paths in it.
    """
    for path, image in images.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(image)
    db = Database(folder, MAP_BYTES, sync_roots=False)
    try:
        catalog = load_catalog(db)
        if catalog.number_of(CaptureName("", "a")) is None:
            yield set(), None
            return
        rows, manifest = Rows(), None
        request = store_pb2.ReadChunksRequest(capture_id="a")
        for data in Reader(db, catalog).read(CaptureName("", "a"), request, lambda: False, lambda _: None):
            content = parse_read(data)
            if isinstance(content, capture_pb2.CaptureManifest):
                manifest = content
            else:
                chunk = capture_pb2.Chunk(header=content.header, crc32c=content.crc32c, payload=bytes(content.payload))
                rows.take(chunk)
        yield rows.cells, manifest
    finally:
        db.close()


def cut_everywhere(
    watched: Watched, check: Callable[[float, set[Cell], capture_pb2.CaptureManifest | None], None]
) -> None:
    """Cut the power at every moment since the first answer.

    Once all unsynced writes are lost, once random ones, and once those to all files but the main one, which refers to
    what the others hold.
    """
    recording = watched.recording()
    chance = random.Random(7)
    since = watched.answers.committed[0][0]
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for moment in recording.moments(since):
            for keep in (lambda _: False, lambda _: chance.random() < 0.5, lambda write: write.file == watched.main):
                images = {file.relative_to(watched.data): data for file, data in recording.cut(moment, keep).items()}
                with reopened(Path(folder), images) as (cells, manifest):
                    check(recording.time(moment), cells, manifest)


def run(watched: Watched, ack: str) -> None:
    """Write a capture that reuses the pages of a deleted one, seal it, write its last rows, and kill the store."""
    client = watched.start("--ack", ack)
    for name in ("a", "b"):
        client.open(describe(name, layers=LAYERS, prompt=30, width=WIDTH))
    client.append([make_chunk(LAYERS, [position], width=WIDTH) for position in range(10)], "b")
    watched.append(client, range(10))
    client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="b"))
    watched.append(client, range(10, 29))
    client.stub.SealCapture(seal_request("a", generated=[1]))
    watched.append(client, range(29, 30))  # so one transaction writes the last rows and the end
    watched.answers.ended = time.time()  # strace's clock
    client.close()
    watched.kill()


def test_rows_acknowledged_as_synced_survive_a_power_failure(watched: Watched) -> None:
    run(watched, "synced")
    answers = watched.answers

    def check(moment: float, cells: set[Cell], manifest: capture_pb2.CaptureManifest | None) -> None:
        assert cells >= answers.before("committed", moment), "with `synced`, every acknowledged row is synced"
        assert manifest
        if answers.ended < moment:
            assert manifest.state == capture_pb2.CAPTURE_STATE_COMPLETE

    assert answers.synced
    cut_everywhere(watched, check)


def test_a_power_failure_may_undo_the_last_commit_but_damages_nothing(
    watched: Watched,
) -> None:
    """At most the last commit is undone. An ended capture may be open again, but is never COMPLETE with fewer rows."""
    run(watched, "committed")
    answers = watched.answers
    undone: set[Cell] = set()

    def check(moment: float, cells: set[Cell], manifest: capture_pb2.CaptureManifest | None) -> None:
        assert cells >= answers.before("synced", moment)
        missing = answers.before("committed", moment) - cells
        assert len(missing) <= len(LAYERS), "more than the last commit was undone"
        undone.update(missing)
        if manifest and manifest.state == capture_pb2.CAPTURE_STATE_COMPLETE:
            assert cells == grid(LAYERS, range(30))

    cut_everywhere(watched, check)
    assert undone, "the simulation undoes nothing, or `committed` means more than it says"


def test_a_power_failure_does_not_undo_a_deletion_whose_rows_are_freed(watched: Watched) -> None:
    client = watched.start("--ack", "committed")
    client.open(describe("a", layers=LAYERS, prompt=30, width=WIDTH))
    watched.append(client, range(30))
    client.stub.SealCapture(seal_request("a", generated=[1]))
    client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
    wait_for(lambda: client.stub.GetStats(store_pb2.GetStatsRequest()).num_chunks == 0)
    client.open(describe("b"))  # once it is answered, no earlier write is under way
    client.close()
    watched.kill()

    def check(_: float, cells: set[Cell], manifest: capture_pb2.CaptureManifest | None) -> None:
        if manifest and manifest.state == capture_pb2.CAPTURE_STATE_COMPLETE:
            assert cells == grid(LAYERS, range(30))

    cut_everywhere(watched, check)


def test_rows_committed_before_a_crash_are_synced_before_they_are_acknowledged_as_synced(
    watched: Watched,
) -> None:
    """A killed store's last root page is only in the kernel's cache, and repeated rows write nothing."""
    client = watched.start("--ack", "committed")
    client.open(describe("a", layers=LAYERS, prompt=30, width=WIDTH))
    stream = OpenStream(client)
    assert stream.until_acked(stream.send(make_chunk(LAYERS, [0], width=WIDTH))).synced_through == 0
    watched.kill()
    client = watched.start("--ack", "synced")
    watched.append(client, range(1))
    watched.kill()
    assert watched.answers.synced[0][1] == grid(LAYERS, [0])

    def check(moment: float, cells: set[Cell], _: capture_pb2.CaptureManifest | None) -> None:
        assert cells >= watched.answers.before("synced", moment)

    cut_everywhere(watched, check)
