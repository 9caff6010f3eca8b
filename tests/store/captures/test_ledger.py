"""The ledger, compared with a model that uses sets of cells."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residuum.v1 import capture_pb2, selection_pb2
from residuum.wire.selection import expected_rows, wanted_positions
from store_svc.captures.ledger import Cells, Ledger
from store_svc.captures.positions import Positions
from tests.store.support import POST, PRE, Cell, describe

LAYERS = (0, 2, 3)
PROMPT = 5
LONGEST = 24

cells = st.builds(
    Cells,
    st.integers(0, 1),
    st.sampled_from([POST, PRE]),
    st.sets(st.sampled_from(LAYERS), min_size=1).map(sorted),
    st.sets(st.integers(0, LONGEST), min_size=1).map(lambda numbers: Positions.of(sorted(numbers))),
)
selections = st.sampled_from(
    [
        selection_pb2.PositionSelection(),
        selection_pb2.PositionSelection(every=3),
        selection_pb2.PositionSelection(phases=[selection_pb2.PHASE_GENERATED]),
        selection_pb2.PositionSelection(ranges=[selection_pb2.PositionRange(first=-2)]),
    ]
)
SITE_LAYERS = ({POST: LAYERS, PRE: LAYERS}, {POST: (0, 3), PRE: (2,)}, {PRE: (0, 2, 3), POST: (2,)})
"""The layers that a capture has at each site. Cells of other layers are left out."""
REDUCTIONS = (capture_pb2.REDUCTION_NONE, capture_pb2.REDUCTION_MEAN)
events = st.lists(st.tuples(st.sampled_from(["chunk", "chunk", "loss"]), cells), max_size=12)


def plain(many: list[Cells]) -> set[Cell]:
    listed = [
        (*row, position)
        for item in many
        for row in item.rows()
        for first, last in item.positions.runs()
        for position in range(first, last + 1)
    ]
    assert len(listed) == len(set(listed))
    return set(listed)


class Model:
    """The same ledger with plain sets of cells."""

    def __init__(
        self, selection: selection_pb2.PositionSelection, reduction: int, layers: dict[int, tuple[int, ...]]
    ) -> None:
        self.layers = layers
        self.wanted = set(np.flatnonzero(wanted_positions(selection, PROMPT, 0, LONGEST + 1)).tolist())
        self.reduced = reduction != capture_pb2.REDUCTION_NONE
        self.stored: set[Cell] = set()
        self.lost: set[Cell] = set()
        self.expected: set[Cell] | None = None

    def served(self) -> set[Cell]:
        if self.expected is not None:
            return self.stored & self.expected
        early = {p for p in self.wanted if p < PROMPT and p != self.last(range(PROMPT))} if self.reduced else set()
        return {cell for cell in self.stored if cell[3] in self.wanted - early}

    def last(self, phase: range) -> int | None:
        return max(self.wanted & set(phase), default=None)

    def counting(self, length: int) -> set[int | None]:
        """Return the valid positions of a sequence with this many rows."""
        if self.reduced:
            return {self.last(range(PROMPT)), self.last(range(PROMPT, length))} - {None}
        return self.wanted & set(range(length))

    def expect(self, generated: list[int]) -> None:
        self.expected = {
            (sequence, site, layer, position)
            for sequence, count in enumerate(generated)
            for site, layers in self.layers.items()
            for layer in layers
            for position in self.counting(expected_rows(PROMPT, count))
        }


@settings(deadline=None)
@given(
    selections,
    st.sampled_from(REDUCTIONS),
    st.sampled_from(SITE_LAYERS),
    events,
    events,
    st.lists(st.integers(0, 20), min_size=2, max_size=2),
)
def test_the_ledger_agrees_with_sets(
    selection: selection_pb2.PositionSelection,
    reduction: int,
    site_layers: dict[int, tuple[int, ...]],
    before: list[tuple[str, Cells]],
    after: list[tuple[str, Cells]],
    generated: list[int],
) -> None:
    description = describe(
        layers=LAYERS, sites=tuple(site_layers), prompt=PROMPT, sequences=2, positions=selection, reduction=reduction
    )
    if len(set(site_layers.values())) > 1:
        for layers in site_layers.values():
            description.spec.site_layers.add().list.layers.extend(layers)
    ledger, model = Ledger(description), Model(selection, reduction, site_layers)
    for step in (*before, None, *after):
        if step is None:
            ledger.expect(generated)
            model.expect(generated)
        else:
            ledger = ledger.fork()
            kind, item = step
            layers = [layer for layer in item.layers if layer in site_layers[item.site]]
            if layers:
                play(ledger, model, kind, item._replace(layers=layers))
        check(ledger, model)


def play(ledger: Ledger, model: Model, kind: str, item: Cells) -> None:
    if kind == "loss":
        ledger.lose(item)
        model.lost |= plain([item])
        return
    groups = [item._replace(layers=layers, positions=positions) for positions, layers in ledger.fresh(item).items()]
    new = plain([item]) - model.stored
    if model.expected is None:
        assert plain(groups) == new
    else:
        assert new & model.expected <= plain(groups) <= new
    for group in groups:
        ledger.add(group)
    model.stored |= plain(groups)


def check(ledger: Ledger, model: Model) -> None:
    missing = model.expected - model.stored if model.expected is not None else set()
    assert plain(ledger.present()) == model.served()
    assert plain(ledger.absent()) == missing
    assert ledger.num_rows == len(model.served())
    assert ledger.missing == len(missing)
    assert ledger.outstanding == len(missing - model.lost)


def test_layers_that_have_lost_the_same_rows_share_the_memory_for_them() -> None:
    ledger, positions = Ledger(describe(layers=range(1000))), Positions.of(range(0, 100_000, 2))
    tracemalloc.start()
    try:
        assert ledger.lose(Cells(0, POST, range(1000), positions))
        assert not ledger.lose(Cells(0, POST, range(500), positions)), "they are lost already"
        assert ledger.lose(Cells(0, POST, range(500), Positions.of([1])))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 1 << 20


def test_the_expected_rows_of_layers_that_are_alike_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    length = Positions.__len__
    monkeypatch.setattr(Positions, "__len__", lambda self: counted.append(1) or length(self))
    ledger = Ledger(describe(layers=range(1000), prompt=5))
    ledger.add(Cells(0, POST, range(500), Positions.of(range(4))))
    ledger.lose(Cells(0, POST, range(800), Positions.of([4])))
    counted.clear()
    ledger.expect([1])
    assert (ledger.num_rows, ledger.missing, ledger.outstanding) == (2000, 3000, 2200)
    assert len(counted) < 20, "otherwise a seal would hold up the writer for seconds"


def test_a_fork_does_not_change_the_original() -> None:
    ledger = Ledger(describe())
    fork = ledger.fork()
    fork.add(Cells(0, POST, [0], Positions.of([1, 2])))
    fork.lose(Cells(0, POST, [1], Positions.of([1])))
    assert ledger.present() == []
    assert ledger.num_rows == 0
    assert fork.num_rows == 2
