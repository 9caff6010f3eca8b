"""Patch sweeps: what is sent, what comes back, and the command line. tests/conformance compares scores."""

from __future__ import annotations

import collections
import json
from xml.etree import ElementTree

import numpy as np
import pytest

import residuum
from residuum.v1 import capture_pb2
from tests.client.support.peer import LAYERS


def requests_of(peer):
    """The requests for generations: of the two prompts, then those that are scored."""
    generations = [request for name, request in zip(peer.calls, peer.requests, strict=True) if name == "Generate"]
    return generations[:2], generations[2:]


def sweep_of(**changes):
    fields = {
        "site": "resid_post",
        "layers": (2, 5),
        "positions": (0, 3, 4),
        "clean_tokens": ("The", " <i>", " is"),
        "corrupted_tokens": ("The", " <b>", " is"),
        "answer": 7,
        "other": 9,
        "clean": 3.0,
        "corrupted": -1.0,
        "scores": np.array([[-1.0, 3.0, 1.0], [0.0, -3.0, 5.0]]),
    }
    return residuum.PatchSweep(**{**fields, **changes})


@pytest.mark.parametrize("tokens", [{"answer": " Paris"}, {"answer": 5, "other": [6]}, {"answer": True}])
async def test_an_answer_that_is_no_token_id_is_named(client, tokens):
    with pytest.raises(TypeError, match=r"patch_sweep: (answer|other)= takes a token ID, not "):
        await client.patch_sweep("a bb ccc", "xxxx yyyyy z", progress=False, **tokens)


async def test_every_row_is_set_in_a_request_of_its_own(client, peer):
    sweep = await client.patch_sweep("a bb ccc", "xxxx yyyyy z", layers=[1, 3], answer=5, other=6, progress=False)
    assert (sweep.site, sweep.layers, sweep.positions) == ("resid_post", (1, 3), (0, 1, 2))
    (clean, corrupted), scored = requests_of(peer)
    assert list(clean.spec.capture.layers.list.layers) == [1, 3]
    assert list(corrupted.spec.capture.layers.list.layers) == [1]
    first, second = sweep_prompts(scored)
    assert len(scored) == 2 * (2 + 2 * 3)
    for token in (5, 6):
        mine = [request for request in scored if list(request.token_ids.ids)[-1] == token]
        cells = [
            (request.spec.steering.operations[0].layers.list.layers[0], request.spec.steering.operations[0].positions)
            for request in mine
            if request.spec.steering.operations
        ]
        assert sorted((layer, positions.ranges[0].first) for layer, positions in cells) == [
            (layer, position) for layer in (1, 3) for position in range(3)
        ]
        plain = [list(request.token_ids.ids)[:-1] for request in mine if not request.spec.steering.operations]
        assert sorted(plain) == sorted([first, second])
    assert all(request.sampling.max_tokens == 0 for request in scored)
    assert peer.calls.count("PutVectors") == 1, "all rows are sent in one call"
    assert peer.vectors_received == 6


async def test_what_a_sweep_sends(client, peer):
    """Each row goes up once, by its digest, in one stream. The requests of the grid only name it."""
    rows = 5 * 4
    await client.patch_sweep(
        "a bb ccc d", "xxxx yyyyy z q", layers=range(5), answer=5, other=6, progress=False, max_concurrency=64
    )
    calls = collections.Counter(peer.calls)
    assert calls["Generate"] == 2 + 2 * (2 + rows), "both prompts, then two answers of each prompt and of each row"
    assert (calls["FindMissingVectors"], calls["PutVectors"], peer.vectors_received) == (1, 1, rows)
    assert calls.keys() == {"Generate", "FindMissingVectors", "PutVectors", "GetModelInfo"}
    assert calls["GetModelInfo"] <= 3
    _, scored = requests_of(peer)
    bare = [request.ByteSize() for request in scored if not request.spec.steering.operations]
    patched = [request.ByteSize() for request in scored if request.spec.steering.operations]
    assert len(patched) == 2 * rows
    assert max(patched) <= max(bare) + 64, "a digest of 32 bytes, the layer and the position; no row"
    assert (
        len(
            {
                request.spec.steering.operations[0].layer_digests[0]
                for request in scored
                if request.spec.steering.operations
            }
        )
        == rows
    )


