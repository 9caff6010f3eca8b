"""Deleting captures: one, a list, and those that a filter selects."""

from __future__ import annotations

import json
import uuid

import grpc
import pytest

import residuum
from tests.client.support.flaky_store import Unknown


@pytest.fixture
def names(endpoint):
    """Five captures; the last three have the label y = 1."""
    prefix = f"del-{uuid.uuid4().hex[:8]}-"
    with residuum.Client(endpoint) as client:
        for number in range(5):
            client.generate(
                "a bb", max_tokens=2, request_id=f"{prefix}{number}",
                capture=residuum.Capture(layers=[1], labels={"y": int(number > 1)}),
            )  # fmt: skip
            client.manifest(f"{prefix}{number}", wait=True)
    return [f"{prefix}{number}" for number in range(5)]


async def left(client, names):
    return sorted(item.capture_id for item in await client.captures(prefix=names[0][:-1]))


async def test_a_list_and_a_filter_delete_many(client, names):
    one = await client.delete(names[0])
    assert one > 0
    assert await client.delete(names[1:3]) == 2 * one
    assert await left(client, names) == names[3:]
    assert await client.delete(prefix=names[0][:-1], where="y = 1", states="complete") == 2 * one
    assert await left(client, names) == []
    assert await client.delete(prefix=names[0][:-1]) == 0
    assert await client.delete([]) == 0


async def test_a_list_is_deleted_although_some_are_gone(client, names):
    with pytest.raises(residuum.UnknownCapture, match="2 of 7 captures are in no store: gone-1, gone-2") as caught:
        await client.delete(["gone-1", *names, "gone-2"])
    assert str(caught.value).endswith("(residuum ls). 5 of the 7 captures were deleted.")
    assert await left(client, names) == []
    with pytest.raises(residuum.UnknownCapture, match=r"None of the 2 captures was deleted\.$"):
        await client.delete(["gone-1", "gone-2"])
    with pytest.raises(residuum.UnknownCapture, match=r"\(residuum ls\)\.$"):
        await client.delete("gone-1")


async def test_a_list_and_a_filter_take_one_call(make, flaky, names):
    client = make(store=flaky.endpoint)
    assert await client.delete(names[:3]) > 0
    assert await client.delete(prefix=names[0][:-1]) > 0
    assert await left(client, names) == []
    assert [name for name in flaky.calls if name.startswith("Delete")] == ["DeleteCaptures"] * 2


async def test_more_captures_than_one_call_may_name_take_several(make, flaky, monkeypatch, names):
    for kind in ("_sync", "_async"):
        monkeypatch.setattr(f"residuum.{kind}.deleting.MAX_CAPTURES_PER_DELETION", 2)
    with pytest.raises(residuum.UnknownCapture, match="2 of 7 captures are in no store: gone-1, gone-2"):
        await make(store=flaky.endpoint).delete([*names, "gone-1", "gone-2"])
    assert flaky.calls == ["DeleteCaptures"] * 4
    assert await left(make(store=flaky.endpoint), names) == []


async def test_a_capture_that_is_named_twice_is_deleted_once(client, names):
    one = await client.delete(names[0])
    assert await client.delete([names[1], names[2], names[1]]) == 2 * one
    assert await left(client, names) == names[3:]


async def test_an_older_store_deletes_one_by_one(make, flaky, names):
    flaky.missing = {"DeleteCaptures"}
    client = make(store=flaky.endpoint)
    one = await client.delete(names[0])
    flaky.calls.clear()
    assert await client.delete(names[1:3]) == 2 * one
    with pytest.raises(residuum.UnknownCapture, match="2 of 3 captures are in no store: gone-1, gone-2"):
        await client.delete(["gone-1", names[3], "gone-2"])
    assert flaky.calls == ["DeleteCapture"] * 5
    assert await client.delete(prefix=names[0][:-1]) == one
    assert await left(client, names) == []


async def test_a_capture_that_goes_while_a_filter_deletes_is_no_error(make, flaky, store, names):
    def delete_one(call):
        if call == "DeleteCaptures":
            with residuum.Client(store=store.endpoint) as other:
                other.delete(names[2])

    flaky.before = delete_one
    assert await make(store=flaky.endpoint).delete(prefix=names[0][:-1]) > 0
    assert await left(make(store=store.endpoint), names) == []


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.UNAVAILABLE, residuum.Unreachable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, residuum.DeadlineExceeded),
        (grpc.StatusCode.PERMISSION_DENIED, residuum.PermissionDenied),
    ],
)
async def test_a_deletion_that_breaks_off_is_not_tried_again(make, flaky, names, code, error):
    """The store may have deleted the captures. A second call would say that they do not exist."""

    def fail(call):
        if call == "DeleteCaptures":
            raise Unknown(code)

    flaky.after = fail
    client = make(store=flaky.endpoint)
    with pytest.raises(error):
        await client.delete(names[:2])
    assert flaky.calls == ["DeleteCaptures"]
    assert await left(client, names) == names[2:]


async def test_no_captures_need_no_store(make):
    assert await make(store="127.0.0.1:1").delete([]) == 0


@pytest.mark.parametrize("arguments", [{}, {"prefix": ""}, {"request_id": ["a"], "prefix": "a"}, {"where": ""}])
async def test_a_deletion_needs_captures_or_a_filter(client, names, arguments):
    with pytest.raises(residuum.InvalidRequest, match="Give either a capture or a list of captures"):
        await client.delete(**arguments)
    assert await left(client, names) == names


async def test_a_wrong_value_is_short_in_the_message(client):
    with pytest.raises(TypeError, match="A request must be an ID") as caught:
        await client.manifest([f"capture-{number}" for number in range(1700)])
    assert len(str(caught.value)) < 200


def test_rm_of_a_prefix_prints_a_summary(cli, names):
    code, out, _ = cli("rm", "--prefix", names[0][:-1], "--where", "y = 0", "--yes", "--json")
    assert code == 0
    assert sorted(json.loads(line)["capture_id"] for line in out.splitlines()) == names[:2]
    code, out, _ = cli("rm", "--prefix", names[0][:-1], "--yes")
    assert code == 0
    assert out.startswith("deleted 3 captures, ")
    assert out.endswith(" freed\n")


def test_rm_of_many_takes_one_call_and_tells_each(cli, flaky, names):
    code, out, err = cli("rm", names[0], "bad id", "gone", names[1], names[0], "--store", flaky.endpoint)
    assert code == 1
    assert [line.partition(":")[0] for line in out.splitlines()] == names[:2]
    assert "'bad id'" in err
    assert "holds no capture 'gone'" in err
    assert flaky.calls == ["DeleteCaptures"]


def test_rm_deletes_in_an_older_store(cli, flaky, names):
    flaky.missing = {"DeleteCaptures"}
    code, out, _ = cli("rm", "--prefix", names[0][:-1], "--yes", "--store", flaky.endpoint)
    assert (code, out.startswith("deleted 5 captures, ")) == (0, True)


def test_rm_reports_the_failure_of_a_store_once(cli, flaky, names):
    def fail(call):
        if call == "DeleteCaptures":
            raise Unknown(grpc.StatusCode.UNAVAILABLE)

    flaky.before = fail
    code, out, err = cli("rm", *names, "--store", flaky.endpoint)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert flaky.words in err
