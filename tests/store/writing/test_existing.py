"""A new capture with the ID of an existing one: it fails, replaces the other, or is skipped, and rows never mix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.labels import LabelValue, to_dict, to_label
from residuum.wire.rows.frames import append_prefix
from store_svc.database.db import Table
from tests.store.support import (
    ABORTED,
    COMPLETE,
    INCOMPLETE,
    OPEN,
    Client,
    describe,
    failing_with,
    grid,
    make_chunk,
    rejections,
    seal_request,
    serving,
)

FAIL, REPLACE, SKIP = capture_pb2.IF_EXISTS_FAIL, capture_pb2.IF_EXISTS_REPLACE, capture_pb2.IF_EXISTS_SKIP
LAYERS = [0, 1, 2]


@pytest.fixture
def other(client: Client) -> Iterator[Client]:
    """A second connection to the same store."""
    second = Client(int(client.target.rpartition(":")[2]))
    yield second
    second.close()


def attempt_of(number: int, *, service: str = "one", **fields: object) -> capture_pb2.CaptureDescription:
    description = describe(**fields)
    description.attempt = number
    description.service_instance = service
    return description


def open_(
    client: Client, description: capture_pb2.CaptureDescription, if_exists: int = FAIL
) -> store_pb2.OpenCaptureResponse:
    request = store_pb2.OpenCaptureRequest(description=description, if_exists=if_exists)
    return client.stub.OpenCapture(request, timeout=30)


def labelled(number: int, **labels: LabelValue) -> capture_pb2.CaptureDescription:
    description = attempt_of(number)
    description.spec.labels.extend(to_label(name, value) for name, value in labels.items())
    return description


def write(client: Client, attempt: int, positions: range, **fields: object) -> list[store_pb2.AppendChunksResponse]:
    chunk = make_chunk(LAYERS, list(positions), **fields)
    return client.send([append_prefix(1, "a", len(chunk), attempt=attempt) + chunk])


def finish(client: Client, attempt: int, outcome: int = COMPLETE) -> capture_pb2.CaptureManifest:
    """Write all rows of a capture with 2 generated tokens, and seal it."""
    write(client, attempt, range(5))
    return seal(client, attempt, outcome)


def seal(client: Client, attempt: int, outcome: int = COMPLETE) -> capture_pb2.CaptureManifest:
    request = seal_request(outcome=outcome, attempt=attempt)
    if outcome == INCOMPLETE:
        request.incomplete_reason = capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED
    return client.stub.SealCapture(request).manifest


@pytest.mark.parametrize("outcome", [COMPLETE, INCOMPLETE, ABORTED])
def test_an_ended_capture_is_replaced(client: Client, outcome: int) -> None:
    open_(client, attempt_of(1))
    assert finish(client, 1, outcome).state == outcome
    with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS):
        open_(client, attempt_of(2))
    assert client.get().description.attempt == 1
    assert not open_(client, attempt_of(2, layers=[0, 1]), REPLACE).HasField("existing")
    manifest = client.get()
    assert (manifest.state, manifest.description.attempt, manifest.num_rows) == (OPEN, 2, 0)
    assert list(manifest.description.spec.layers.list.layers) == [0, 1]


def test_a_deleted_id_is_free_again(client: Client) -> None:
    open_(client, attempt_of(1))
    finish(client, 1)
    client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
    open_(client, attempt_of(2))
    assert client.get().description.attempt == 2


@pytest.mark.parametrize("replaces", [True, False])
def test_late_rows_losses_and_seals_of_an_earlier_capture_never_reach_the_new_one(
    client: Client, *, replaces: bool
) -> None:
    open_(client, attempt_of(1))
    write(client, 1, range(2))
    if replaces:
        open_(client, attempt_of(2), REPLACE)
    else:
        client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
        open_(client, attempt_of(2))
    assert rejections(write(client, 1, range(2, 5))) == {1: Reason.ERROR_REASON_UNKNOWN_CAPTURE}
    assert rejections(write(client, 0, range(2, 5))) == {1: Reason.ERROR_REASON_UNKNOWN_CAPTURE}, (
        "of a writer that names no attempt"
    )
    loss = store_pb2.RowLoss(sites=[1], layers=LAYERS, positions=[0], reason=1)
    late = store_pb2.AppendChunksRequest(number=1, capture_id="a", attempt=1, loss=loss).SerializeToString()
    assert rejections(client.send([late])) == {1: Reason.ERROR_REASON_UNKNOWN_CAPTURE}
    with failing_with(Reason.ERROR_REASON_UNKNOWN_CAPTURE):
        seal(client, 1, ABORTED)
    assert client.get().num_rows == 0
    assert finish(client, 2).state == COMPLETE
    assert client.read()[0] == grid(LAYERS, range(5))
    assert rejections(write(client, 1, range(5))) == {1: Reason.ERROR_REASON_UNKNOWN_CAPTURE}, (
        "late rows are refused after the end, too"
    )


def test_opening_again_after_no_answer_changes_nothing(client: Client) -> None:
    open_(client, attempt_of(1))
    finish(client, 1)
    for _ in range(2):
        assert not open_(client, attempt_of(2), REPLACE).HasField("existing")
        write(client, 2, range(1))
    assert client.get().num_rows == 3


def test_a_complete_capture_of_the_same_request_is_skipped(client: Client) -> None:
    first = attempt_of(1)
    first.sampling_digest = b"s" * 32
    open_(client, first)
    finish(client, 1)
    again = attempt_of(2, service="two")
    again.sampling_digest, again.vllm_version = b"s" * 32, "another"
    again.request_time.GetCurrentTime()
    existing = open_(client, again, SKIP).existing
    assert (existing.state, existing.description.attempt) == (COMPLETE, 1)
    assert [list(item.generated_token_ids) for item in existing.sequences] == [[0, 1]]
    assert client.get() == existing


def test_how_often_rows_leave_makes_no_other_request(client: Client) -> None:
    open_(client, attempt_of(1))
    finish(client, 1)
    again = attempt_of(2)
    again.spec.flush_interval = 1
    assert open_(client, again, SKIP).existing.description.attempt == 1


@pytest.mark.parametrize("outcome", [COMPLETE, ABORTED])
@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("prompt_token_ids", [7], "prompt"),
        ("num_sequences", 2, "number of sequences"),
        ("model", "another", "model"),
        ("adapter", "joy", "LoRA adapter"),
        ("sampling_digest", b"t" * 32, "sampling"),
    ],
)
def test_a_capture_of_another_request_is_not_skipped(
    client: Client, field: str, value: object, told: str, outcome: int
) -> None:
    first, again = attempt_of(1), attempt_of(2)
    first.sampling_digest = again.sampling_digest = b"s" * 32
    open_(client, first)
    finish(client, 1, outcome)
    if isinstance(value, list):
        again.prompt_token_ids[:] = value
    else:
        setattr(again, field, value)
    with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS) as failed:
        open_(client, again, SKIP)
    assert f"its {told} differs" in failed[0].message
    assert client.get().description.attempt == 1


def test_a_capture_that_replaces_another_has_its_own_labels(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (store, client):
        open_(client, labelled(1, split="train", y=1))
        finish(client, 1)
        open_(client, labelled(2, split="test"), REPLACE)
        assert to_dict(client.get().labels) == {"split": "test"}
        for where, count in (("split = train", 0), ("y = 1", 0), ("split = test", 1)):
            found = client.stub.ListCaptures(store_pb2.ListCapturesRequest(where=where)).captures
            assert len(found) == count, where
        with store._db.read() as txn:
            assert (txn.count(Table.LABEL_INDEX), txn.count(Table.LABELS)) == (1, 1)


def test_a_skipped_capture_keeps_labels_that_were_changed_later(client: Client) -> None:
    open_(client, labelled(1, split="train", y=1))
    finish(client, 1)
    change = [to_label("y", 2), to_label("by", "hand")]
    client.stub.LabelCapture(store_pb2.LabelCaptureRequest(capture_id="a", labels=change))
    existing = open_(client, labelled(2, y=1, split="train"), SKIP).existing
    assert to_dict(existing.labels) == {"by": "hand", "split": "train", "y": 2}
    assert client.get() == existing
    with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS) as failed:
        open_(client, labelled(2, split="test", y=1), SKIP)
    assert "its set of labels differs" in failed[0].message
    assert client.get() == existing


def test_a_capture_without_the_prompts_text_is_not_skipped_if_it_is_wanted(client: Client) -> None:
    open_(client, attempt_of(1))
    finish(client, 1)
    again = attempt_of(2)
    again.spec.keep_prompt, again.prompt_text = True, "a"
    with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS) as failed:
        open_(client, again, SKIP)
    assert "its capture spec differs" in failed[0].message


@pytest.mark.parametrize("outcome", [INCOMPLETE, ABORTED])
def test_skip_replaces_a_capture_that_is_not_complete(client: Client, outcome: int) -> None:
    open_(client, attempt_of(1))
    finish(client, 1, outcome)
    assert not open_(client, attempt_of(2), SKIP).HasField("existing")
    assert client.get().description.attempt == 2


def test_skip_waits_for_rows_in_flight(client: Client, other: Client) -> None:
    open_(client, attempt_of(1))
    write(client, 1, range(4))
    assert seal(client, 1).state == OPEN
    opening = client.stub.OpenCapture.future(
        store_pb2.OpenCaptureRequest(description=attempt_of(2), if_exists=SKIP), timeout=30
    )
    write(other, 1, range(4, 5))
    assert opening.result().existing.state == COMPLETE


@pytest.mark.parametrize("if_exists", [REPLACE, SKIP])
def test_an_open_capture_is_replaced_only_if_its_request_does_not_run(tmp_path: Path, if_exists: int) -> None:
    with serving(tmp_path / "store", lease_seconds=60.0) as (_, client):
        open_(client, attempt_of(1, service="one"))
        with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS) as failed:
            open_(client, attempt_of(2, service="two"), if_exists)
        assert "still running" in failed[0].message
        open_(client, attempt_of(3, service="one"), if_exists)  # a service knows its own requests
        seal(client, 3, ABORTED)
        open_(client, attempt_of(4, service="two"), if_exists)  # sealed, with rows in flight
        assert client.get().description.attempt == 4


def test_an_open_capture_of_an_older_service_is_not_replaced(client: Client) -> None:
    client.open()
    with failing_with(Reason.ERROR_REASON_CAPTURE_EXISTS) as failed:
        open_(client, attempt_of(1), REPLACE)
    assert "residuum rm" in failed[0].message


def test_a_capture_stays_if_the_one_to_replace_it_cannot_be_opened(tmp_path: Path) -> None:
    with serving(tmp_path / "store", max_open_mib=1) as (_, client):
        open_(client, attempt_of(1))
        finish(client, 1)
        number = 0
        with failing_with(Reason.ERROR_REASON_LIMIT_REACHED):
            while True:
                open_(client, attempt_of(number + 10, capture_id=f"c{number}"))
                number += 1
        with failing_with(Reason.ERROR_REASON_LIMIT_REACHED):
            open_(client, attempt_of(2), REPLACE)
        assert client.get().state == COMPLETE
        assert client.read()[0] == grid(LAYERS, range(5))


def test_a_store_that_has_all_captures_that_it_may_have_still_replaces(tmp_path: Path) -> None:
    with serving(tmp_path / "store", max_captures=1) as (_, client):
        open_(client, attempt_of(1))
        with failing_with(Reason.ERROR_REASON_LIMIT_REACHED):
            open_(client, attempt_of(2, capture_id="b"))
        open_(client, attempt_of(3), REPLACE)
        assert client.get().description.attempt == 3


def test_a_replacement_survives_a_restart_and_frees_the_old_rows(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (_, client):
        open_(client, attempt_of(1))
        finish(client, 1)
        open_(client, attempt_of(2), REPLACE)
        write(client, 2, range(1))
    with serving(tmp_path / "store") as (_, client):
        manifest = client.get()
        assert (manifest.description.attempt, manifest.num_rows) == (2, 3)
        assert rejections(write(client, 1, range(5))) == {1: Reason.ERROR_REASON_UNKNOWN_CAPTURE}
        assert finish(client, 2).state == COMPLETE
        assert client.stub.GetStats(store_pb2.GetStatsRequest()).captures[0].count == 1


def test_followers_of_a_replaced_capture_get_an_error(client: Client, other: Client) -> None:
    open_(client, attempt_of(1))
    following = other.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="a", follow=True), timeout=30)
    assert next(following).manifest.description.attempt == 1
    open_(client, attempt_of(2), REPLACE)
    with failing_with(Reason.ERROR_REASON_UNKNOWN_CAPTURE):
        list(following)


def test_tenants_do_not_replace_each_others_captures(client: Client) -> None:
    mine, theirs = attempt_of(1), attempt_of(2)
    mine.tenant, theirs.tenant = "alice", "bob"
    open_(client, mine)
    open_(client, theirs, REPLACE)
    for tenant, attempt in (("alice", 1), ("bob", 2)):
        request = store_pb2.GetCaptureRequest(capture_id="a", tenant=tenant)
        assert client.stub.GetCapture(request).manifest.description.attempt == attempt
