"""Labels: set with a capture or later, listed and filtered by, in both clients and on the command line."""

from __future__ import annotations

import json
import uuid

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import residuum
from residuum.wire.labels import parse_where, read_value, write_value
from tests.client.support.peer import POST, rows


@pytest.fixture
def run():
    """A value that only this test's captures have in their label `run`."""
    return f"r{uuid.uuid4().hex}"


@pytest.fixture
def made(endpoint, run):
    """Replies whose captures have the labels run, split and y."""
    with residuum.Client(endpoint) as client:
        return [
            client.generate(
                "a bb", max_tokens=3, request_id=f"{run}-{y}",
                capture=residuum.Capture(
                    layers=[1], labels={"run": run, "split": "train" if y else "test", "y": y, "weight": y / 2}
                ),
            )
            for y in range(4)
        ]  # fmt: skip


async def test_labels_are_in_the_manifest_and_in_lists(client, made, run):
    labels = {"run": run, "split": "train", "weight": 1.5, "y": 3}
    assert (await client.manifest(made[3])).labels == labels
    assert (await client.activations(made[3])).manifest.labels == labels
    (summary,) = await client.captures(prefix=f"{run}-3")
    assert summary.labels == labels


async def test_lists_and_rows_are_filtered(client, made, run):
    names = [reply.request_id for reply in made]
    where = f"run = '{run}' and split = train"
    assert [item.capture_id for item in await client.captures(where=where)] == names[:0:-1]
    page = await client.captures_page(where=f"{where} and y > 1.5", page_size=1)
    assert [item.capture_id for item in page.captures] == names[3:]
    page = await client.captures_page(where=f"{where} and y > 1.5", page_size=1, page_token=page.next_page_token)
    assert [item.capture_id for item in page.captures] == names[2:3]
    found = await client.rows(where=where, layer=1, positions="prompt")
    assert found.captures == tuple(names[1:])
    assert found.labels("y") == [1, 1, 2, 2, 3, 3]
    assert found.labels("none") == [None] * 6
    assert np.array_equal(found.values, np.tile(rows(0, POST, 1, range(2)).astype(np.float32), (3, 1)))
    with pytest.raises(residuum.InvalidRequest, match="There is no capture with labels 'split = none' to read"):
        await client.rows(where="split = none", layer=1)


async def test_labels_are_changed_later(client, made, run):
    assert await client.label(made[0], {"split": "dev", "weight": None, "flag": True, "n": np.int64(7)}) == {
        "flag": True, "n": 7, "run": run, "split": "dev", "y": 0
    }  # fmt: skip
    assert [item.capture_id for item in await client.captures(where=f"run = '{run}' and flag = true")] == [f"{run}-0"]
    with pytest.raises(residuum.UnknownCapture):
        await client.label("none", {"a": 1})


def test_the_command_line_counts_by_label(cli, made, run):
    code, out, _ = cli("ls", "--where", f"run = '{run}'", "--by", "split", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(row["value"], row["captures"]) for row in rows] == [("train", 3), ("test", 1)]
    assert all(row["rows"] > 0 and row["bytes"] > 0 for row in rows)
    assert cli("ls", "--prefix", f"{run}-0", "--by", "none")[1].split("\t")[:2] == ["", "1"]


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ({"a b": 1}, residuum.InvalidRequest, "labels: 'a b' is not the name of a label"),
        ({"\ud800": 1}, residuum.InvalidRequest, "is not the name of a label"),
        ({"a": 1 << 63}, residuum.InvalidRequest, "does not fit into 64 bits"),
        ({"a": float("inf")}, residuum.InvalidRequest, "is inf, which is not finite"),
        ({"a": "x" * 257}, residuum.InvalidRequest, "has 257 characters, more than 256"),
        ({"a": "\ud800"}, residuum.InvalidRequest, "'a' has half of a character"),
        ({f"a{at}": at for at in range(33)}, residuum.InvalidRequest, "at most 32 labels, not 33"),
        ({"a": [1]}, TypeError, "takes a text, a number or a bool"),
    ],
)
async def test_bad_labels_are_refused_before_anything_is_sent(client, labels, error, message):
    with pytest.raises(error, match=message):
        residuum.Capture(labels=labels)
    with pytest.raises(error, match=message):
        await client.label("a", labels)


