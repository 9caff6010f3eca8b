"""Descriptions, seals and page tokens that make no sense."""

from __future__ import annotations

import pytest

from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, selection_pb2, store_pb2, tensor_pb2
from residuum.wire.limits import MAX_CAPTURE_TOKENS
from tests.store.support import COMPLETE, INCOMPLETE, OPEN, Client, describe, failing_with

INVALID = Reason.ERROR_REASON_INVALID_FIELD

BAD_DESCRIPTIONS = {
    "capture_id": {"capture_id": "../etc"},
    "hidden_size": {"hidden_size": 0},
    "num_layers": {"num_layers": 0},
    "num_sequences": {"num_sequences": 0},
    "dtype": {"dtype": tensor_pb2.DATA_TYPE_UNSPECIFIED},
    "too many layers": {"num_layers": 1 << 20},
}


@pytest.mark.parametrize("name", BAD_DESCRIPTIONS)
def test_a_description_that_makes_no_sense(client: Client, name: str) -> None:
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
def test_a_spec_that_is_not_filled_in(client: Client, name: str) -> None:
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
    ],
)
def test_a_seal_that_makes_no_sense(client: Client, fields: dict[str, object], field: str) -> None:
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


@pytest.mark.parametrize(("seconds", "nanos"), [(-5, 0), (0, -1), (10**18, 0)])
def test_waits_of_any_length_are_understood(client: Client, seconds: int, nanos: int) -> None:
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
