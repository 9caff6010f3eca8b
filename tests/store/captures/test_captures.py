"""The lifecycle of captures, through a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from residuum.rpc import tracing
from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, selection_pb2, store_pb2
from store_svc.captures.capture_names import CaptureName
from store_svc.captures.lifecycle import Wait
from store_svc.database.db import Table
from store_svc.traces import CaptureTraces
from tests.store.support import (
    ABORTED,
    COMPLETE,
    INCOMPLETE,
    OPEN,
    POST,
    PRE,
    Client,
    cells_of,
    describe,
    failing_with,
    grid,
    loss_message,
    make_chunk,
    message,
    rejections,
    serving,
    set_wait,
    wait_request,
)

OVERFLOW = capture_pb2.INCOMPLETE_REASON_OVERFLOW
DIED = capture_pb2.INCOMPLETE_REASON_ENGINE_DIED
LAYERS = [0, 1, 2]


def test_only_captures_that_were_opened_are_traced(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[CaptureName] = []
    monkeypatch.setattr(CaptureTraces, "opened", lambda _, name: opened.append(name))
    client.open()
    with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS):
        client.open(describe(prompt=7))
    assert opened == [CaptureName("", "a")]


def test_a_capture_is_in_the_trace_that_opened_it(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts, spans = iter(["first", "second"]), []
    monkeypatch.setattr(tracing, "current_context", lambda: next(contexts))
    monkeypatch.setattr(tracing, "record_span", lambda name, context, *_, **__: spans.append((name, context)))
    client.open()
    client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
    client.open()
    client.append([make_chunk(LAYERS, range(4))])
    client.seal(generated=[1])
    assert spans == [("capture", "second")]


def test_a_capture_is_complete_when_the_seal_comes_last(client: Client) -> None:
    client.open()
    client.append([make_chunk(LAYERS, [0, 1, 2]), make_chunk(LAYERS, [3, 4])])
    before = client.get()
    assert (before.state, before.num_rows) == (OPEN, 15)
    assert not before.HasField("seal_time")
    manifest = client.seal(generated=[2])
    assert manifest.state == COMPLETE
    assert cells_of(manifest.present) == grid(LAYERS, range(5))
    assert manifest.num_rows == 15
    assert not manifest.missing
    assert manifest.HasField("end_time")
    assert client.get() == manifest


def test_a_capture_is_complete_when_the_last_chunk_comes_last(client: Client) -> None:
    client.open()
    client.append([make_chunk(LAYERS, [0, 1, 2])])
    manifest = client.seal(generated=[2])
    assert manifest.state == OPEN
    assert cells_of(manifest.missing) == grid(LAYERS, [3, 4])
    client.append([make_chunk([0, 1], [3, 4]), make_chunk([2], [3])])
    assert client.get().state == OPEN
    client.append([make_chunk([2], [4])])
    assert client.get().state == COMPLETE


def test_every_sequence_and_site_counts(client: Client) -> None:
    client.open(describe(layers=[0], sites=[POST, PRE], prompt=2, sequences=2))
    chunks = [make_chunk([0], [0, 1], sequence=sequence, site=site) for sequence in (0, 1) for site in (POST, PRE)]
    client.append(chunks[:-1])
    assert client.seal(generated=[1, 1]).state == OPEN
    client.append(chunks[-1:])
    assert client.get().state == COMPLETE


def test_only_wanted_positions_are_expected(client: Client) -> None:
    every_third = selection_pb2.PositionSelection(every=3)
    client.open(describe(layers=[0], positions=every_third))
    client.append([make_chunk([0], [0, 3, 4, 6])])  # position 4 was not selected
    manifest = client.seal(generated=[4])
    assert manifest.state == COMPLETE
    assert cells_of(manifest.present) == grid([0], [0, 3, 6])
    assert manifest.num_rows == 3
    assert client.read()[0] == grid([0], [0, 3, 6])


def test_the_row_past_the_end_is_trimmed(client: Client) -> None:
    client.open()
    client.append([make_chunk(LAYERS, range(7))])  # 4 + 2 - 1 = 5 are expected
    manifest = client.seal(generated=[2])
    assert manifest.state == COMPLETE
    assert cells_of(manifest.present) == grid(LAYERS, range(5))
    assert manifest.num_rows == 15
    assert client.read()[0] == grid(LAYERS, range(5))


def test_a_late_row_past_the_end_is_acknowledged_and_dropped(client: Client) -> None:
    client.open()
    client.append([make_chunk(LAYERS, range(4))])
    client.seal(generated=[2])
    late = client.append([make_chunk(LAYERS, [5, 6]), make_chunk(LAYERS, [4, 5])])
    assert rejections(late) == {}
    assert client.get().state == COMPLETE
    assert rejections(client.append([make_chunk(LAYERS, [5, 6])])) == {}
    assert client.read()[0] == grid(LAYERS, range(5))


ENDINGS = [{"outcome": ABORTED}, {"outcome": INCOMPLETE, "incomplete_reason": DIED, "incomplete_detail": "why"}]


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Client]:
    """A store that waits for rows in flight longer than any test takes."""
    with serving(tmp_path / "store", ending_timeout_seconds=60) as (_, client):
        yield client


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Client]:
    """A store that waits only briefly for rows in flight, and long for other rows."""
    with serving(tmp_path / "store", ending_timeout_seconds=0.2) as (_, client):
        yield client


def check_ended_as(manifest: capture_pb2.CaptureManifest, ending: dict[str, Any]) -> None:
    assert manifest.state == ending["outcome"]
    assert manifest.incomplete_reason == ending.get("incomplete_reason", 0)
    assert manifest.incomplete_detail == ending.get("incomplete_detail", "")
    assert manifest.HasField("end_time")


@pytest.mark.parametrize("ending", ENDINGS, ids=["aborted", "failed"])
def test_a_capture_is_open_until_the_rows_in_flight_have_arrived(patient: Client, ending: dict[str, Any]) -> None:
    patient.open()
    sealed = patient.seal(generated=[2], **ending)
    assert (sealed.state, sealed.incomplete_reason, sealed.incomplete_detail) == (OPEN, 0, "")
    assert sealed.HasField("seal_time")
    assert not sealed.HasField("end_time")
    waiting = patient.stub.GetCapture.future(wait_request(30))
    assert rejections(patient.append([make_chunk(LAYERS, range(3)), make_chunk(LAYERS, range(4))])) == {}
    assert patient.get().state == OPEN
    assert rejections(patient.append([make_chunk(LAYERS, range(4, 9))])) == {}
    manifest = patient.get()
    check_ended_as(manifest, ending)
    assert waiting.result(timeout=30).manifest == manifest
    assert cells_of(manifest.present) == grid(LAYERS, range(5))
    assert not manifest.missing
    assert patient.read()[0] == grid(LAYERS, range(5))


@pytest.mark.parametrize("ending", ENDINGS, ids=["aborted", "failed"])
def test_a_capture_ends_when_no_row_in_flight_arrives_any_more(hasty: Client, ending: dict[str, Any]) -> None:
    hasty.open()
    hasty.append([make_chunk(LAYERS, [0, 1])])
    assert hasty.seal(generated=[0], **ending).state == OPEN
    manifest = hasty.get(wait=20)
    check_ended_as(manifest, ending)
    assert cells_of(manifest.missing) == grid(LAYERS, [2, 3]), "an aborted request expects its prompt"
    answers = hasty.append([make_chunk(LAYERS, [0]), make_chunk(LAYERS, [1, 2])])
    assert rejections(answers) == {2: Reason.ERROR_REASON_CAPTURE_ENDED}
    assert hasty.get() == manifest


@pytest.mark.parametrize("ending", ENDINGS, ids=["aborted", "failed"])
def test_a_capture_ends_when_its_missing_rows_were_lost(patient: Client, ending: dict[str, Any]) -> None:
    patient.open()
    patient.seal(generated=[2], **ending)
    loss = store_pb2.RowLoss(sites=[POST], layers=LAYERS, positions=[3, 4], reason=OVERFLOW, detail="ring full")
    patient.send([message(1, "a", make_chunk(LAYERS, range(3))), loss_message(2, "a", loss)])
    manifest = patient.get()
    check_ended_as(manifest, ending)
    assert cells_of(manifest.missing) == grid(LAYERS, [3, 4])


@pytest.mark.parametrize("ending", ENDINGS, ids=["aborted", "failed"])
def test_a_capture_that_expects_no_rows_ends_at_once(patient: Client, ending: dict[str, Any]) -> None:
    generated = selection_pb2.PositionSelection(phases=[selection_pb2.PHASE_GENERATED])
    patient.open(describe(positions=generated))
    check_ended_as(patient.seal(generated=[0], **ending), ending)


def loss_of(positions: list[int]) -> store_pb2.RowLoss:
    return store_pb2.RowLoss(sites=[POST], layers=[1], positions=positions, reason=OVERFLOW, detail="ring full")


@pytest.mark.parametrize("sealed_first", [True, False])
def test_a_loss_makes_it_incomplete_once_the_rest_is_there(client: Client, sealed_first: bool) -> None:
    client.open()
    client.append([make_chunk(LAYERS, [0, 1, 2, 3])])
    messages = [loss_message(1, "a", loss_of([4])), message(2, "a", make_chunk([0, 2], [4]))]
    if sealed_first:
        client.seal(generated=[2])
        client.send(messages[:1])
        assert client.get().state == OPEN, "the store waits for rows that may still arrive"
        client.send(messages[1:])
    else:
        client.send(messages)
        client.seal(generated=[2])
    manifest = client.get()
    assert (manifest.state, manifest.incomplete_reason) == (INCOMPLETE, OVERFLOW)
    assert manifest.incomplete_detail == "ring full"
    assert cells_of(manifest.missing) == grid([1], [4])


def test_a_loss_that_is_reported_again_is_not_stored_again(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (store, client):
        client.open()
        client.send([loss_message(1, "a", loss_of([4])), loss_message(2, "a", loss_of([4]))])
        client.send([loss_message(1, "a", loss_of([4])), loss_message(2, "a", loss_of([3, 4]))])
        with store._db.read() as txn:
            assert txn.count(Table.LOSSES) == 2
    with serving(tmp_path / "store") as (_, client):
        client.append([make_chunk(LAYERS, [0, 1, 2]), make_chunk([0, 2], [3, 4])])
        manifest = client.seal(generated=[2])
        assert (manifest.state, manifest.incomplete_reason) == (INCOMPLETE, OVERFLOW)
        assert cells_of(manifest.missing) == grid([1], [3, 4])


def test_a_loss_that_does_not_matter_is_no_loss(client: Client) -> None:
    client.open()
    client.send([loss_message(1, "a", loss_of([2, 17])), message(2, "a", make_chunk(LAYERS, range(5)))])
    assert client.seal(generated=[2]).state == COMPLETE  # lost row 2 arrived after all, and 17 was never expected


def test_a_capture_with_missing_rows_times_out(tmp_path: Path) -> None:
    with serving(tmp_path / "store", seal_timeout_seconds=0.2) as (_, client):
        client.open()
        client.append([make_chunk(LAYERS, range(4))])
        client.seal(generated=[2])
        manifest = client.get(wait=20)
        assert (manifest.state, manifest.incomplete_reason) == (INCOMPLETE, capture_pb2.INCOMPLETE_REASON_TIMED_OUT)
        assert cells_of(manifest.missing) == grid(LAYERS, [4])
        answers = client.append([make_chunk(LAYERS, [4])])
        assert rejections(answers) == {1: Reason.ERROR_REASON_CAPTURE_ENDED}


def test_an_open_capture_has_its_own_timeout(tmp_path: Path) -> None:
    with serving(tmp_path / "store", seal_timeout_seconds=0.05, ending_timeout_seconds=0.05) as (_, client):
        client.open()
        assert client.get(wait=0.3).state == OPEN


def test_a_capture_that_is_never_sealed_ends(tmp_path: Path) -> None:
    with serving(tmp_path / "store", open_timeout_seconds=60.0) as (store, client):
        client.open()
        follow = client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="a", follow=True), timeout=20)
        client.append([make_chunk([0, 1], [0, 1, 4]), make_chunk([2], [0])])
        set_wait(store, Wait.SEAL, 0.5)
        manifest = client.get(wait=20)
        assert (manifest.state, manifest.incomplete_reason) == (INCOMPLETE, capture_pb2.INCOMPLETE_REASON_TIMED_OUT)
        assert "never sealed" in manifest.incomplete_detail
        assert cells_of(manifest.present) == grid([0, 1], [0, 1, 4]) | grid([2], [0])
        assert cells_of(manifest.missing) == grid([0, 1], [2, 3]) | grid([2], [1, 2, 3, 4])
        assert (manifest.num_rows, len(manifest.sequences), manifest.HasField("seal_time")) == (7, 0, False)
        assert list(follow)[-1].manifest == manifest
        with failing_with(Reason.ERROR_REASON_CAPTURE_ENDED) as caught:
            client.seal(generated=[2])
        assert caught[0].metadata["state"] == "INCOMPLETE"
        answers = client.append([make_chunk([0, 1], [0, 4]), make_chunk([2], [1])])
        assert rejections(answers) == {2: Reason.ERROR_REASON_CAPTURE_ENDED}
        assert client.get() == manifest
        assert client.read()[0] == cells_of(manifest.present)


def test_a_late_position_of_a_capture_that_was_never_sealed_is_rejected(tmp_path: Path) -> None:
    with serving(tmp_path / "store", open_timeout_seconds=60.0) as (store, client):
        client.open(describe(positions=selection_pb2.PositionSelection(every=2)))
        stored = [make_chunk([0, 1], [0, 1, 2]), make_chunk([2], [2, 4])]
        client.append(stored)
        set_wait(store, Wait.SEAL, 0.5)
        manifest = client.get(wait=20)
        assert manifest.state == INCOMPLETE
        late = [make_chunk(LAYERS, [6]), make_chunk([2], [4, 6])]
        answers = client.append([*stored, *late])
        assert rejections(answers) == dict.fromkeys([3, 4], Reason.ERROR_REASON_CAPTURE_ENDED)
        assert client.get() == manifest


def test_waiting_ends_with_the_capture(client: Client) -> None:
    client.open()
    manifests: list[capture_pb2.CaptureManifest] = []
    waiter = threading.Thread(target=lambda: manifests.append(client.get(wait=30)))
    waiter.start()
    client.append([make_chunk(LAYERS, range(5))])
    client.seal(generated=[2])
    waiter.join(timeout=30)
    assert [manifest.state for manifest in manifests] == [COMPLETE]


def test_sealing_again_is_answered_as_before(client: Client) -> None:
    client.open()
    first = client.seal(generated=[2])
    assert client.seal(generated=[2]) == first
    client.append([make_chunk(LAYERS, range(5))])
    assert client.seal(generated=[2]).state == COMPLETE
    with failing_with(Reason.ERROR_REASON_CAPTURE_ENDED) as caught:
        client.seal(generated=[3])
    assert caught[0].metadata == {"capture_id": "a", "state": "COMPLETE"}


def test_opening_again_is_answered_as_before_while_it_is_open(client: Client) -> None:
    client.open()
    client.append([make_chunk(LAYERS, [0])])
    client.open()
    assert client.get().num_rows == 3
    with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS):
        client.open(describe(prompt=5))
    client.append([make_chunk(LAYERS, range(5))])
    client.seal(generated=[2], outcome=ABORTED)
    with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS):
        client.open()


def described_at(seconds: int) -> capture_pb2.CaptureDescription:
    description = describe()
    description.request_time.seconds = seconds
    return description


def test_opening_again_at_another_time_is_the_same_while_nothing_was_written(client: Client) -> None:
    client.open(described_at(1))
    client.open(described_at(2))
    assert client.get().description == described_at(1), "the first description remains"
    with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS):
        client.open(describe(prompt=5))


@pytest.mark.parametrize("touch", ["row", "loss", "seal"])
def test_a_later_request_of_the_same_id_is_another_once_something_was_written(client: Client, touch: str) -> None:
    client.open(described_at(1))
    if touch == "row":
        client.append([make_chunk(LAYERS, [0])])
    elif touch == "loss":
        client.send([loss_message(1, "a", loss_of([0]))])
    else:
        client.seal(generated=[2])
    client.open(described_at(1))
    with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS):
        client.open(described_at(2))


def test_a_deleted_capture_is_no_more_and_its_name_is_free(client: Client) -> None:
    client.open()
    client.append([make_chunk(LAYERS, range(5))])
    num_bytes = client.get().num_bytes
    assert client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a")).freed_bytes == num_bytes > 0
    with failing_with(Reason.ERROR_REASON_UNKNOWN_CAPTURE):
        client.get()
    assert rejections(client.append([make_chunk(LAYERS, [0])])) == {1: Reason.ERROR_REASON_UNKNOWN_CAPTURE}
    client.open(describe(prompt=2))
    assert client.get().num_rows == 0
    assert client.read()[0] == set()
    client.seal(generated=[1])
    client.append([make_chunk(LAYERS, [0, 1])])
    assert client.get().state == COMPLETE
    client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
    with failing_with(Reason.ERROR_REASON_UNKNOWN_CAPTURE):
        client.get()


def test_figures(client: Client) -> None:
    client.open(describe("a"))
    client.open(describe("b", prompt=0))
    chunks = [make_chunk(LAYERS, [0, 1]), make_chunk(LAYERS, [1, 2]), make_chunk(LAYERS, [0])]
    client.append([*chunks, make_chunk([5], [0])])
    client.seal("b", generated=[0], outcome=ABORTED)
    stats = client.stub.GetStats(store_pb2.GetStatsRequest())
    assert {item.state: item.count for item in stats.captures} == {OPEN: 1, ABORTED: 1}
    assert (stats.num_chunks, stats.chunks_written, stats.chunks_repeated, stats.chunks_rejected) == (2, 2, 1, 1)
    assert stats.num_bytes == client.get().num_bytes
    assert 0 < stats.disk_bytes < stats.max_bytes == 64 << 30
    assert stats.commits >= 3
    assert stats.server_version


def listed(client: Client, **fields: object) -> tuple[list[str], str]:
    answer = client.stub.ListCaptures(store_pb2.ListCapturesRequest(**fields))
    return [summary.capture_id for summary in answer.captures], answer.next_page_token


def test_lists_come_newest_first_in_pages(client: Client) -> None:
    for name in ("a1", "b1", "a2", "a3", "b2"):
        client.open(describe(name, prompt=0))
    client.seal("a2", generated=[0], outcome=ABORTED)
    assert listed(client) == (["b2", "a3", "a2", "b1", "a1"], "")
    assert listed(client, states=[ABORTED]) == (["a2"], "")
    page, token = listed(client, prefix="a", page_size=2)
    assert page == ["a3", "a2"]
    client.open(describe("a4"))  # new captures do not disturb the pages
    assert listed(client, prefix="a", page_size=2, page_token=token) == (["a1"], "")
    for wrong in ({"prefix": "b"}, {"prefix": "a", "states": [ABORTED]}):
        with failing_with(Reason.ERROR_REASON_INVALID_FIELD):
            listed(client, page_token=token, **wrong)


def test_a_check_for_a_free_id_creates_nothing(client: Client) -> None:
    def check(name: str, **changes: object) -> None:
        request = store_pb2.OpenCaptureRequest(description=describe(name, **changes), check_only=True)
        client.stub.OpenCapture(request)

    for _ in range(2):
        check("a")
    assert listed(client) == ([], "")
    client.open(describe("a"))
    for changes in ({}, {"prompt": 0}):  # even an equal description is an existing capture here
        with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS):
            check("a", **changes)
    check("b")
    client.seal("a", generated=[0], outcome=ABORTED)
    with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS):
        check("a")
    with failing_with(Reason.ERROR_REASON_INVALID_FIELD):
        check("-bad")


def test_a_list_can_be_left_off_after_any_capture(client: Client) -> None:
    for name in ("a1", "b1", "a2", "a3"):
        client.open(describe(name, prompt=0))
    page = client.stub.ListCaptures(store_pb2.ListCapturesRequest(prefix="a", page_size=2))
    assert page.next_page_token == page.captures[-1].page_token
    first = page.captures[0]
    client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a2"))
    assert first.capture_id == "a3"
    assert listed(client, prefix="a", page_token=first.page_token) == (["a1"], "")
    with failing_with(Reason.ERROR_REASON_INVALID_FIELD):
        listed(client, page_token=first.page_token)


def test_a_summary_agrees_with_the_manifest(client: Client) -> None:
    client.open()
    client.append([make_chunk(LAYERS, range(5))])
    for state in (OPEN, COMPLETE):
        if state == COMPLETE:
            client.seal(generated=[2])
        manifest = client.get()
        summary = client.stub.ListCaptures(store_pb2.ListCapturesRequest()).captures[0]
        assert summary.state == manifest.state == state
        assert (summary.num_rows, summary.num_bytes) == (manifest.num_rows, manifest.num_bytes)
        assert (summary.open_time, summary.end_time) == (manifest.open_time, manifest.end_time)
