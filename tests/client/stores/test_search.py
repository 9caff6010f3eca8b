"""client.search: both clients and the command line, over one store and several."""

from __future__ import annotations

import json
import uuid

import grpc
import numpy as np
import pytest

import residuum
from residuum.directions.values import Origin
from residuum.protocol.captures.searching import SearchAnswer, merged
from residuum.v1 import store_pb2
from tests.client.support.flaky_store import Unknown
from tests.client.support.peer import HIDDEN


@pytest.fixture
def made(endpoint):
    """The prefix of four captures."""
    prefix = f"s{uuid.uuid4().hex}-"
    with residuum.Client(endpoint) as client:
        for number in range(4):
            client.generate(
                "a bb ccc " * (number + 1), max_tokens=3, request_id=f"{prefix}{number}",
                capture=residuum.Capture(layers=[1, 2], labels={"odd": bool(number % 2)}),
            )  # fmt: skip
            client.manifest(f"{prefix}{number}", wait=True)
    return prefix


def expected(endpoint, prefix, vector, layer, measure="projection", sign=1):
    with residuum.Client(endpoint) as client:
        found = []
        for capture in client.captures(prefix=prefix):
            acts = client.activations(capture)
            rows = acts[layer].astype(np.float64)
            scores = rows @ vector.astype(np.float64)
            if measure == "cosine":
                scores = scores / np.linalg.norm(rows, axis=1) / np.linalg.norm(vector.astype(np.float64))
            found += [
                (-sign * score, capture.capture_id, int(at)) for score, at in zip(scores, acts.positions, strict=True)
            ]
    return sorted(found)


@pytest.fixture
def vector():
    return np.random.default_rng(0).standard_normal(HIDDEN).astype(np.float32)


@pytest.mark.parametrize("measure", ["projection", "cosine"])
@pytest.mark.parametrize(("order", "sign"), [("most", 1), ("least", -1)])
async def test_a_search_equals_numpy_over_activations(client, endpoint, made, vector, measure, order, sign):
    wanted = expected(endpoint, made, vector, 2, measure, sign)
    for k in (1, 5, 1000):
        found = await client.search(vector, layer=2, k=k, measure=measure, order=order, prefix=made)
        np.testing.assert_allclose([-sign * hit.score for hit in found], [item[0] for item in wanted[:k]], rtol=1e-9)
        assert [(hit.capture_id, hit.position) for hit in found] == [item[1:] for item in wanted[:k]]
        assert found.rows_scanned == len(wanted)
        assert found.num_captures == 4
        assert not found.left_out


async def test_vectors_of_every_kind(client, made, vector):
    by_array = await client.search(vector, layer=1, prefix=made)
    assert by_array == await client.search(residuum.Vector(vector), layer=1, prefix=made)
    assert by_array == await client.search(residuum.Directions({1: vector}), layer=1, prefix=made)
    assert by_array == await client.search(vector.tolist(), layer=1, prefix=made)
    with pytest.raises(residuum.InvalidRequest, match="no direction for layer 2"):
        await client.search(residuum.Directions({1: vector}), layer=2, prefix=made)


async def test_directions_are_searched_for_at_their_own_site(client, vector):
    name = f"s{uuid.uuid4().hex}"
    sites = ["z", "attn_out", "resid_post"]
    reply = await client.generate(
        "a bb", max_tokens=3, request_id=name, capture=residuum.Capture(layers=[1], sites=sites)
    )
    await client.manifest(reply, wait=True)

    def made(site):
        return residuum.Directions({1: vector}, origin=Origin(site=site))

    async def scores(vector, **where):
        return [hit.score for hit in await client.search(vector, layer=1, captures=[name], **where)]

    by_site = {site: await scores(vector, site=site) for site in sites}
    assert by_site["z"] != by_site["resid_post"] != by_site["attn_out"]
    for site in sites:
        assert await scores(made(site)) == await scores(made(site), site=site) == by_site[site]
    assert await scores(made("resid_post"), site="attn_out") == by_site["attn_out"]
    for own, other in (("z", "resid_post"), ("resid_post", "z"), ("z", "mlp_act")):
        with pytest.raises(residuum.InvalidRequest, match=f"for the site {own}. Rows of {other} are of another kind"):
            await scores(made(own), site=other)


