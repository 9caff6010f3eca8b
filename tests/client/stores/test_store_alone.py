"""Clients of a store without an inference service."""

from __future__ import annotations

import json

import pytest

import residuum


async def test_a_client_of_a_store_reads_lists_and_deletes(make, store, captured):
    client = make(store=store.endpoint)
    assert (await client.activations(captured)).manifest.is_complete
    assert [item.capture_id for item in await client.captures(prefix=captured)] == [captured]
    health = await client.health()
    assert (health.inference, health.ok) == ("", True)
    assert await client.delete(captured) > 0


async def test_a_client_of_a_store_cannot_generate(make, store):
    client = make(store=store.endpoint)
    with pytest.raises(residuum.InvalidRequest, match="created with store= alone"):
        await client.generate("a")
    with pytest.raises(residuum.InvalidRequest, match="created with store= alone"):
        await client.info()


def test_a_client_needs_an_endpoint_or_a_store(kind):
    with pytest.raises(residuum.InvalidRequest, match="is not an endpoint"):
        kind()


def test_an_archive_in_place_of_a_store_is_named(kind):
    with pytest.raises(
        residuum.InvalidRequest, match=r"is the URL of an archive, .* residuum\.Archive, .* ls, pull and"
    ):
        kind(store="s3://bucket/prefix")


async def test_a_store_in_place_of_an_inference_service_is_named(make, store):
    client = make(store.endpoint)
    for call in (client.info, lambda: client.generate("a"), client.captures):
        with pytest.raises(residuum.InvalidRequest, match="This is a store, not an inference service"):
            await call()


def test_the_command_line_names_a_store_in_place_of_an_inference_service(cli, store):
    code, _, err = cli("info", at=store.endpoint)
    assert code == 1
    assert f"This is a store, not an inference service: {store.endpoint}." in err
    assert f"name it: --store {store.endpoint}." in err


def test_doctor_checks_a_named_store_without_an_inference_service(cli, store):
    code, out, _ = cli("doctor", "--json", "--store", store.endpoint, at="127.0.0.1:1")
    found = {line["check"]: line["ok"] for line in map(json.loads, out.splitlines())}
    assert code == 1
    assert found["inference service: connection"] is False
    assert found["store: connection"] is True
    assert found[f"store {store.endpoint}: health"] is True
    assert found["store answers"] is True
