"""Every line of code in docs/encodings.md runs as it is written there, and its figures are those of the result."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import residuum
from bench.encodings import rows
from residuum.cli import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/encodings.md"
RESULT = ROOT / "bench/results/cpu/encodings.json"
WIDTH = 576


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def large(endpoint, peer, monkeypatch):
    """A client of a model as large as the page's."""
    monkeypatch.setattr("peer.LAYERS", 30)
    monkeypatch.setattr("peer.HIDDEN", WIDTH)
    with residuum.Client(endpoint) as client:
        yield client


def test_the_python_of_the_encoding_page(large):
    scope = {"client": large, "residuum": residuum, "joy": residuum.Vector(np.ones(WIDTH))}
    found = blocks("python")
    assert len(found) >= 3
    exec(compile(found[0], str(PAGE), "exec"), scope)
    assert scope["acts"].encoded(12)["q"].shape == (42, WIDTH)
    assert scope["acts"].manifest.encoding == "full8"
    for block in found[1:]:
        exec(compile(block, str(PAGE), "exec"), scope)
    assert scope["scores"].shape == (6,)
    assert scope["acts"].positions.tolist() == [2, 5]
    assert scope["acts"][12].shape == (2, 576)


def test_the_commands_of_the_encoding_page(large, endpoint, capsys):
    for line in "".join(blocks("console")).splitlines():
        program, *arguments = shlex.split(line.removeprefix("$ "))
        assert program == "residuum"
        assert main([*arguments, "--endpoint", endpoint]) == 0, capsys.readouterr().err
    assert large.activations("compact").width == 256


def test_the_table_of_the_encoding_page_is_that_of_the_result():
    part = json.loads(RESULT.read_text())["parts"]["rows"]
    assert rows.table(part) in PAGE.read_text()
    facts = f"{part['layers']} layers, width {part['width']}, bfloat16) over {part['positions']} tokens"
    assert facts in PAGE.read_text()
    assert f"{100 * part['svd']['svd_l2']:.1f} % off with {part['svd']['dimensions']} of them" in PAGE.read_text()
