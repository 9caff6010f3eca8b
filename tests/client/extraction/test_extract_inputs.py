"""The inputs of extractions, and `residuum extract` on the command line."""

from __future__ import annotations

import json
import re

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import residuum
from residuum.extraction.inputs.prompts import Items, open_rows
from tests.client.extraction.test_extract import WHAT, check_rows, files, write_prompts
from tests.client.support.peer import HIDDEN


def items(source, column="text", keep=("y",), **more):
    opened = Items(open_rows(source, column, keep), column=column, keep=keep, **more)
    found = [opened.item(index) for index in range(len(opened))]
    opened.close()
    return found


COLUMNS = {"text": ["a", "bb", "ccc"], "y": [0, 1, 2], "tokens": [[1], [2, 3], [4]], "more": ["x"] * 3}


@pytest.fixture(params=["parquet", "arrow", "folder", "saved", "selected", "jsonl"])
def table(request, tmp_path):
    """The same rows as each kind of table."""
    made, path = pa.table(COLUMNS), tmp_path / f"data.{request.param}"
    if request.param == "parquet":
        parquet.write_table(made, path)
    elif request.param == "arrow":
        with pa.ipc.new_file(path, made.schema) as file:
            file.write_table(made)
    elif request.param == "folder":
        path.mkdir()
        parquet.write_table(made.slice(0, 2), path / "0.parquet")
        parquet.write_table(made.slice(2), path / "1.parquet")
    elif request.param == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in made.to_pylist()))
    else:
        saved = datasets.Dataset.from_dict(COLUMNS)
        if request.param == "selected":
            saved = datasets.Dataset.from_dict({name: [values[0], *values] for name, values in COLUMNS.items()})
            saved = saved.select([1, 2, 3])
        saved.save_to_disk(path)
    return path


def test_every_kind_of_table_has_the_same_prompts(table):
    found = items(table)
    assert [item.prompt for item in found] == COLUMNS["text"]
    assert [item.labels for item in found] == [{"y": 0}, {"y": 1}, {"y": 2}]
    assert [item.digest for item in found] == [
        item.digest
        for item in items([dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)])
    ]
    assert [item.prompt for item in items(table, "tokens")] == COLUMNS["tokens"]
    shuffled = items(table, shuffle=5, limit=2)
    assert {item.prompt for item in shuffled} < set(COLUMNS["text"])
    assert all(COLUMNS["text"][item.row] == item.prompt for item in shuffled)


def test_a_table_without_the_column_is_refused(tmp_path):
    parquet.write_table(pa.table(COLUMNS), tmp_path / "a.parquet")
    with pytest.raises(residuum.InvalidRequest, match=r"a.parquet has no column 'content'. It has 'text', 'y'"):
        open_rows(tmp_path / "a.parquet", "content", [])
    (tmp_path / "b.parquet").write_text("not a table")
    with pytest.raises(residuum.InvalidRequest, match="cannot be read as a table"):
        open_rows(tmp_path / "b.parquet", "text", [])
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(COLUMNS)}).save_to_disk(tmp_path / "c")
    with pytest.raises(residuum.InvalidRequest, match=r"has the splits train: name one"):
        open_rows(tmp_path / "c", "text", [])


def write_tables(folder, **files):
    """Write Parquet files with consecutive rows of COLUMNS: as many as each number says."""
    folder.mkdir(exist_ok=True)
    first = 0
    for name, rows in files.items():
        parquet.write_table(pa.table(COLUMNS).slice(first, rows), folder / f"{name}.parquet")
        first += rows


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (("train-00000-of-00002", "train-00001-of-00002"), "test-00000-of-00001"),
        (("train-000000-of-000001-6ef3991c06080e14",), "test-000000-of-000001-aaaaaaaaaaaaaaaa"),
        (("Train",), "Test"),
        (("wikitext-train-00000-of-00001",), "wikitext-test"),
        (("forget-00000-of-00001",), "retain-00000-of-00001"),
        (("b.jsonl-00000-of-00001",), "a.txt-00000-of-00001"),
    ],
)
def test_splits_of_a_folder_are_not_mixed(tmp_path, train, test):
    data = tmp_path / "data"
    write_tables(data, **dict(zip(train, (2, 1) if len(train) > 1 else (3,), strict=True)))
    assert [item.prompt for item in items(data)] == COLUMNS["text"], "a single split needs no name"
    write_tables(data, **{test: 1})
    names = [re.sub("-0.*", "", name) for name in (train[0], test)]
    advised = data / min(names)
    with pytest.raises(residuum.InvalidRequest, match=f"the splits {', '.join(sorted(names))}.*such as {advised}, and"):
        open_rows(data, "text", [])
    assert [item.prompt for item in items(data / names[0])] == COLUMNS["text"]
    assert [item.prompt for item in items(data / names[1])] == COLUMNS["text"][:1]
    with pytest.raises(FileNotFoundError, match="validation does not exist"):
        open_rows(data / "validation", "text", [])


