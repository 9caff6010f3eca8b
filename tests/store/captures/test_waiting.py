"""The order of captures by their last progress, with the tests' own clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from residuum.v1 import store_pb2
from store_svc.captures.capture_names import CaptureName
from store_svc.captures.catalog import Catalog
from store_svc.captures.ledger import Cells
from store_svc.captures.lifecycle import Capture, Wait
from store_svc.captures.positions import Positions
from tests.store.support import ABORTED, POST, describe, seal_request

NOW = Timestamp(seconds=1)
LAYERS = [0, 1, 2]


def lose(capture: Capture, progress: float) -> None:
    capture.lose(store_pb2.RowLoss(sites=[POST], layers=LAYERS, positions=[0], reason=1), progress)


def add(capture: Capture, progress: float) -> None:
    capture.add(Cells(0, POST, LAYERS, Positions.of([0])), 10, progress)


def abort(capture: Capture, progress: float) -> None:
    capture.close(seal_request(generated=[1], outcome=ABORTED), NOW, progress)


def seal(capture: Capture, progress: float) -> None:
    capture.close(seal_request(generated=[1]), NOW, progress)


def finish(capture: Capture, progress: float) -> None:
    capture.add(Cells(0, POST, LAYERS, Positions.of(range(4))), 10, progress)
    seal(capture, progress)


def do_nothing(_capture: Capture, _progress: float) -> None:
    pass


def change(catalog: Catalog, number: int, step: Callable[[Capture, float], None], progress: float) -> None:
    feed = catalog.feed_of(number)
    assert feed
    capture = feed.capture.fork()
    step(capture, progress)
    catalog.publish(capture, [])


@pytest.fixture
def catalog() -> Catalog:
    """Three captures, opened at seconds 1, 2 and 3."""
    catalog = Catalog()
    for number in (1, 2, 3):
        catalog.open(Capture(number, describe(f"c{number}"), NOW, float(number)), [])
    return catalog


def waiting(catalog: Catalog) -> dict[Wait, list[tuple[int, float]]]:
    return {wait: [(item.number, item.progress) for item in catalog.waiting(wait)] for wait in Wait}


OPEN_2_3 = [(2, 2.0), (3, 3.0)]


@pytest.mark.parametrize(
    ("step", "left"),
    [
        (do_nothing, {Wait.SEAL: [(1, 1.0), *OPEN_2_3], Wait.ROWS: [], Wait.REMNANTS: []}),
        (add, {Wait.SEAL: [*OPEN_2_3, (1, 9.0)], Wait.ROWS: [], Wait.REMNANTS: []}),
        (lose, {Wait.SEAL: [*OPEN_2_3, (1, 9.0)], Wait.ROWS: [], Wait.REMNANTS: []}),
        (seal, {Wait.SEAL: OPEN_2_3, Wait.ROWS: [(1, 9.0)], Wait.REMNANTS: []}),
        (abort, {Wait.SEAL: OPEN_2_3, Wait.ROWS: [], Wait.REMNANTS: [(1, 9.0)]}),
        (finish, {Wait.SEAL: OPEN_2_3, Wait.ROWS: [], Wait.REMNANTS: []}),
    ],
)
def test_progress_restarts_the_wait(
    catalog: Catalog, step: Callable[[Capture, float], None], left: dict[Wait, list[tuple[int, float]]]
) -> None:
    change(catalog, 1, step, 9.0)
    assert waiting(catalog) == left


def test_captures_that_wait_for_rows_are_in_the_order_of_their_progress(catalog: Catalog) -> None:
    for at, number in enumerate((3, 1, 2)):
        change(catalog, number, seal, 10.0 + at)
    change(catalog, 1, add, 20.0)
    change(catalog, 3, do_nothing, 30.0)
    assert waiting(catalog)[Wait.ROWS] == [(3, 10.0), (2, 12.0), (1, 20.0)]


def test_deleted_captures_do_not_wait(catalog: Catalog) -> None:
    change(catalog, 1, seal, 9.0)
    for number in (1, 2):
        catalog.delete(CaptureName("", f"c{number}"), number)
    assert waiting(catalog) == {Wait.SEAL: [(3, 3.0)], Wait.ROWS: [], Wait.REMNANTS: []}
