"""bench.extract's part `documents`: its figures, its checks, and a small real run."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

import residuum

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from bench import extract, processes  # noqa: E402 - only if torch is there
from bench.capture.shapes import SHAPES  # noqa: E402
from bench.documents import child, loop, part  # noqa: E402
from bench.documents.job import DocumentsJob, Way, Written  # noqa: E402
from bench.machine import ROOT  # noqa: E402
from bench.processes import RunFailedError  # noqa: E402
from tests import warm_start  # noqa: E402
from tests.client.support.extraction_files import write_extraction  # noqa: E402

LAYERS, PREFILL = (1, 2), 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with weights, so that ways can be compared."""
    torch.manual_seed(0)
    config = {key: value for key, value in SHAPES["tiny"].config.items() if key != "torch_dtype"}
    made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config)).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    return str(folder)


def job_of(model, folder, **changes):
    return replace(
        DocumentsJob(
            Way.LOOP, model, 1024, documents=5, prefill=PREFILL, layers=LAYERS, rounds=2, folder=str(folder), batch=2,
            concurrency=2, max_num_batched_tokens=2048, eager=True,
        ),
        **changes,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- figures


def test_ratios_are_those_of_tokens_per_second():
    found = {
        part.STOCK: part.Rounds(100, [1.0, 2.0, 4.0]),
        part.OURS: part.Rounds(100, [1.25, 2.0, 5.0], 12),
        "a peer": part.Rounds(10, [1.0, 1.0, 1.0], 24),
    }
    measured = part.part_of({"x": 1}, found, 50, {"another": "not installed"}, {"a peer": 0.01})
    assert measured.data["tokens_per_second"][part.STOCK] == [5000.0, 2500.0, 1250.0]
    assert measured.data["over_stock"] == {part.OURS: [0.8, 1.0, 0.8], "a peer": [0.1, 0.2, 0.4]}
    assert measured.data["mb_per_second"]["a peer"] == [0.0, 0.0, 0.0]
    assert measured.data["bytes_per_token"] == {part.OURS: 12, "a peer": 24}
    assert measured.data["ratio"] == {"median": 0.8, "lowest": 0.8, "highest": 1.0}
    assert [bar.passed for bar in measured.bars] == [False]
    assert not measured.failures
    text = "\n".join(measured.lines)
    assert "0.800 1.000 0.800" in text
    assert "another could not run here: not installed" in text


@pytest.mark.parametrize("difference", [0.2, float("nan")])
def test_rows_that_differ_from_another_ways_are_a_failure(difference):
    found = {part.STOCK: part.Rounds(1, [1.0]), part.OURS: part.Rounds(1, [1.0], 1)}
    measured = part.part_of({}, found, 1, {}, {"a peer": difference})
    assert ["differ from those of a peer" in failure for failure in measured.failures] == [True]


@pytest.mark.parametrize(("layers", "chosen"), [(36, (9, 18, 27)), (4, (1, 2, 3)), (2, (0, 1)), (1, (0,))])
def test_the_layers_are_spread(layers, chosen):
    assert part.spread_layers(layers) == chosen


# -------------------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("layers", "value", "tokens", "told"),
    [
        ((3, 5), 1.0, None, None),
        ((3, 5), np.nan, None, "layer 3 are not finite"),
        ((3, 5), 0.0, None, "layer 3 are not finite, or only zeros"),
        ((3, 5), 1.0, [[0, 1], [0, 1]], "or wrong ones"),
        ((3, 5), 1.0, [[0, 1]], "4 rows of 2 tokens"),
    ],
)
def test_a_jobs_rows_are_checked(tmp_path, layers, value, tokens, told):
    folder = write_extraction(
        tmp_path / "job", [[2, 2]], layers=layers, values=lambda rows: np.full((len(layers), len(rows), 4), value)
    )
    rows = residuum.Extracted(folder)
    prompts = np.asarray(rows.token_ids).reshape(2, 2).tolist() if tokens is None else tokens
    if told is None:
        part.check(rows, prompts, layers)
        return
    if tokens == [[0, 1], [0, 1]]:
        prompts = (np.asarray(rows.token_ids).reshape(2, 2) + 1).tolist()
    with pytest.raises(RunFailedError, match=told):
        part.check(rows, prompts, layers)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"rows": 3}, "3 rows of 2 documents of 2 tokens"),
        ({"token_ids": [[1, 2], [3, 5]]}, "the tokens are not"),
        ({"sample": {1: torch.ones(2, 4)}}, r"layers \[1\] instead of \[1, 2\]"),
        ({"sample": {1: torch.ones(2, 4), 2: torch.zeros(2, 4)}}, "layer 2 are not finite, or only zeros"),
        ({"sample": {1: torch.ones(2, 4), 2: torch.full((2, 4), torch.nan)}}, "layer 2 are not finite"),
        ({"sample": {1: torch.ones(2, 4), 2: torch.ones(1, 4)}}, "layer 2"),
    ],
)
def test_another_ways_rows_are_checked(changes, told):
    job = job_of("m", "f", prefill=2)
    sample = {layer: torch.ones(2, 4) for layer in LAYERS}
    written = replace(Written(4, 64, [[1, 2], [3, 4]], sample), **changes)
    if told is None:
        child.check(job, [[1, 2], [3, 4]], written)
        return
    with pytest.raises(child.WrongFilesError, match=told):
        child.check(job, [[1, 2], [3, 4]], written)