async def test_a_filter_that_cannot_be_parsed_is_refused(make):
    client = make("127.0.0.1:1", store="127.0.0.1:1")
    for call in (client.captures, client.captures_page):
        with pytest.raises(residuum.InvalidRequest, match="where: expected a value at the end"):
            await call(where="split =")


async def test_half_of_a_character_is_refused_in_labels_and_filters(client):
    for call in (
        lambda: client.label("x", {"\ud800": None}),
        lambda: client.label("x", {"\ud800": 1}),
        lambda: client.captures_page(prefix="\ud800"),
        lambda: client.captures_page(where='split = "\ud800"'),
        lambda: client.search(np.ones(8, np.float32), layer=1, prefix="\ud800"),
    ):
        with pytest.raises(residuum.InvalidRequest):
            await call()


async def test_the_prompt_is_kept_if_asked(client):
    capture = residuum.Capture(layers=[1], keep_prompt=True)
    kept = await client.generate("a bb", max_tokens=1, capture=capture)
    assert (await client.manifest(kept)).prompt_text == "a bb"
    dropped = await client.generate("a bb", max_tokens=1, capture=residuum.Capture(layers=[1]))
    assert (await client.manifest(dropped)).prompt_text == ""


@example("1e999")
@given(st.one_of(st.text(max_size=20), st.integers(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False)))
def test_written_filters_are_parsed_back(value):
    text = write_value(value)
    (condition,) = parse_where(f"a = {text}")
    assert (condition.value, type(condition.value)) == (value, type(value))
    assert read_value(text) == value


def test_the_command_line_labels_lists_pulls_and_deletes(cli, made, run, tmp_path):
    _, out, _ = cli("label", made[0].request_id, "split=dev", "note='1'", "--remove", "weight")
    assert out == f'{run}-0: note = "1" and run = {run} and split = dev and y = 0\n'
    code, out, _ = cli("ls", "--where", f"run = '{run}' and y >= 2", "--json")
    assert code == 0
    assert [json.loads(line)["labels"]["y"] for line in out.splitlines()] == [3, 2]
    assert "split = train" in cli("ls", "--where", f"run = '{run}' and y = 3")[1]
    assert cli("pull", "--where", f"run = '{run}' and y >= 2", "--out", tmp_path / "out")[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"{run}-{y}.safetensors" for y in (2, 3)]
    assert cli("rm", "--where", f"run = '{run}' and y < 3", "--yes")[0] == 0
    assert [json.loads(line)["capture_id"] for line in cli("ls", "--prefix", run, "--json")[1].splitlines()] == [
        f"{run}-3"
    ]
    code, _, err = cli("ls", "--where", "split")
    assert (code, "expected one of" in err) == (1, True)


@pytest.mark.parametrize("arguments", [["rm"], ["rm", "a", "--where", "b = 1"], ["pull"], ["label", "a"]])
def test_the_command_line_takes_ids_or_a_filter(cli, arguments):
    with pytest.raises(SystemExit) as caught:
        cli(*arguments)
    assert caught.value.code == 2


def test_the_command_line_labels_while_it_generates(cli, endpoint, run):
    flags = ["--capture", "1", "--label", f"run={run}", "--label", "y=2", "--keep-prompt", "--max-tokens", "2"]
    assert cli("generate", "a bb", "--id", f"{run}-cli", *flags)[0] == 0
    with residuum.Client(endpoint) as client:
        manifest = client.manifest(f"{run}-cli", wait=True)
    assert manifest.labels["y"] == 2
    assert manifest.prompt_text == "a bb"
    with pytest.raises(SystemExit):
        cli("generate", "a", "--label", "y=2")


@pytest.mark.parametrize("labels", [5, "a", ["a"], {1: 2}])
async def test_labels_that_are_no_mapping_of_names_are_refused_by_name(client, peer, labels):
    with pytest.raises(TypeError, match=r"^labels must be a mapping of names to values"):
        residuum.Capture(labels=labels)
    with pytest.raises(TypeError, match=r"^labels must be a mapping of names to values"):
        await client.label("a", labels)
    assert peer.calls == []


@pytest.mark.parametrize("name", ["prefix", "where"])
async def test_filters_that_are_no_texts_are_refused_by_name(client, peer, name):
    for call in (client.captures, client.delete):
        with pytest.raises(TypeError, match=rf"^{name} must be a text, not \['a'\]"):
            await call(**{name: ["a"]})
    assert peer.calls == []
