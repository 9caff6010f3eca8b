"""A job over a dataset with a real model, compared with transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum
from examples.demo.reference import compare

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("integration")]

PROMPTS = [
    "The capital of France is Paris, and the capital of Italy is",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "Hello",
    [{"role": "user", "content": "What is the capital of France?"}],
    [504, 4215, 282],
]


def test_rows_of_a_job_equal_those_of_transformers(client: residuum.Client, smollm2: Path, tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"text": prompt, "y": at}) + "\n" for at, prompt in enumerate(PROMPTS)))
    rows = client.extract(
        source, tmp_path / "rows", capture=residuum.Capture(layers="all"), keep="y", shard_bytes=1 << 20, progress=False
    )
    assert len(rows.layer(0).shards) > 1
    assert rows.labels("y") == rows.prompt.tolist()
    every = np.stack([np.asarray(rows.layer(layer), np.float32) for layer in range(30)])
    captured = []
    for index in range(len(PROMPTS)):
        own = rows.prompt == index
        assert rows.positions[own].tolist() == list(range(own.sum()))
        captured.append((rows.token_ids[own].tolist(), every[:, own]))
    assert captured[5][0] == PROMPTS[5]
    agreement = compare(str(smollm2), captured)
    assert not agreement.unexplained.any()
    assert agreement.cosines.mean() >= 0.999
    assert client.extract(
        source, tmp_path / "rows", capture=residuum.Capture(layers="all"), keep="y", shard_bytes=1 << 20, progress=False
    ).summary.prompts == 0  # fmt: skip
