"""The store compared with a dict in random steps: append, lose, seal, read, delete, expire, stop, crash, restart."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.selection import expected_rows
from store_svc.server import Store
from store_svc.settings import StoreSettings
from tests.store.support import (
    ABORTED,
    COMPLETE,
    INCOMPLETE,
    OPEN,
    POST,
    Cell,
    Client,
    cells_of,
    describe,
    failing_with,
    grid,
    loss_message,
    make_chunk,
    rejections,
)

LAYERS = [0, 1]
PROMPT = 3
OVERFLOW = capture_pb2.INCOMPLETE_REASON_OVERFLOW
names = st.sampled_from(["a", "b", "c"])
some_layers = st.sampled_from([[0], [1], [0, 1]])
some_positions = st.sets(st.integers(0, 7), min_size=1).map(sorted)


class Model:
    def __init__(self) -> None:
        self.stored: set[Cell] = set()
        self.lost: set[Cell] = set()
        self.expected: set[Cell] | None = None
        self.aborted = False
        self.state = OPEN
        self.sealed_with: tuple[int, bool] | None = None

    def append(self, cells: set[Cell]) -> bool:
        """Store cells. Return False if the capture has ended."""
        if self.state != OPEN:
            return not cells & self.missing
        self.stored |= cells
        self.advance()
        return True

    def lose(self, cells: set[Cell]) -> None:
        if self.state == OPEN:
            self.lost |= cells
            self.advance()

    def seal(self, expected: set[Cell], *, aborted: bool) -> None:
        self.expected, self.aborted = expected, aborted
        self.advance()

    def advance(self) -> None:
        """End the capture if it is sealed and no row is outstanding. It never changes afterwards."""
        if self.expected is not None and self.missing <= self.lost:
            self.state = ABORTED if self.aborted else INCOMPLETE if self.missing else COMPLETE

    @property
    def missing(self) -> set[Cell]:
        return self.expected - self.stored if self.expected is not None else set()

    @property
    def present(self) -> set[Cell]:
        return self.stored if self.expected is None else self.stored & self.expected


class StoreAgainstDict(RuleBasedStateMachine):
    shards = 1

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.captures: dict[str, Model] = {}
        self.start()

    def start(self, **more: object) -> None:
        settings = StoreSettings(
            listen="127.0.0.1:0",
            path=self.folder / "db",
            shards=self.shards,
            ending_timeout_seconds=600,
            grace_seconds=0,
            **more,
        )
        self.store = Store(settings)
        self.client = Client(self.store.port)

    def teardown(self) -> None:
        self.client.close()
        self.store.stop()
        shutil.rmtree(self.folder)

    @rule(name=names)
    def open(self, name: str) -> None:
        if name not in self.captures:
            self.client.open(describe(name, layers=LAYERS, prompt=PROMPT))
            self.captures[name] = Model()

    @rule(name=names, chunks=st.lists(st.tuples(some_layers, some_positions), min_size=1, max_size=4))
    def append(self, name: str, chunks: list[tuple[list[int], list[int]]]) -> None:
        answers = self.client.append([make_chunk(*chunk) for chunk in chunks], name)
        assert answers[-1].synced_through == len(chunks)
        model = self.captures.get(name)
        if model is None:
            assert rejections(answers) == dict.fromkeys(range(1, len(chunks) + 1), Reason.ERROR_REASON_UNKNOWN_CAPTURE)
            return
        late = {number for number, chunk in enumerate(chunks, start=1) if not model.append(grid(*chunk))}
        assert rejections(answers) == dict.fromkeys(late, Reason.ERROR_REASON_CAPTURE_ENDED)

    @rule(name=names, layers=some_layers, positions=some_positions)
    def lose(self, name: str, layers: list[int], positions: list[int]) -> None:
        loss = store_pb2.RowLoss(sites=[POST], layers=layers, positions=positions, reason=OVERFLOW)
        answers = self.client.send([loss_message(1, name, loss)])
        if name in self.captures:
            self.captures[name].lose(grid(layers, positions))
        assert bool(rejections(answers)) == (name not in self.captures)

    @rule(name=names, generated=st.integers(0, 4), aborted=st.booleans())
    def seal(self, name: str, generated: int, aborted: bool) -> None:
        model = self.captures.get(name)
        if model is None or model.expected is not None:
            return
        model.seal(grid(LAYERS, range(expected_rows(PROMPT, generated))), aborted=aborted)
        model.sealed_with = (generated, aborted)
        self.client.seal(name, generated=[generated], outcome=ABORTED if aborted else COMPLETE)

    @rule(name=names, generated=st.integers(0, 4), aborted=st.booleans())
    def seal_again(self, name: str, generated: int, aborted: bool) -> None:
        """Repeating a seal succeeds, another seal is refused, and neither changes anything."""
        model = self.captures.get(name)
        if model is None or model.sealed_with is None:
            return
        outcome = ABORTED if aborted else COMPLETE
        if model.sealed_with == (generated, aborted):
            assert self.client.seal(name, generated=[generated], outcome=outcome).state == model.state
        else:
            with failing_with(Reason.ERROR_REASON_CAPTURE_ENDED):
                self.client.seal(name, generated=[generated], outcome=outcome)

    @rule(name=names)
    def open_again(self, name: str) -> None:
        """Opening with the same description succeeds until the capture has ended."""
        model = self.captures.get(name)
        if model is None:
            return
        description = describe(name, layers=LAYERS, prompt=PROMPT)
        if model.state == OPEN:
            self.client.open(description)
        else:
            with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS):
                self.client.open(description)

    @rule(name=names, layers=st.sets(st.sampled_from(LAYERS)))
    def read(self, name: str, layers: set[int]) -> None:
        if name in self.captures:
            wanted = {cell for cell in self.captures[name].present if not layers or cell[2] in layers}
            assert self.client.read(name, layers=layers)[0] == wanted

    @rule(name=names)
    def delete(self, name: str) -> None:
        if self.captures.pop(name, None) is not None:
            self.client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=name))

    @rule(chosen=st.lists(names, min_size=1))
    def delete_many(self, chosen: list[str]) -> None:
        """Some may not exist, and some may be named twice."""
        response = self.client.stub.DeleteCaptures(store_pb2.DeleteCapturesRequest(capture_ids=chosen))
        deleted = [self.captures.pop(name, None) is not None for name in chosen]
        assert [not result.HasField("error") for result in response.results] == deleted

    @precondition(lambda self: self.captures)
    @rule()
    def restart(self) -> None:
        self.start_again()

    def start_again(self, **settings: object) -> None:
        self.client.close()
        self.store.stop()
        self.start(**settings)

    @precondition(lambda self: any(model.state != OPEN for model in self.captures.values()))
    @rule()
    def expire(self) -> None:
        """Let every ended capture expire, and check that no others do."""
        kept = {name for name, model in self.captures.items() if model.state == OPEN}
        self.start_again(retain_hours=1e-9)
        end = time.monotonic() + 30
        while self.listed().keys() != kept:
            assert time.monotonic() < end, "ended captures do not expire, or open ones do"
        self.captures = {name: self.captures[name] for name in kept}
        self.start_again()

    @precondition(lambda self: self.captures)
    @rule()
    def die(self) -> None:
        """Restart from the commits at this moment, without what a clean stop would still write."""
        before, self.folder = self.folder, Path(tempfile.mkdtemp(prefix="store-model-"))
        for file in self.store._db._files:
            copy = self.folder / "db" / file.folder.relative_to(before / "db")
            copy.mkdir()
            file._env.copy(str(copy))
        self.client.close()
        self.store.stop()
        shutil.rmtree(before)
        self.start()

    @invariant()
    def manifests_agree(self) -> None:
        for name, model in self.captures.items():
            manifest = self.client.get(name)
            assert manifest.state == model.state
            assert cells_of(manifest.present) == model.present
            assert cells_of(manifest.missing) == model.missing
            if model.state == INCOMPLETE:
                assert manifest.incomplete_reason == OVERFLOW
            assert manifest.num_rows == len(model.present)

    def listed(self) -> dict[str, tuple[int, int]]:
        answer = self.client.stub.ListCaptures(store_pb2.ListCapturesRequest())
        return {item.capture_id: (item.state, item.num_rows) for item in answer.captures}

    @invariant()
    def the_list_agrees(self) -> None:
        assert self.listed() == {name: (model.state, len(model.present)) for name, model in self.captures.items()}


class ShardsAgainstDict(StoreAgainstDict):
    shards = 3


TestStoreAgainstDict = StoreAgainstDict.TestCase
TestShardsAgainstDict = ShardsAgainstDict.TestCase
for case in (TestStoreAgainstDict, TestShardsAgainstDict):
    case.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
