"""Every line of code in docs/exports.md runs as it is written there, in its order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import residuum
from residuum.cli import main

PAGE = Path(__file__).parents[2] / "docs/exports.md"


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def mine(endpoint, peer, tmp_path, monkeypatch):
    """A capture `mine`, in the current folder nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("peer.LAYERS", 16)
    with residuum.Client(endpoint) as client:
        client.generate("a bb ccc", max_tokens=40, capture=residuum.Capture(layers=[12, 15]), request_id="mine")
        client.manifest("mine", wait=True)
        yield client
        client.delete("mine")


def test_the_commands_of_the_export_page(mine, endpoint, capsys):
    lines = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
    assert len(lines) == 4
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "residuum"
        assert main([*arguments, "--endpoint", endpoint]) == 0, capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} == {"mine.npz", "mine.zarr", "mine.parquet"}


def test_the_python_of_the_export_page(mine, capsys):
    scope = {"client": mine, "residuum": residuum}
    found = blocks("python")
    assert len(found) >= 5
    for block in found:
        exec(compile(block, str(PAGE), "exec"), scope)
    assert "mine as zarr, complete: 2 layers × 42 positions × 8" in capsys.readouterr().out
    assert scope["rows"].shape == (10, 8)
    assert scope["inputs"].shape[1:] == (8,)
    assert scope["again"].layers == (12, 15)
