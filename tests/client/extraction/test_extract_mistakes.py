"""Mistakes and damage around extractions that would otherwise give wrong rows or labels in silence."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import types

import ml_dtypes
import numpy as np
import pytest

import residuum
from residuum.extraction.folder import open_folder
from tests.client.extraction.test_extract import WHAT
from tests.client.extraction.test_extract_inputs import items
from tests.client.support.extraction_files import write_extraction

PROMPTS = "prompts-00000.jsonl"


@pytest.fixture
def folder(tmp_path):
    """Two files: prompts of 3 and 4 rows, then of 5 and 2."""
    return write_extraction(tmp_path / "job", [[3, 4], [5, 2]])


class TestRowsOfALayer:
    @pytest.mark.parametrize("length", [0, 4, 13, 15])
    def test_a_mask_of_another_length(self, folder, length):
        layer = residuum.Extracted(folder).layer(3)
        with pytest.raises(IndexError, match=rf"shape \({length},\), but there are 14 rows"):
            layer[np.zeros(length, bool)]

    def test_a_mask_of_prompts_becomes_one_of_rows_as_the_error_says(self, folder):
        rows = residuum.Extracted(folder)
        mask = np.array([line["labels"]["y"] == 1 for line in rows.prompts])
        assert rows.layer(3)[mask[rows.prompt]][:, 0].tolist() == [1000.0 * row + 30 for row in (3, 4, 5, 6, 12, 13)]

    @pytest.mark.parametrize("index", [np.array([0.9, 2.7]), np.s_[:, 0], [[0, 1]], ["a"], "a", 1.5, np.s_[0, 0]])
    def test_what_is_no_number_of_a_row(self, folder, index):
        with pytest.raises(IndexError, match="an array of integers"):
            residuum.Extracted(folder).layer(3)[index]

    def test_what_chooses_rows(self, folder):
        layer = residuum.Extracted(folder).layer(3)
        assert layer[[]].shape == (0, 4)
        assert layer[[2, -1]][:, 0].tolist() == [2030.0, 13030.0]
        assert layer[np.arange(14) == 5].shape == (1, 4)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_other_processes_map_the_rows_themselves(tmp_path, dtype):
    """Each worker of a DataLoader would get a copy of all rows, which may be larger than memory."""
    rows = residuum.Extracted(write_extraction(tmp_path / "job", [[300, 400], [500, 200]], width=64, dtype=dtype))
    assert (len(rows.prompts), len(rows.token_ids)) == (4, 1400)
    for given in (rows, rows.shard(1), copy.copy(rows)):
        assert len(pickle.dumps(given)) < 2000
        again = pickle.loads(pickle.dumps(given))
        assert (len(again), again.is_complete, again.labels("y")) == (len(given), True, given.labels("y"))
        assert np.array_equal(again.layer(5), given.layer(5))
        layer = given.layer(3)
        assert len(pickle.dumps(layer)) < 2000
        assert np.array_equal(pickle.loads(pickle.dumps(layer))[10:20], layer[10:20])


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: lines[:1],
        lambda lines: lines[1:],
        lambda lines: lines[::-1],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [lines[0], lines[1][:-9]],
        lambda lines: [lines[0], "[1]\n"],
        lambda _: [],
    ],
)
def test_a_damaged_file_of_prompts(folder, damage):
    path = folder / PROMPTS
    path.write_text("".join(damage(path.read_text().splitlines(keepends=True))))
    rows = residuum.Extracted(folder)
    reads = (lambda: rows.labels("y"), lambda: rows.prompts, lambda: rows.failures, lambda: rows.shard(0).documents)
    for read in reads:
        with pytest.raises(residuum.InvalidRequest, match=f"{PROMPTS} is damaged"):
            read()


async def test_a_job_does_not_continue_with_a_damaged_file_of_prompts(client, tmp_path):
    prompts = [{"text": "a b", "y": 0}, {"text": "c", "y": 1}, {"text": "d", "y": 2}]
    await client.extract(prompts, tmp_path / "rows", capture=WHAT, keep="y")
    path = tmp_path / "rows" / PROMPTS
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(residuum.InvalidRequest, match=f"{PROMPTS} is damaged"):
        await client.extract(prompts, tmp_path / "rows", capture=WHAT, keep="y")


def test_a_file_of_another_program(folder):
    header = json.dumps({"x": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}}).encode()
    (folder / "rows-00000.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(residuum.InvalidRequest, match=r"rows-00000\.safetensors is damaged, or not a shard"):
        residuum.Extracted(folder)


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"spec": {}}', '{"format": "of another program", "spec": {}}'])
async def test_a_job_json_that_is_not_of_a_job_is_kept(client, tmp_path, text):
    file = tmp_path / "job.json"
    file.write_text(text)
    with pytest.raises(residuum.InvalidRequest, match=r"job\.json is damaged, or of another program"):
        await client.extract(["a"], tmp_path, capture=WHAT)
    with pytest.raises(residuum.InvalidRequest, match=r"job\.json is damaged, or of another program"):
        residuum.Extracted(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]
    assert file.read_text() == text


def test_a_table_of_pandas_is_refused():
    """Iterating it gives the names of its columns."""
    table = types.SimpleNamespace(columns=["text"], to_dict=dict)
    with pytest.raises(TypeError, match=r'df\.to_dict\("records"\)'):
        items(table)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_prompt(tmp_path, suffix):
    lines = ['{"text": "hello", "y": 1}', '{"text": "b", "y": 2}'] if suffix == "jsonl" else ["hello", "b"]
    path = tmp_path / f"prompts.{suffix}"
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    assert [item.prompt for item in items(path, keep=("y",) if suffix == "jsonl" else ())] == ["hello", "b"]


def test_a_number_of_too_many_digits_is_a_bad_row(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "a", "y": ' + "1" * 5000 + '}\n{"text": "b", "y": 1}\n')
    first, second = items(path)
    assert "line 1 of prompts.jsonl is not JSON" in str(first.error)
    assert second.error is None


def test_values_of_numpy_within_labels():
    label = {"s": np.float32(0.5), "l": [np.int64(3), (np.bool_(True),)]}
    assert items([{"text": "a", "y": label}])[0].labels == {"y": {"s": 0.5, "l": [3, [True]]}}


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
async def test_log_probabilities_are_refused_before_anything_is_sent(client, tmp_path, name):
    with pytest.raises(residuum.InvalidRequest, match=f"{name}= cannot be used here"):
        await client.extract(["a"], tmp_path / "rows", capture=WHAT, **{name: 1})
    assert not (tmp_path / "rows").exists()


async def test_a_url_is_no_output(client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(residuum.InvalidRequest, match="is a URL"):
        await client.extract(["a"], "s3://bucket/rows", capture=WHAT)
    assert not list(tmp_path.iterdir())


def test_a_killed_export_in_the_folder_of_the_job_does_not_stop_the_job(folder):
    left_over, own = folder / "tar.abc.part", folder / "rows-00002.safetensors.part"
    left_over.mkdir()
    own.write_text("x")
    spec = json.loads((folder / "job.json").read_text())["spec"]
    with open_folder(folder) as job:
        job.begin(spec, {})
    assert left_over.exists()
    assert not own.exists()


@pytest.mark.parametrize(("hard", "expected"), [(4096, "300 rows"), (120, "has 300 files of rows")])
def test_more_files_than_a_process_may_have_open(tmp_path, hard, expected):
    """A job of many files raises the soft limit; the error names the hard one's remedy."""
    folder = write_extraction(tmp_path / "job", [[1]] * 300)
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))\n"
        "import sys, residuum\n"
        "try:\n"
        "    rows = residuum.Extracted(sys.argv[1])\n"
        "    print(len(rows.layer(3)), 'rows')\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    assert expected in done.stdout
    assert hard > 300 or "ulimit -n 556" in done.stdout