# ----------------------------------------------------------------------------------------------------------- the ways


def test_the_loops_rows_are_those_of_transformers(model, tmp_path):
    job = job_of(model, tmp_path)
    prompts = job.prompts(0)
    way = asyncio.run(loop.start(job))
    asyncio.run(way.extract(prompts, tmp_path))
    assert len(list(tmp_path.glob("*.safetensors"))) == 3, "batches of 2, 2 and 1"
    written = way.read(tmp_path)
    child.check(job, prompts, written)
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    with torch.inference_mode():
        states = whole(torch.tensor(prompts[:1]), output_hidden_states=True).hidden_states
    for layer in LAYERS:
        assert torch.allclose(written.sample[layer].float(), states[layer + 1][0].float(), rtol=0.05, atol=0.02)
    assert written.row_bytes == 5 * PREFILL * len(LAYERS) * 256 * 2


def test_rounds_have_the_first_documents_of_the_job_and_the_difference_is_that_of_the_last(model, tmp_path):
    from safetensors.torch import save_file

    job = job_of(model, tmp_path)
    assert job.prompts(1) == replace(job, documents=9).prompts(1)[:5]
    assert job.prompts(1) != job.prompts(0)
    way = asyncio.run(loop.start(job))
    (tmp_path / "last").mkdir()
    asyncio.run(way.extract(job.prompts(1), tmp_path / "last"))
    sample = way.read(tmp_path / "last").sample
    for scale, difference in ((1.0, 0.0), (2.0, 0.5)):
        save_file({str(layer): rows.float() * scale for layer, rows in sample.items()}, tmp_path / "reference")
        found = asyncio.run(child.measure(replace(job, reference=str(tmp_path / "reference")), way))
        assert len(found["seconds"]) == 2
        assert found["bytes_per_token"] == len(LAYERS) * 256 * 2
        assert found["relative_difference"] == pytest.approx(difference, abs=1e-3)


def start_fork(arguments, log_file, environment):
    """Start a child of a benchmark as a fork of a process that has imported vLLM."""
    log_file.touch()
    with patch.dict(os.environ, environment, clear=True):
        return warm_start.launch("bench.child", arguments, ROOT, log_file)


@pytest.mark.slow
def test_a_small_run_compares_rows_with_transformers(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(processes, "start_child", start_fork)
    out = tmp_path / "x.json"
    arguments = [
        *("--parts", "documents", "--model", model, "--eager", "--prompts", "6", "--prefill", str(PREFILL)),
        *("--concurrency", "2", "--rounds", "2", "--batch", "2", "--peer-prompts", "4", "--folder", str(tmp_path)),
        *("--engine-args", '{"skip_tokenizer_init": true}', "--peers", "transformers loop,SAELens"),
        *("--peers-folder", str(tmp_path / "none"), "--peer-seconds", "120", "--output", str(out)),
    ]
    extract.main(arguments)
    found = json.loads(out.read_text())["parts"]["documents"]
    assert {name: len(rates) for name, rates in found["tokens_per_second"].items()} == {
        "AsyncLLM": 2, "residuum extract": 2, "transformers loop": 2,
    }  # fmt: skip
    assert found["parameters"]["layers"] == [1, 2, 3]
    assert set(found["bytes_per_token"].values()) == {3 * 256 * 2}
    assert 0 < found["relative_difference"]["transformers loop"] < 0.05
    assert list(found["absent"]) == ["SAELens"]
    assert "not installed" in found["absent"]["SAELens"]
    assert "bytes/token" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"], "all files are deleted"
