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


def test_packed_texts_have_the_tokens_of_the_model(client: residuum.Client, smollm2: Path, tmp_path: Path) -> None:
    """Each document has its own tokens, as transformers makes them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = [prompt for prompt in PROMPTS if isinstance(prompt, str)]
    rows = client.extract(
        texts, tmp_path / "rows", capture=residuum.Capture(layers=[3]), pack=True, context_length=8, tokenizer=smollm2,
        separator="eos", progress=False,
    )  # fmt: skip
    stream = [
        token
        for text in texts
        for token in [tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]
    ]
    got = rows.token_ids.reshape(-1, 8)
    assert (got[:, 0] == tokenizer.eos_token_id).all()
    assert len(got) > 2
    own = [token for token in got.ravel().tolist() if token != tokenizer.eos_token_id]
    assert own == [token for token in stream if token != tokenizer.eos_token_id][: len(own)]
    assert rows.layer(3).shape == (got.size, 576)


def test_a_truncated_prompt_has_the_first_tokens(client: residuum.Client) -> None:
    text = PROMPTS[0]
    whole = client.generate(text, max_tokens=0).prompt_token_ids
    what = residuum.Capture(layers=[3], keep_prompt=True)
    for prompt in (text, list(whole)):
        reply = client.generate(prompt, max_tokens=0, truncate_prompt=5)
        assert reply.prompt_token_ids == whole[:5]
    reply = client.generate(f"{text} x" * 2000, max_tokens=1, truncate_prompt=5, capture=what)
    assert reply.prompt_token_ids == whole[:5]
    manifest = client.manifest(reply, wait=10)
    assert manifest.prompt_text == "The capital of France is"
    assert client.generate(text, max_tokens=0, truncate_prompt=500).prompt_token_ids == whole
    with pytest.raises(residuum.InvalidRequest, match="A conversation cannot be truncated"):
        client.generate([{"role": "user", "content": "Hi"}], truncate_prompt=5)