@pytest.mark.parametrize("other", ["train-00000-of-00002", "train-00000-of-00001-0123456789abcdef", "train"])
def test_two_versions_of_a_split_are_refused(tmp_path, other):
    data = tmp_path / "data"
    write_tables(data, **dict.fromkeys(("train-00000-of-00001", other), 1))
    for source in (data, data / "train"):
        with pytest.raises(residuum.InvalidRequest, match="two versions of the split train"):
            open_rows(source, "text", [])
    assert len(items(data / "train-00000-of-00001.parquet")) == 1, "a file that is named is read"
    write_tables(data, **{"test-00000-of-00001": 1})
    assert len(items(data / "test")) == 1, "another split of the folder has one version"


@pytest.mark.parametrize("names", [("train-00000-of-00003", "train-00002-of-00003"), ("train-00001-of-99999999999",)])
def test_a_split_that_lacks_files_is_read_with_a_warning(tmp_path, names):
    data = tmp_path / "data"
    write_tables(data, **dict.fromkeys(names, 1))
    for source in (data, data / "train"):
        with pytest.warns(UserWarning, match=rf"the split train in .* has {len(names)} of \d+ files"):
            assert len(items(source)) == len(names)


@pytest.mark.parametrize("first", [0, 1])
def test_a_whole_split_is_read_without_a_warning(tmp_path, first):
    write_tables(tmp_path / "data", **{f"train-{first + number:05}-of-00002": 1 for number in range(2)})
    assert len(items(tmp_path / "data")) == 2


def test_files_of_no_split_are_read_together_but_not_with_a_split(tmp_path):
    write_tables(tmp_path, **{"part-0": 2, "part-1": 1})
    assert [item.prompt for item in items(tmp_path)] == COLUMNS["text"]
    write_tables(tmp_path, holdout=1, train=1)
    with pytest.raises(residuum.InvalidRequest, match=r"the split train, and other files, such as holdout\.parquet"):
        open_rows(tmp_path, "text", [])


def test_the_advice_names_a_split_that_can_be_read(tmp_path):
    write_tables(tmp_path, test=1, train=1)
    (tmp_path / "test").mkdir()
    with pytest.raises(residuum.InvalidRequest, match=f"such as {tmp_path / 'train'}, and"):
        open_rows(tmp_path, "text", [])
    pa.ipc.new_file(tmp_path / "train.arrow", pa.table(COLUMNS).schema).close()
    assert [item.prompt for item in items(tmp_path / "train")] == COLUMNS["text"][1:2], "Parquet comes before Arrow"


def test_lines_of_text(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("one\n\n  \ntwo words\r\ndrei ä".encode())
    found = items(path, keep=())
    assert [item.prompt for item in found] == ["one", "two words", "drei ä"]
    assert [item.where for item in found] == [f"line {number} of prompts.txt" for number in (1, 4, 5)]


# ------------------------------------------------------------------------------------------------ the command line


def test_the_command_line(cli, tmp_path):
    source, out = write_prompts(tmp_path / "prompts.jsonl", 40), tmp_path / "out"
    code, said, errors = cli("extract", source, "--output", out, "--capture", "1,4", "--keep", "y")
    assert (code, errors) == (0, "")
    assert "40 prompts, 0 failed; 79 rows" in said
    check_rows(residuum.Extracted(out), 40)
    code, said, _ = cli("extract", source, "--output", out, "--capture", "1,4", "--keep", "y", "--json")
    assert json.loads(said)["done_before"] == 40
    _, said, _ = cli("extract", source, "--output", out, "--capture", "1,4", "--keep", "y")
    assert said == f"{out}: all 40 prompts were done before\n"
    code, _, errors = cli("extract", source, "--output", out, "--capture", "1,3", "--keep", "y")
    assert code == 1
    assert "another job: capture.layers was [1, 4] and is [1, 3]" in errors


def test_a_spec_has_flags_and_the_command_line_takes_precedence(cli, tmp_path):
    source, spec = write_prompts(tmp_path / "prompts.jsonl", 10), tmp_path / "job.toml"
    spec.write_text(
        f'input = "{source}"\ncapture = [1, 4]\npositions = "last_prompt"\nkeep = ["y", "id"]\nlimit = 8\n'
        'max-tokens = 1\non-error = "skip"\nkeep-captures = false\nlabel = ["a=1", "b=2"]\n'
    )
    code, _, errors = cli("extract", "--spec", spec, "--output", tmp_path / "out", "--limit", "5")
    assert (code, errors) == (0, "")
    found = residuum.Extracted(tmp_path / "out")
    assert (len(found), found.spec["limit"], found.spec["keep"]) == (5, 5, ["y", "id"])
    assert [label["name"] for label in found.spec["capture"]["labels"]] == ["a", "b"]
    code, _, _ = cli("extract", source, "--output", tmp_path / "two", "--limit", "5", "--spec", spec)
    assert files(tmp_path / "two") == files(tmp_path / "out")


def test_a_list_in_a_spec_is_one_value_of_a_flag_that_is_not_repeated(cli, tmp_path):
    source, spec = write_prompts(tmp_path / "prompts.jsonl", 1), tmp_path / "job.toml"
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.ones(HIDDEN))
    spec.write_text(f'capture = 1\nadd = ["{tmp_path}/a.npy@1", "{tmp_path}/b.npy@1"]\nsteer_positions = [0, 2]\n')
    assert cli("extract", source, "--spec", spec, "--output", tmp_path / "out")[0] == 0
    steered = residuum.Extracted(tmp_path / "out").spec["steering"]["operations"]
    assert [[item["last"] for item in one["positions"]["ranges"]] for one in steered] == [[0, 2], [0, 2]]


