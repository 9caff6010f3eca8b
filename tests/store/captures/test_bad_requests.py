"""Invalid descriptions, seals and page tokens."""

from __future__ import annotations

import pytest
from google.protobuf import timestamp_pb2

from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, selection_pb2, store_pb2, tensor_pb2
from residuum.wire.limits import (
    MAX_CAPTURE_ROWS_AT_A_POSITION,
    MAX_CAPTURE_TOKENS,
    MAX_DESCRIPTION_BYTES,
    MAX_DETAIL_LENGTH,
    MAX_NAME_LENGTH,
)
from tests.store.support import (
    COMPLETE,
    INCOMPLETE,
    OPEN,
    POST,
    Client,
    describe,
    failing_with,
    loss_message,
    make_chunk,
    rejections,
)

INVALID = Reason.ERROR_REASON_INVALID_FIELD

BAD_DESCRIPTIONS = {
    "capture_id": {"capture_id": "../etc"},
    "hidden_size": {"hidden_size": 0},
    "num_layers": {"num_layers": 0},
    "num_sequences": {"num_sequences": 0},
    "dtype": {"dtype": tensor_pb2.DATA_TYPE_UNSPECIFIED},
    "too many layers": {"num_layers": 1 << 20},
    "a name that is a novel": {"model": "x" * (MAX_NAME_LENGTH + 1)},
}


@pytest.mark.parametrize("time", [{"seconds": 1 << 62}, {"nanos": -5}, {"seconds": -(1 << 62)}])
def test_a_time_that_no_reader_can_convert_is_refused(client: Client, time: dict[str, int]) -> None:
    description = describe()
    description.request_time.MergeFrom(timestamp_pb2.Timestamp(**time))
    with failing_with(INVALID) as caught:
        client.open(description)
    assert caught[0].metadata == {"field": "description.request_time"}


@pytest.mark.parametrize("name", BAD_DESCRIPTIONS)
def test_an_invalid_description_is_refused(client: Client, name: str) -> None:
    description = describe()
    for field, value in BAD_DESCRIPTIONS[name].items():
        setattr(description, field, value)
    with failing_with(INVALID) as caught:
        client.open(description)
    assert caught[0].metadata["field"].startswith("description.")


def bad_specs() -> dict[str, capture_pb2.CaptureSpec]:
    specs = {name: capture_pb2.CaptureSpec() for name in ("layer", "order", "all", "no site", "site twice", "range")}
    for spec in specs.values():
        spec.CopyFrom(describe().spec)
    specs["layer"].layers.list.layers.append(3)
    specs["order"].layers.list.layers[:] = [1, 0]
    specs["all"].layers.all = True
    del specs["no site"].sites[:]
    specs["site twice"].sites.append(capture_pb2.SITE_RESID_POST)
    specs["range"].positions.ranges.append(selection_pb2.PositionRange(first=3, last=2))
    return specs


@pytest.mark.parametrize("name", bad_specs())
def test_a_spec_without_its_defaults_is_refused(client: Client, name: str) -> None:
    description = describe()
    description.spec.CopyFrom(bad_specs()[name])
    with failing_with(INVALID) as caught:
        client.open(description)
    assert caught[0].metadata["field"].startswith("description.spec.")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"outcome": 0}, "outcome"),
        ({"outcome": OPEN}, "outcome"),
        ({"outcome": INCOMPLETE}, "incomplete_reason"),
        ({"outcome": COMPLETE, "incomplete_reason": 1}, "incomplete_reason"),
        ({"generated": [1, 1]}, "sequences"),
        ({"generated": []}, "sequences"),
        ({"incomplete_detail": "x" * (MAX_DETAIL_LENGTH + 1)}, "incomplete_detail"),
    ],
)
def test_an_invalid_seal_is_refused(client: Client, fields: dict[str, object], field: str) -> None:
    client.open()
    with failing_with(INVALID) as caught:
        client.seal(**fields)
    assert caught[0].metadata == {"field": field}
    assert client.get().state == OPEN


def test_captures_that_do_not_exist(client: Client) -> None:
    calls = [
        lambda: client.get("b"),
        lambda: client.get("b", wait=5),
        lambda: client.seal("b"),
        lambda: client.read("b"),
        lambda: client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="b")),
    ]
    for call in calls:
        with failing_with(Reason.ERROR_REASON_UNKNOWN_CAPTURE) as caught:
            call()
        assert caught[0].metadata == {"capture_id": "b"}


