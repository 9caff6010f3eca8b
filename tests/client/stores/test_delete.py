"""Deleting captures: one, a list, and those that a filter selects."""

from __future__ import annotations

import json
import uuid

import pytest

import residuum


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
    with pytest.raises(residuum.UnknownCapture, match="2 of 7 captures are in no store: gone-1, gone-2"):
        await client.delete(["gone-1", *names, "gone-2"])
    assert await left(client, names) == []


async def test_more_captures_are_deleted_than_run_at_a_time(client, monkeypatch, names):
    monkeypatch.setattr("residuum._sync.captures.DELETIONS_AT_ONCE", 2)
    monkeypatch.setattr("residuum._async.captures.DELETIONS_AT_ONCE", 2)
    assert await client.delete(names) > 0
    assert await left(client, names) == []


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
