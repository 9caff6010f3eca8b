"""`client.extract` and `residuum extract` against a scripted inference service and a real store."""

from __future__ import annotations

import json

import numpy as np
import pytest
from peer import HIDDEN, rows
from safetensors import safe_open

import residuum

POST = 1  # SITE_RESID_POST


def write_prompts(path, count, words=3):
    """Prompts of 1 to `words` tokens. Token i of the peer is the length of word i."""
    with path.open("w") as file:
        for number in range(count):
            text = " ".join("x" * (1 + (number + at) % 9) for at in range(1 + number % words))
            file.write(json.dumps({"text": text, "y": number % 2, "id": f"p{number}"}) + "\n")
    return path


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", 40)


WHAT = residuum.Capture(layers=[1, 4])


def check_rows(found, count, words=3):
    lengths = [1 + number % words for number in range(count)]
    positions = np.concatenate([np.arange(length) for length in lengths])
    assert found.positions.tolist() == positions.tolist()
    assert found.prompt.tolist() == np.repeat(np.arange(count), lengths).tolist()
    for layer in (1, 4):
        wanted = rows(0, POST, layer, positions)
        got = found.layer(layer)
        assert got.shape == (len(positions), HIDDEN)
        assert np.array_equal(np.asarray(got), wanted)


async def test_all_rows_arrive_in_the_order_of_the_prompts(client, prompts, tmp_path):
    found = await client.extract(prompts, tmp_path / "out", capture=WHAT, keep="y,id", progress=False)
    assert found.is_complete
    check_rows(found, 40)
    assert found.labels("y") == [number % 2 for number in found.prompt.tolist()]
    lines = prompts.read_text().splitlines()
    wanted = [len(word) for line in lines for word in json.loads(line)["text"].split()]
    assert found.token_ids.tolist() == wanted
    assert (found.summary.prompts, found.summary.failed, found.summary.tokens) == (40, 0, len(wanted))
    assert await client.captures(prefix="extract-") == []


async def test_a_shard_is_a_safetensors_file(client, prompts, tmp_path):
    await client.extract(prompts, tmp_path / "out", capture=WHAT, dtype="float32", progress=False)
    with safe_open(tmp_path / "out" / "rows-00000.safetensors", framework="np") as file:
        assert file.get_tensor("resid_post.4").dtype == np.float32
        assert file.get_tensor("offsets").tolist()[:4] == [0, 1, 3, 6]
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["complete"]
    assert index["tensors"]["resid_post.1"] == {"dtype": "float32", "width": HIDDEN}


async def test_many_shards_read_as_one_array(client, prompts, tmp_path):
    found = await client.extract(prompts, tmp_path / "out", capture=WHAT, shard_bytes=300, progress=False)
    check_rows(found, 40)
    layer, every = found.layer(4), np.asarray(found.layer(4))
    assert len(layer.shards) > 5
    assert np.array_equal(layer[7:40], every[7:40])
    assert np.array_equal(layer[::-3], every[::-3])
    assert np.array_equal(layer[[5, 60, -1]], every[[5, 60, -1]])
    mask = np.arange(len(layer)) % 4 == 1
    assert np.array_equal(layer[mask], every[mask])
    assert np.array_equal(layer[11], every[11])
    with pytest.raises(IndexError):
        layer[len(layer)]