@pytest.mark.parametrize("token", ["x", "AAAA", "é", "A" * 32, "AAAAAAAAAAEAAAAAAAAAAA==", "A" * 5000])
def test_page_tokens_that_are_not_the_stores(client: Client, token: str) -> None:
    with failing_with(INVALID) as caught:
        client.stub.ListCaptures(store_pb2.ListCapturesRequest(page_token=token))
    assert caught[0].metadata == {"field": "page_token"}


@pytest.mark.parametrize("state", [0, 99])
def test_a_filter_by_a_state_that_does_not_exist(client: Client, state: int) -> None:
    with failing_with(INVALID) as caught:
        client.stub.ListCaptures(store_pb2.ListCapturesRequest(states=[COMPLETE, state]))
    assert caught[0].metadata == {"field": "states"}


@pytest.mark.parametrize(("seconds", "nanos"), [(-5, 0), (0, -1), (10**18, 0)])
def test_waits_of_any_length_are_accepted(client: Client, seconds: int, nanos: int) -> None:
    client.open(describe(prompt=0))
    client.seal(generated=[1], outcome=4)
    request = store_pb2.GetCaptureRequest(capture_id="a")
    request.wait.seconds, request.wait.nanos = seconds, nanos
    assert client.stub.GetCapture(request, timeout=5).manifest.state == 4


@pytest.mark.parametrize("sequences", [1, 8])
def test_a_capture_of_more_tokens_than_a_manifest_can_name(client: Client, sequences: int) -> None:
    each = MAX_CAPTURE_TOKENS // sequences
    client.open(describe(prompt=1000, sequences=sequences))
    with failing_with(INVALID) as caught:
        client.seal(generated=[each - 1000] * (sequences - 1) + [each - 999])
    assert caught[0].metadata == {"field": "sequences"}
    assert client.seal(generated=[each - 1000] * sequences).state == OPEN
    with failing_with(INVALID) as caught:
        client.open(describe("b", prompt=each + 1, sequences=sequences))
    assert caught[0].metadata == {"field": "description.prompt_token_ids"}


def test_a_description_that_is_too_large_is_refused(client: Client) -> None:
    description = describe()
    description.steering.operations.add(layer_digests=[b"d" * 32] * (MAX_DESCRIPTION_BYTES // 34))
    with failing_with(INVALID) as caught:
        client.open(description)
    assert caught[0].metadata["field"] == "description"


def test_a_seal_that_is_too_large_is_refused(client: Client) -> None:
    client.open()
    outcome = capture_pb2.SequenceOutcome(generated_token_ids=[1], finish_reason="x" * (2 << 20))
    with failing_with(INVALID):
        client.stub.SealCapture(
            store_pb2.SealCaptureRequest(capture_id="a", sequences=[outcome], outcome=COMPLETE), timeout=30
        )


def test_a_capture_of_too_many_rows_at_a_position_is_refused(client: Client) -> None:
    layers = range(MAX_CAPTURE_ROWS_AT_A_POSITION // 8 + 1)
    with failing_with(INVALID) as caught:
        client.open(describe(layers=layers, sequences=8))
    assert caught[0].metadata["field"] == "description.spec"
    client.open(describe(layers=layers[:-1], sequences=8))


def test_an_impossible_position_is_rejected(client: Client) -> None:
    client.open()
    answers = client.append([make_chunk([0], [0, MAX_CAPTURE_TOKENS]), make_chunk([0], [MAX_CAPTURE_TOKENS - 1])])
    assert rejections(answers) == {1: INVALID}


@pytest.mark.parametrize(
    "fields",
    [
        {"positions": [0, MAX_CAPTURE_TOKENS]},
        {"positions": [0] * (MAX_CAPTURE_TOKENS + 1)},
        {"layers": [0, 0]},
        {"sites": [POST, POST]},
        {"detail": "x" * (MAX_DETAIL_LENGTH + 1)},
    ],
    ids=["position", "positions", "layers", "sites", "detail"],
)
def test_a_loss_that_is_too_large_is_rejected(client: Client, fields: dict[str, object]) -> None:
    client.open()
    good = {"sites": [POST], "layers": [0], "positions": [0], "reason": capture_pb2.INCOMPLETE_REASON_OVERFLOW}
    answers = client.send([loss_message(1, "a", store_pb2.RowLoss(**{**good, **fields}))])
    assert rejections(answers) == {1: INVALID}