async def test_filters_and_limits(client, made, vector):
    found = await client.search(vector, layer=1, prefix=made, where="odd = true", per_capture=2)
    assert sorted(hit.capture_id for hit in found) == [f"{made}1"] * 2 + [f"{made}3"] * 2
    found = await client.search(vector, layer=1, captures=[f"{made}0"], positions="last_prompt")
    assert len(found) == 1
    assert found[0] == found.hits[0]
    assert found[:1] == found.hits


async def test_tokens_are_shown(client, made, vector):
    acts = await client.activations(f"{made}2")
    found = await client.search(vector, layer=1, k=3, captures=[f"{made}2"])
    for hit in found:
        assert hit.token_id == acts.token_ids[hit.position]
        assert f"{hit.score:.4g}" in str(found)
        assert str(hit).endswith(f"token {hit.token_id}")
    assert str(found).splitlines()[-1] == f"3 of {found.rows_scanned} rows of 1 captures"


def test_the_text_of_a_hit_is_one_line():
    hit = residuum.SearchHit("a", 0, 1, 2.5, 7, "\n", before="x" * 100, after=" y\tz")
    assert hit.text == "x" * 40 + "«⏎» y⇥z"


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"k": 0}, residuum.InvalidRequest, "k must be from 1 to 10000"),
        ({"context": 65}, residuum.InvalidRequest, "context must be from 0 to 64"),
        ({"per_capture": 0}, residuum.InvalidRequest, "per_capture"),
        ({"layer": -1}, residuum.InvalidRequest, "layer must be from 0"),
        ({"layer": "all"}, residuum.InvalidRequest, "layer= takes the number of one layer"),
        ({"layer": [1, 4]}, residuum.InvalidRequest, "layer= takes the number of one layer"),
        ({"site": ["resid_post"]}, residuum.InvalidRequest, "site= takes the name of one site"),
        ({"measure": "angle"}, residuum.InvalidRequest, "measure must be one of projection, cosine"),
        ({"order": "first"}, residuum.InvalidRequest, "order must be one of most, least, absolute"),
        ({"site": "nowhere"}, residuum.UnknownSite, "nowhere"),
        ({"where": "y ~ 1"}, residuum.InvalidRequest, "where"),
        ({"captures": []}, residuum.InvalidRequest, "number of captures"),
        ({"captures": "a"}, residuum.InvalidRequest, "list of IDs"),
        ({"vector": np.zeros(HIDDEN)}, residuum.BadVector, "zero"),
        ({"vector": [1.0, np.nan]}, residuum.BadVector, "finite"),
        ({"prefix": "no such"}, residuum.InvalidRequest, "none matches the filter"),
        ({"captures": ["no-such"], "prefix": ""}, residuum.UnknownCapture, "no-such"),
        ({"layer": 29}, residuum.InvalidRequest, "4 without the layer and site"),
        ({"vector": np.ones(HIDDEN + 1)}, residuum.InvalidRequest, "4 with rows of another width"),
    ],
)
async def test_bad_input(client, made, vector, arguments, error, match):
    arguments = {"vector": vector, "layer": 1, "prefix": "" if "captures" in arguments else made, **arguments}
    with pytest.raises(error, match=match):
        await client.search(arguments.pop("vector"), **arguments)


