"""One call opens or seals many captures, each as the call for one capture does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.limits import MAX_CAPTURES_PER_OPEN
from residuum.wire.rows.frames import append_prefix
from store_svc.captures.lifecycle import Capture
from store_svc.database.db import DamagedError
from store_svc.writing.changes import Batch
from tests.store.support import (
    Client,
    busy_writer,
    describe,
    failing_with,
    grid,
    make_chunk,
    rejections,
    seal_request,
    serving,
)
from tests.waiting import wait_for

LAYERS = [0, 1, 2]
ABORTED, COMPLETE = capture_pb2.CAPTURE_STATE_ABORTED, capture_pb2.CAPTURE_STATE_COMPLETE
EXISTS, INVALID = Reason.ERROR_REASON_CAPTURE_EXISTS, Reason.ERROR_REASON_INVALID_FIELD
UNKNOWN, INTERNAL = Reason.ERROR_REASON_UNKNOWN_CAPTURE, Reason.ERROR_REASON_INTERNAL
OPENED = "opened"
SECONDS = 30


def open_request(name: str, number: int = 0, **fields: object) -> store_pb2.OpenCaptureRequest:
    """A request to open a capture with an attempt."""
    description = describe(name)
    description.attempt = number
    return store_pb2.OpenCaptureRequest(description=description, **fields)


def open_many(client: Client, *opens: store_pb2.OpenCaptureRequest) -> list[object]:
    """Open captures. Return for each "opened", the manifest that exists, or the reason of its error."""
    results: dict[int, object] = {}
    for response in client.stub.OpenCaptures(store_pb2.OpenCapturesRequest(opens=opens), timeout=SECONDS):
        for result in response.results:
            assert result.index not in results
            existing = result.opened.existing if result.opened.HasField("existing") else OPENED
            results[result.index] = result.error.reason if result.HasField("error") else existing
    return [results[index] for index in range(len(opens))]


def seal_many(client: Client, *seals: store_pb2.SealCaptureRequest) -> list[int]:
    """Seal captures. Return the reason of the error of each; 0 without one."""
    response = client.stub.SealCaptures(store_pb2.SealCapturesRequest(seals=seals), timeout=SECONDS)
    return [result.error.reason for result in response.results]


def test_each_capture_has_its_own_result(client: Client) -> None:
    client.open(describe("taken", prompt=7))
    malformed = open_request("x")
    malformed.description.num_layers = 0
    free = open_request("free", check_only=True)
    held = open_request("taken", check_only=True)
    results = open_many(client, open_request("a"), malformed, open_request("taken"), free, held, open_request("b"))
    assert results == [OPENED, INVALID, EXISTS, OPENED, EXISTS, OPENED]
    for name in "ab":
        assert client.get(name).state == capture_pb2.CAPTURE_STATE_OPEN
    with failing_with(UNKNOWN):
        client.get("free")
    assert open_many(client, open_request("a"), open_request("b")) == [OPENED, OPENED], "a repeat changes nothing"


def test_the_error_of_a_capture_is_that_of_one_open(client: Client) -> None:
    client.open(describe("taken", prompt=7))
    with failing_with(EXISTS) as caught:
        client.stub.OpenCapture(open_request("taken"))
    call = client.stub.OpenCaptures(store_pb2.OpenCapturesRequest(opens=[open_request("taken")]), timeout=SECONDS)
    (result,) = [result for response in call for result in response.results]
    failure = Failure.of_item(result.error)
    assert (failure.message, failure.metadata) == (caught[0].message, caught[0].metadata)


def test_of_two_captures_with_one_id_in_a_call_the_first_is_opened(client: Client) -> None:
    assert open_many(client, open_request("a", 1), open_request("a", 2), open_request("a", 1)) == [
        OPENED, EXISTS, OPENED,
    ]  # fmt: skip
    assert client.get("a").description.attempt == 1


def test_rows_that_follow_the_first_message_are_written_after_the_captures(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as (store, client), ThreadPoolExecutor(1) as pool:
        client.open(describe("taken", prompt=7))
        with busy_writer(store):
            opens = [open_request("a", 7), open_request("taken", 8), open_request("b", 9)]
            call = client.stub.OpenCaptures(store_pb2.OpenCapturesRequest(opens=opens), timeout=SECONDS)
            first = next(call)
            assert list(first.queued) == [0, 2], "an open of a known ID is usually refused, so its caller waits"
            assert not first.results
            chunk = make_chunk(LAYERS, range(2))
            messages = [
                append_prefix(number, name, len(chunk), attempt=attempt) + chunk
                for number, name, attempt in ((1, "a", 7), (2, "b", 9))
            ]
            answers = pool.submit(client.send, messages)
        results = {result.index: result.WhichOneof("outcome") for response in call for result in response.results}
        assert results == {0: "opened", 1: "error", 2: "opened"}
        assert rejections(answers.result()) == {}
        for name in "ab":
            assert client.read(name)[0] == grid(LAYERS, range(2))


def test_a_bug_in_one_open_fails_that_one_alone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Batch.open

    def broken(batch: Batch, description: capture_pb2.CaptureDescription, *rest: object) -> object:
        if description.capture_id == "b":
            raise RuntimeError("a bug")
        return whole(batch, description, *rest)

    monkeypatch.setattr(Batch, "open", broken)
    assert open_many(client, *map(open_request, "abc")) == [OPENED, INTERNAL, OPENED]


def test_opens_that_may_wait_for_rows_are_refused_and_the_others_opened(client: Client) -> None:
    client.open(describe("waiting"))
    client.seal("waiting", generated=[2])
    skip = capture_pb2.IF_EXISTS_SKIP
    opens = [open_request("waiting", 5, if_exists=skip), open_request("a"), open_request("b", if_exists=skip)]
    # If an open waited for the rows, the call would end with its time limit.
    assert open_many(client, *opens) == [INVALID, OPENED, INVALID]
    assert open_many(client, open_request("c", if_exists=skip, check_only=True)) == [OPENED], "it is only a check"
    with failing_with(UNKNOWN):
        client.get("b")


def test_existing_captures_are_replaced(client: Client) -> None:
    for name in "ab":
        client.open(describe(name))
        client.append([make_chunk(LAYERS, range(5))], name)
        assert client.seal(name, generated=[2]).state == COMPLETE
    opens = [open_request(name, 3, if_exists=capture_pb2.IF_EXISTS_REPLACE) for name in "abc"]
    assert open_many(client, *opens) == [OPENED] * 3
    assert [client.get(name).description.attempt for name in "abc"] == [3] * 3


def test_an_open_renews_the_lease_of_its_service(client: Client) -> None:
    request = open_request("a")
    request.description.service_instance = "service-1"
    call = client.stub.OpenCaptures(store_pb2.OpenCapturesRequest(opens=[request, open_request("b")]), timeout=SECONDS)
    leases = [result.opened.HasField("lease") for response in call for result in response.results]
    assert leases == [True, False]


def test_calls_fail_as_a_whole_if_the_writer_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path / "store") as (store, client), ThreadPoolExecutor(2) as pool:
        client.open(describe("a"))
        with busy_writer(store):
            opening = client.stub.OpenCaptures(
                store_pb2.OpenCapturesRequest(opens=[open_request("b"), open_request("c")]), timeout=SECONDS
            )
            assert list(next(opening).queued) == [0, 1]
            opens = pool.submit(list, opening)
            seals = pool.submit(seal_many, client, seal_request("a", [1]), seal_request("b", [1]))
            wait_for(lambda: len(store._writer.queue._commands) == 4)
            monkeypatch.setattr(store._db, "write", dies)
        for call in (opens, seals):
            with failing_with(Reason.ERROR_REASON_NOT_SERVING):
                call.result(SECONDS)


def dies(*_: object, **__: object) -> object:
    raise DamagedError("scripted")


def test_each_seal_has_its_own_result(client: Client) -> None:
    for name in "abc":
        client.open(describe(name))
    client.seal("c", outcome=ABORTED)
    malformed = seal_request("b", [1])
    malformed.outcome = capture_pb2.CAPTURE_STATE_OPEN
    seals = [seal_request("a", outcome=ABORTED), seal_request("gone", [1]), malformed, seal_request("c", [1])]
    assert seal_many(client, *seals) == [0, UNKNOWN, INVALID, Reason.ERROR_REASON_CAPTURE_ENDED]
    assert [client.get(name).HasField("seal_time") for name in "abc"] == [True, False, True]
    assert seal_many(client, seals[0], seals[0]) == [0, 0], "a repeat changes nothing"


def test_seals_of_many_captures_make_no_manifests(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest may fill a message, and 256 of them would be held at once."""
    made = []
    whole = Capture.manifest

    def counted(capture: Capture) -> capture_pb2.CaptureManifest:
        made.append(capture)
        return whole(capture)

    for name in "ab":
        client.open(describe(name))
    monkeypatch.setattr(Capture, "manifest", counted)
    seals = [seal_request(name, [1]) for name in "ab"]
    assert seal_many(client, *seals) == [0, 0]
    assert seal_many(client, *seals) == [0, 0], "also those that were sealed before"
    assert not made
    assert client.stub.SealCapture(seals[0]).manifest.HasField("seal_time")


