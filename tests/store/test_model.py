"""The store against a dict, by random steps: append, seal, read, delete, restart."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from residuum.rpc.errors import Reason
from residuum.v1 import store_pb2
from residuum.wire.selection import expected_rows
from store_svc.server import Store
from store_svc.settings import StoreSettings
from tests.store.support import (
    ABORTED,
    COMPLETE,
    OPEN,
    Cell,
    Client,
    cells_of,
    describe,
    grid,
    make_chunk,
    rejections,
)

LAYERS = [0, 1]
PROMPT = 3
names = st.sampled_from(["a", "b", "c"])
some_layers = st.sampled_from([[0], [1], [0, 1]])
some_positions = st.sets(st.integers(0, 7), min_size=1).map(sorted)


class Model:
    def __init__(self) -> None:
        self.stored: set[Cell] = set()
        self.expected: set[Cell] | None = None
        self.aborted = False

    @property
    def state(self) -> int:
        if self.expected is None or not self.expected <= self.stored:
            return OPEN
        return ABORTED if self.aborted else COMPLETE

    @property
    def present(self) -> set[Cell]:
        return self.stored if self.expected is None else self.stored & self.expected


class StoreAgainstDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.captures: dict[str, Model] = {}
        self.start()

    def start(self) -> None:
        settings = StoreSettings(
            listen="127.0.0.1:0", path=self.folder / "db", ending_timeout_seconds=600, grace_seconds=0
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
        assert rejections(answers) == {}, "only rows that are expected and missing can come too late"
        for layers, positions in chunks:
            model.stored |= grid(layers, positions)

    @rule(name=names, generated=st.integers(0, 4), aborted=st.booleans())
    def seal(self, name: str, generated: int, aborted: bool) -> None:
        model = self.captures.get(name)
        if model is None or model.expected is not None:
            return
        model.expected = grid(LAYERS, range(expected_rows(PROMPT, generated)))
        model.aborted = aborted
        self.client.seal(name, generated=[generated], outcome=ABORTED if aborted else COMPLETE)

    @rule(name=names, layers=st.sets(st.sampled_from(LAYERS)))
    def read(self, name: str, layers: set[int]) -> None:
        if name in self.captures:
            wanted = {cell for cell in self.captures[name].present if not layers or cell[2] in layers}
            assert self.client.read(name, layers=layers)[0] == wanted

    @rule(name=names)
    def delete(self, name: str) -> None:
        if self.captures.pop(name, None) is not None:
            self.client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=name))

    @precondition(lambda self: self.captures)
    @rule()
    def restart(self) -> None:
        self.client.close()
        self.store.stop()
        self.start()

    @invariant()
    def manifests_agree(self) -> None:
        for name, model in self.captures.items():
            manifest = self.client.get(name)
            assert manifest.state == model.state
            assert cells_of(manifest.present) == model.present
            missing = model.expected - model.stored if model.expected is not None else set()
            assert cells_of(manifest.missing) == missing
            assert manifest.num_rows == len(model.present)

    @invariant()
    def the_list_agrees(self) -> None:
        answer = self.client.stub.ListCaptures(store_pb2.ListCapturesRequest())
        listed = {item.capture_id: (item.state, item.num_rows) for item in answer.captures}
        assert listed == {name: (model.state, len(model.present)) for name, model in self.captures.items()}


TestStoreAgainstDict = StoreAgainstDict.TestCase
TestStoreAgainstDict.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