def test_answers_of_several_stores_are_merged():
    request = store_pb2.SearchRequest(max_hits=3, vector=bytes(8), capture_ids=["a", "b", "c", "d"])
    answers = [SearchAnswer(), SearchAnswer()]
    hits = [[("a", 5.0), ("c", 2.0)], [("b", 5.0), ("d", 3.0)]]
    for answer, own, unknown in zip(answers, hits, ("bd", "ac"), strict=True):
        progress = store_pb2.SearchProgress(num_captures=2, captures_done=2, rows_scanned=10, bytes_scanned=100)
        assert answer.take(store_pb2.SearchResponse(progress=progress)) == 100
        answer.take(
            store_pb2.SearchResponse(
                progress=progress, is_last=True, unknown_capture_ids=unknown,
                hits=[store_pb2.SearchHit(capture_id=name, score=score) for name, score in own],
            )
        )  # fmt: skip
    result = merged(request, answers)
    assert [hit.capture_id for hit in result] == ["a", "b", "d"]
    assert (result.num_captures, result.rows_scanned, result.bytes_scanned) == (4, 20, 200)
    request.order = store_pb2.SEARCH_ORDER_LEAST
    assert [hit.capture_id for hit in merged(request, answers)] == ["c", "d", "a"]
    answers[1].unknown.add("b")
    with pytest.raises(residuum.UnknownCapture, match="'b'"):
        merged(request, answers)


def test_several_real_stores(two_stores, endpoint, made, vector):
    one, other = two_stores
    with residuum.Client(store=[one, other]) as client, residuum.Client(store=one) as alone:
        found, wanted = client.search(vector, layer=1, prefix=made), alone.search(vector, layer=1, prefix=made)
        assert found == wanted


@pytest.fixture
def two_stores(store, tmp_path):
    from tests.client.support.running_store import RunningStore

    other = RunningStore(tmp_path / "other")
    yield store.endpoint, other.endpoint
    other.stop()


def test_a_search_begins_again_if_the_connection_breaks(flaky, made, vector):
    def broken(number, messages):
        yield from messages[:-1] if number < 3 else messages
        if number < 3:
            raise Unknown(grpc.StatusCode.UNAVAILABLE)

    with residuum.Client(store=flaky.endpoint) as client:
        wanted = client.search(vector, layer=1, prefix=made)
        flaky.reads, flaky.change = 0, broken
        assert client.search(vector, layer=1, prefix=made) == wanted
        assert flaky.reads == 4


def test_a_store_that_is_too_old_is_named(flaky, vector):
    def unimplemented(number, messages):
        raise Unknown(grpc.StatusCode.UNIMPLEMENTED)
        yield

    flaky.change = unimplemented
    with (
        residuum.Client(store=flaky.endpoint) as client,
        pytest.raises(residuum.ServerFault, match="too old to search"),
    ):
        client.search(vector, layer=1)


def test_the_command_line(cli, endpoint, made, vector, tmp_path):
    np.save(tmp_path / "v.npy", vector)
    residuum.Directions({1: vector}).save(tmp_path / "d.safetensors")
    wanted = expected(endpoint, made, vector, 1)
    for file in ("v.npy", "d.safetensors"):
        code, out, err = cli("search", tmp_path / file, "--layer", 1, "-k", 4, "--prefix", made, "--json")
        hits = [json.loads(line) for line in out.splitlines()]
        assert (code, err) == (0, "")
        assert [(hit["capture_id"], hit["position"]) for hit in hits] == [item[1:] for item in wanted[:4]]
    _, out, err = cli("search", tmp_path / "v.npy", "--layer", 1, "--least", "--prefix", made, "--where", "odd = true")
    worst = [item for item in expected(endpoint, made, vector, 1, sign=-1) if item[1][-1] in "13"]
    assert out.splitlines()[0].split("\t")[1] == worst[0][1]
    assert "rows of 2 captures" in err
    code, _, err = cli("search", tmp_path / "d.safetensors", "--layer", 2)
    assert code == 1
    assert "no direction for layer 2" in err
    residuum.Directions({1: vector}, origin=Origin(site="z")).save(tmp_path / "z.safetensors")
    code, _, err = cli("search", tmp_path / "z.safetensors", "--layer", 1, "--prefix", made)
    assert code == 1
    assert "4 without the layer and site" in err
    code, _, err = cli("search", tmp_path / "z.safetensors", "--layer", 1, "--site", "resid_post")
    assert code == 1
    assert "for the site z" in err
    code, _, err = cli("search", tmp_path / "v.npy", "--layer", 1, "--prefix", "no such")
    assert (code, err.count("\n")) == (1, 1)