@pytest.mark.parametrize("number", [0, MAX_CAPTURES_PER_OPEN + 1])
def test_calls_of_too_many_captures_or_none_are_refused(client: Client, number: int) -> None:
    opens = [open_request(f"x-{index}") for index in range(number)]
    with failing_with(INVALID) as caught:
        list(client.stub.OpenCaptures(store_pb2.OpenCapturesRequest(opens=opens)))
    assert caught[0].metadata["field"] == "opens"
    with failing_with(INVALID) as caught:
        client.stub.SealCaptures(store_pb2.SealCapturesRequest(seals=[seal_request("a", [1])] * number))
    assert caught[0].metadata["field"] == "seals"
    assert not client.stub.ListCaptures(store_pb2.ListCapturesRequest()).captures


def test_captures_of_one_call_end_in_one_transaction_over_several_shards(tmp_path: Path) -> None:
    with serving(tmp_path / "store", shards=4) as (store, client):
        names = [f"x-{index}" for index in range(32)]
        before = store._writer.counters.commits
        assert open_many(client, *map(open_request, names)) == [OPENED] * len(names)
        assert store._writer.counters.commits == before + 1
        for name in names:
            client.append([make_chunk(LAYERS, range(5))], name)
        assert seal_many(client, *(seal_request(name, [2]) for name in names)) == [0] * len(names)
        assert {client.get(name, wait=5).state for name in names} == {COMPLETE}
        assert client.read(names[-1])[0] == grid(LAYERS, range(5))
