"""The logit lens: what is sent, what comes back, and the command line. tests/conformance compares the tokens."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest

import residuum
from residuum.protocol.generation import lens as protocol
from tests.client.support.peer import HIDDEN, LAYERS


def sent(peer):
    """The rows and tokens of each call, [rows, hidden]."""
    calls = [request for name, request in zip(peer.calls, peer.requests, strict=True) if name == "Unembed"]
    return [(np.frombuffer(call.rows, "<f4").reshape(-1, HIDDEN), list(call.token_ids)) for call in calls]


async def test_all_rows_of_the_stream_are_sent_with_the_tokens_that_came(client, peer):
    capture = residuum.Capture(layers=[0, 2], sites=["resid_pre", "resid_post"])
    reply = await client.generate("a bb ccc", capture=capture, max_tokens=3)
    lens = await client.logit_lens(reply, top_k=3)
    acts = (await client.activations(reply)).select(site="resid_post")
    tokens = [*reply.prompt_token_ids, *reply.token_ids]
    ((rows, asked),) = sent(peer)
    np.testing.assert_array_equal(rows.reshape(2, -1, HIDDEN), acts.stack())
    assert asked == tokens[1:] * 2
    assert (lens.site, lens.layers, lens.positions) == ("resid_post", (0, 2), tuple(range(5)))
    assert lens.next_tokens.tolist() == tokens[1:]
    assert lens.tokens == tuple(map(str, tokens[:-1])), "this server tells no texts"
    first = acts.stack()[..., 0].astype(int)
    np.testing.assert_array_equal(lens.predicted.top_ids, first[..., None] + [1, 2, 3])
    np.testing.assert_array_equal(lens.ranks, np.abs(np.array(tokens[1:]) - first))
    assert lens.top_texts == [[f"<{token}>" for token in row] for row in (first + 1).tolist()]


async def test_a_token_that_never_came_has_no_rank(client, peer):
    reply = await client.generate("a bb", capture=residuum.Capture(layers=[0]), max_tokens=0)
    lens = await client.logit_lens(await client.activations(reply))
    assert lens.next_tokens[-1] == -1
    assert (lens.ranks[0, -1], np.isnan(lens.predicted.tokens).tolist()) == (0, [[False, True]])


async def test_rows_can_be_transformed(client, peer):
    reply = await client.generate("a bb", capture=residuum.Capture(layers=[1, 2]), max_tokens=1)
    await client.logit_lens(reply, transform=lambda layer, rows: rows * 0 + layer)
    ((rows, _),) = sent(peer)
    assert rows.reshape(2, -1, HIDDEN).tolist() == [[[layer] * HIDDEN] * 2 for layer in (1, 2)]
    with pytest.raises(residuum.InvalidRequest, match="as many rows as it gets"):
        await client.logit_lens(reply, transform=lambda layer, rows: rows[:1])


async def test_rows_of_another_width_are_refused(client):
    capture = residuum.Capture(layers=[0], encoding="rp8", dimensions=2)
    reply = await client.generate("a bb", capture=capture, max_tokens=1)
    with pytest.raises(residuum.InvalidRequest, match=r"resid_post have 2 elements .encoding rp8., .* keeps whole"):
        await client.logit_lens(reply)


async def test_rows_beside_the_stream_are_refused_even_if_they_are_as_wide(client):
    capture = residuum.Capture(layers=[0], sites=["mlp_out", "z"])
    acts = await client.activations(await client.generate("a bb", capture=capture, max_tokens=1))
    assert acts.select(site="z").width == acts.hidden_size
    assert (await client.logit_lens(acts.select(site="mlp_out"))).site == "mlp_out"
    with pytest.raises(residuum.InvalidRequest, match="rows at z are not of the residual stream"):
        await client.logit_lens(acts.select(site="z"))


async def test_rows_of_any_shape_are_unembedded(client, peer):
    rows = np.arange(2 * 3 * HIDDEN, dtype=np.float64).reshape(2, 3, HIDDEN)
    found = await client.unembed(rows, top_k=2, tokens=[[1, -1, 3], [-1, 5, 6]])
    assert (found.top_ids.shape, found.top.shape, found.tokens.shape) == ((2, 3, 2), (2, 3, 2), (2, 3))
    assert np.isnan(found.tokens).tolist() == [[False, True, False], [True, False, False]]
    assert (found.ranks == 0).tolist() == np.isnan(found.tokens).tolist()
    assert found.text(found.top_ids[0, 0, 0]) == "<1>"
    assert found.text(99_999) == "99999"
    one = await client.unembed(rows[0, 0])
    assert (one.top_ids.shape, one.tokens.shape) == ((10,), ())
    assert sent(peer)[1][1] == [], "without tokens none are sent"


async def test_many_rows_are_sent_in_several_calls(client, peer, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_UNEMBEDDED", 12)
    rows = np.repeat(np.arange(10, dtype=np.float32)[:, None], HIDDEN, axis=1)
    found = await client.unembed(rows, top_k=2, tokens=np.arange(10))
    assert [len(part) for part, _ in sent(peer)] == [4, 4, 2]
    assert found.top_ids[:, 0].tolist() == list(range(1, 11))
    assert found.ranks.tolist() == [0] * 10
    plan = protocol.UnembedPlan(np.zeros((3000, 1 << 10)), 0, None)
    assert max(request.ByteSize() for request in plan.requests()) <= 4 << 20


@pytest.mark.parametrize(
    ("rows", "options", "told"),
    [
        (3.0, {}, "not empty"),
        (np.zeros((0, HIDDEN)), {}, "not empty"),
        (
            np.zeros((2, HIDDEN)),
            {"tokens": [1]},
            r"tokens= has the shape \(1,\); .* each row \(2,\)",
        ),
        (np.zeros(HIDDEN), {"top_k": -1}, "top_k must be from 0"),
        (np.zeros(HIDDEN), {"tokens": 1.5}, "tokens= takes whole numbers"),
        (np.zeros(HIDDEN), {"tokens": np.nan}, "tokens= takes whole numbers"),
    ],
)
async def test_bad_rows_are_refused(client, peer, rows, options, told):
    with pytest.raises(residuum.InvalidRequest, match=told):
        await client.unembed(rows, **options)
    assert "Unembed" not in peer.calls


@pytest.mark.parametrize("rows", [np.ones((HIDDEN, 3)), np.ones((2, HIDDEN // 2)), np.ones(2 * HIDDEN)])
async def test_rows_whose_bytes_are_those_of_other_rows_are_refused(client, rows):
    with pytest.raises(residuum.InvalidRequest, match=r"the residual stream has another width: .* transposed"):
        await client.unembed(rows)


async def test_rows_and_tokens_may_be_tensors(client, peer):
    torch = pytest.importorskip("torch")
    rows = torch.arange(2.0 * HIDDEN).reshape(2, HIDDEN)
    for given in (rows.bfloat16(), rows.clone().requires_grad_()):
        await client.unembed(given, tokens=torch.tensor([1, 2]))
        (kept, tokens) = sent(peer)[-1]
        np.testing.assert_array_equal(kept, rows.numpy())
        assert tokens == [1, 2]
    reply = await client.generate("a bb", capture=residuum.Capture(layers=[1]), max_tokens=1)
    await client.logit_lens(reply, transform=lambda layer, values: torch.tensor(values).bfloat16())


def lens_of():
    top_ids = np.array([[[7, 8], [9, 7]], [[8, 9], [7, 9]]])
    predicted = residuum.Unembedding(
        top_ids, np.log([[[0.9, 0.1], [0.5, 0.2]], [[0.1, 0.1], [0.7, 0.2]]]).astype(np.float32),
        np.zeros((2, 2), np.float32), np.array([[1, 0], [2, 0]]), {7: " <b>", 8: " a long word here"},
    )  # fmt: skip
    return residuum.LogitLens("resid_post", (0, 5), (3, 4), ("x", "y"), np.array([7, -1]), predicted)


def test_the_picture_is_valid_svg():
    picture = ElementTree.fromstring(lens_of().svg())
    name = "{http://www.w3.org/2000/svg}"
    texts = ["".join(text.itertext()) for text in picture.findall(f"{name}text")]
    assert [text.partition("layer")[0] for text in texts[2:4]] == ["<b>", "9"]
    assert "layer 0, position 3: ' <b>' 90%, ' a long word here' 10%; rank of the next token: 1" in texts[2]
    assert texts[-4:] == ["3", "x", "4", "y"]
    assert any(text.startswith("a long word") for text in texts)
    assert lens_of()._repr_svg_() == lens_of().svg()


@pytest.mark.parametrize(
    ("text", "shown"), [(" Paris", "Paris"), ("\n\n", "\\n\\n"), (" ", "␣"), ("\t", "\\t"), ("", "")]
)
def test_white_space_is_visible(text, shown):
    assert protocol.visible(text) == shown


def test_the_command_prints_a_table_and_writes_the_picture(cli, peer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = cli("lens", "a bb", "--layers", "0-1", "--svg", "out.svg")
    assert code == 0
    assert [line.split("\t")[0] for line in out.splitlines()] == ["0", "1"]
    assert "<" in out
    ElementTree.parse("out.svg")
    code, out, _ = cli("lens", "a bb", "--top-k", 2, "--json")
    found = json.loads(out)
    assert (code, found["layers"], np.shape(found["top_ids"])) == (0, list(range(LAYERS)), (LAYERS, 2, 2))
    assert found["ranks"]
    assert peer.calls.count("Unembed") == 2
    with pytest.raises(SystemExit):  # it would have no token to show
        cli("lens", "a bb", "--top-k", 0)