def sweep_prompts(scored):
    """The clean and the corrupted prompt: the steered requests have the latter."""
    steered = next(list(request.token_ids.ids)[:-1] for request in scored if request.spec.steering.operations)
    prompts = [list(request.token_ids.ids)[:-1] for request in scored]
    return next(prompt for prompt in prompts if prompt != steered), steered


async def test_both_captures_are_deleted(client, peer):
    before = {entry.capture_id for entry in await client.captures()}
    await client.patch_sweep("a bb", "x yy", layers=[1], answer=5, other=6, progress=False)
    with pytest.raises(residuum.InvalidRequest, match="the clean prompt has 2 tokens and the corrupted one 3"):
        await client.patch_sweep("a bb", "x yy zzz", progress=False)
    assert {entry.capture_id for entry in await client.captures()} == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"answer": 4, "other": 4}, "answer and other are the same token .4."),
        ({"metric": "kl"}, "metric= takes"),
        ({"metric": "logprob", "other": 4}, "scores answer= alone"),
    ],
)
async def test_sweeps_without_a_score_are_refused(client, arguments, told):
    with pytest.raises(residuum.InvalidRequest, match=told):
        await client.patch_sweep("a bb", "x yy", layers=[1], progress=False, **arguments)


async def test_one_token_alone_can_be_scored(client, peer):
    sweep = await client.patch_sweep(
        "a bb", "x yy", layers=[1], positions=[1], metric="logprob", answer=16, progress=False
    )
    _, scored = requests_of(peer)
    assert len(scored) == 3
    assert (sweep.other, sweep.clean, sweep.corrupted, sweep.scores.tolist()) == (None, -2.0, -2.0, [[-2.0]])
    assert np.isnan(sweep.recovered).all(), "both prompts have the same score"


async def test_rows_of_another_site_are_set_there(client, peer):
    await client.patch_sweep("a bb", "x yy", layers=[1], site="mlp_out", answer=5, other=6, progress=False)
    (clean, _), scored = requests_of(peer)
    assert list(clean.spec.capture.sites) == [capture_pb2.SITE_MLP_OUT]
    sites = {item.site for request in scored for item in request.spec.steering.operations}
    assert sites == {capture_pb2.SITE_MLP_OUT}


def test_the_share_that_a_row_brings_back():
    assert sweep_of().recovered.tolist() == [[0.0, 1.0, 0.5], [0.25, -0.5, 1.5]]
    assert sweep_of(scores=np.zeros((2, 3)), clean=1.0, corrupted=1.0).recovered.shape == (2, 3)


def test_the_picture_is_valid_svg():
    sweep = sweep_of(scores=np.array([[-1.0, 3.0, 1.0], [0.0, -3.0, np.nan]]))
    picture = ElementTree.fromstring(sweep.svg())
    assert sweep._repr_svg_() == sweep.svg()
    name = "{http://www.w3.org/2000/svg}"
    cells = picture.findall(f"{name}rect")[1:]
    assert len(cells) == 6
    assert cells[1].get("fill") == "rgb(178, 24, 43)", "a share of 1"
    assert {cells[0].get("fill"), cells[4].get("fill"), cells[5].get("fill")} == {"rgb(255, 255, 255)"}
    texts = [text.text for text in picture.findall(f"{name}text")]
    assert texts[1:] == ["layer 2", "layer 5", "The", "<b>", "← <i>", "is"]


def test_the_command_prints_a_table_and_writes_the_picture(cli, peer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("patch", "a bb", "x yy", "--layers", "0-1", "--answer", 5, "--other", 6, "--svg", "out.svg")
    code, out, _ = cli(*arguments)
    assert code == 0
    assert [line.split("\t")[0] for line in out.splitlines()] == ["0", "1"]
    assert (tmp_path / "out.svg").read_text().startswith("<svg")
    code, out, _ = cli(*arguments, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["layers"], found["answer"], np.shape(found["recovered"])) == ([0, 1], 5, (2, 2))
    same = json.loads(cli("patch", "a bb", "a bb", *arguments[3:], "--json")[1], parse_constant=pytest.fail)
    assert same["recovered"] == [[None, None], [None, None]]  # both prompts have one score, and JSON has no NaN
    code, _, err = cli("patch", "a bb", "x", "--layers", LAYERS)
    assert (code, "layer" in err) == (1, True)