@pytest.mark.parametrize("is_first", [True, False])
def test_flags_take_precedence_over_a_spec_wherever_it_is_named(cli, tmp_path, is_first):
    """Also flags that equal their defaults, and those that may be repeated."""
    source, spec = tmp_path / "prompts.jsonl", tmp_path / "job.toml"
    source.write_text('{"text": "a"}\n{"text": 3}\n')
    spec.write_text('capture = 1\non-error = "skip"\ndtype = "float32"\nendpoint = ["nobody:1"]\nlabel = "a=1"\n')
    named, own = ["--spec", spec], ["--on-error", "stop", "--dtype", "stored", "--label", "b=2"]
    flags = [*named, *own] if is_first else [*own, *named]
    code, _, errors = cli("extract", source, "--output", tmp_path / "out", *flags)
    assert (code, "line 2" in errors) == (1, True)
    document = json.loads((tmp_path / "out" / "job.json").read_text())["spec"]
    assert document["dtype"] == "stored"
    assert [label["name"] for label in document["capture"]["labels"]] == ["b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("capture: 12", "cannot be used"),  # YAML
        ("capture = ", "cannot be used"),
        ("colour = 1", "unrecognized arguments: --colour=1"),
        ("spec = 'a'", "not a flag"),
    ],
)
def test_a_wrong_spec_is_refused(cli, tmp_path, capsys, text, message):
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(SystemExit):
        cli("extract", "a.jsonl", "--output", tmp_path / "out", "--spec", tmp_path / "job.toml")
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["INPUT", "--output", "--capture"])
def test_missing_flags_are_named(cli, tmp_path, capsys, missing):
    given = {"INPUT": ["a.jsonl"], "--output": ["--output", "out"], "--capture": ["--capture", "1"]}
    with pytest.raises(SystemExit):
        cli("extract", *(word for name, words in given.items() if name != missing for word in words))
    assert f"{missing} is missing" in capsys.readouterr().err


def test_failures_are_shown(cli, tmp_path):
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"text": "a"}\n{"text": 3}\n')
    flags = ["--output", tmp_path / "out", "--capture", "1"]
    code, _, errors = cli("extract", source, *flags)
    assert code == 1
    assert "line 2 of prompts.jsonl: the column 'text' holds 3" in errors
    assert "--on-error skip" in errors
    code, said, errors = cli("extract", source, *flags, "--on-error", "skip")
    assert (code, "1 failed" in said) == (0, True)
    assert "prompt 1 failed: line 2" in errors
    several = ["--output", tmp_path / "several", "--capture", "1", "--shard-bytes", "1"]
    assert cli("extract", source, *several)[0] == 1
    code, said, _ = cli("extract", source, *several, "--on-error", "skip")
    assert (code, "1 prompts (1 were done before), 1 failed" in said) == (0, True), "the job has rows"
    source.write_text('{"text": 3}\n')
    code, _, errors = cli("extract", source, "--output", tmp_path / "other", "--capture", "1", "--on-error", "skip")
    assert (code, "All prompts failed" in errors) == (1, True)


def test_a_dry_run_estimates_bytes_and_writes_nothing(cli, tmp_path):
    source = write_prompts(tmp_path / "prompts.jsonl", 300)
    code, said, _ = cli("extract", source, "--output", tmp_path / "out", "--capture", "1,4", "--dry-run", "--json")
    found = json.loads(said)
    assert (code, found["prompts"], found["sampled"], found["failed"]) == (0, 300, 64, 0)
    assert found["tokens"] == pytest.approx(600, rel=0.2)
    assert found["bytes"] == pytest.approx(found["tokens"] * 2 * 8 * 2, rel=0.01)
    assert found["seconds"] > 0
    _, said, _ = cli("extract", source, "--output", tmp_path / "out", "--capture", "1,4", "--dry-run", "--limit", "5")
    assert said.startswith("5 prompts take about ")
    assert not (tmp_path / "out").exists()


def test_progress_is_lines_in_a_pipe(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("residuum.extraction.progress._SECONDS", 0.0)
    source = write_prompts(tmp_path / "prompts.jsonl", 10)
    _, _, errors = cli("extract", source, "--output", tmp_path / "out", "--capture", "1")
    assert "10 of 10 prompts, " in errors
    assert "tokens/s" in errors
    assert WHAT.layers == (1, 4)
