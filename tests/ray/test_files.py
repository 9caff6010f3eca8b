"""`residuum extract --ray`: what it refuses before it starts services or sends prompts, and what it prints."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import dataset as tables
from pyarrow import parquet

import residuum
from residuum.cli.main import make_parser
from residuum.ray import files
from residuum.ray import services as serving
from residuum.ray.extracting import extract

CLIENT = str(Path(residuum.__file__).parents[1])


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "residuum", "extract", *map(str, arguments)],
        check=False, capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": CLIENT}, **options,
    )  # fmt: skip


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("The sea", "word " * 500, "A train")))
    return path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--keep", "label"], "no column 'label'. It has 'text'. Name the column with the prompt with --column"),
        (["--column", "prompt"], "no column 'prompt'. It has 'text'"),
    ],
)
def test_a_job_that_cannot_run_starts_no_service(prompts, tmp_path, flags, message):
    done = command(
        prompts, "--output", tmp_path / "rows", "--capture", "0", "--ray", "local", "--gpus", "0",
        "--serve", "/no/model", *flags,
    )  # fmt: skip
    assert done.returncode == 1
    assert message in done.stderr
    assert "/no/model" not in done.stderr, "no service has tried to start"


@pytest.mark.parametrize(
    ("split", "message"),
    [("", "has files of the splits test, train. Their rows should not be mixed"), ("train", "no column 'label'")],
)
def test_splits_of_a_folder_are_not_mixed(tmp_path, split, message):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("test", "train"):
        parquet.write_table(pa.table({"text": ["The sea"], name: [1]}), data / f"{name}-00000-of-00001.parquet")
    done = command(
        data / split, "--output", tmp_path / "rows", "--capture", "0", "--ray", "local", "--gpus", "0",
        "--serve", "/no/model", "--keep", "label",
    )  # fmt: skip
    assert done.returncode == 1
    assert message in done.stderr
    assert not split or "'train'" in done.stderr, "the columns are those of the split"


@pytest.mark.parametrize("split", ["", "train"])
def test_a_split_that_lacks_a_file_is_named(tmp_path, split):
    data = tmp_path / "data"
    data.mkdir()
    parquet.write_table(pa.table({"text": ["The sea"]}), data / "train-00000-of-00002.parquet")
    done = command(
        data / split, "--output", tmp_path / "rows", "--capture", "0", "--ray", "local", "--gpus", "0",
        "--serve", "/no/model", "--keep", "label",
    )  # fmt: skip
    assert done.returncode == 1
    assert "has 1 of 2 files" in " ".join(done.stderr.split())


def test_a_prompt_that_fails_is_a_row_and_stop_ends_the_job(services, prompts, tmp_path):
    endpoints = [part for name in services["inference"] for part in ("--endpoint", name)]
    job = [prompts, "--capture", "0", "--ray", "local", *endpoints]
    # The output is a path relative to the folder of the command, and Ray's workers run in other folders.
    # One service is away.
    done = command(*job, "--endpoint", "127.0.0.1:1", "--output", "rows", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 prompts failed" in done.stdout
    assert "OutageWarning: The job leaves out 127.0.0.1:1 until it answers again" in done.stderr
    assert tables.dataset(tmp_path / "rows").to_table()["error"].null_count
    done = command(*job, "--output", tmp_path / "stopped", "--on-error", "stop")
    assert done.returncode == 1
    # Messages of Ray's workers may come later.
    error = r"^residuum: row 1 of a batch of the dataset: .* or use --on-error skip\.$"
    assert re.search(error, done.stderr, re.MULTILINE), done.stderr


def test_a_service_that_is_not_there_is_one_error(prompts, tmp_path):
    done = command(
        prompts, "--output", tmp_path / "rows", "--capture", "0", "--ray", "local", "--endpoint", "127.0.0.1:1"
    )  # fmt: skip
    assert done.returncode == 1
    error = r"^residuum: Nothing answers at 127\.0\.0\.1:1, .* checks each step\.$"
    assert re.search(error, done.stderr, re.MULTILINE), done.stderr
    assert "creation task" not in done.stderr, "Ray prints hundreds of lines about an actor that does not start"


SEVERAL_NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def two_nodes():
    """The address of a cluster of two nodes, which is not the cluster of the other tests."""
    with subprocess.Popen(
        [sys.executable, "-c", SEVERAL_NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()


def test_on_several_nodes_paths_are_refused(services, two_nodes, prompts, tmp_path):
    job = ["--capture", "0", "--ray", two_nodes, "--endpoint", services["inference"][0]]
    done = command(prompts, "--output", f"file://{tmp_path}/rows", *job)
    assert done.returncode == 1
    assert f"The input {prompts} is a path, and the cluster has 2 nodes" in done.stderr
    done = command(f"file://{prompts}", "--output", "rows", *job, cwd=tmp_path)
    assert done.returncode == 1
    assert "The output rows is a path, and the cluster has 2 nodes, each with its own disk" in done.stderr
    assert f"file://{tmp_path}/rows" in done.stderr
    assert not (tmp_path / "rows").exists()
    done = command(f"file://{prompts}", "--output", f"file://{tmp_path}/rows", *job)
    assert done.returncode == 0, done.stderr
    assert tables.dataset(tmp_path / "rows").count_rows()


def test_the_help_has_the_defaults():
    """The command cannot import them, because it also runs without Ray."""
    (commands,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    help_of = {action.dest: action.help for action in commands.choices["extract"]._actions}
    size = inspect.signature(extract).parameters["batch_size"].default
    assert help_of["batch_size"].endswith(f"(default: {size})")
    assert help_of["node_timeout"].endswith(f"(default: {serving.NODE_SECONDS:g})")
    assert help_of["max_restarts"].endswith(f"(default: {serving.RESTARTS})")


def test_prompts_of_files_are_those_that_the_files_have(cluster, tmp_path):
    """Ray's readers would make 7 of "007", and would end lines within a prompt."""
    lines = ['{"text": "123", "id": "007", "n": 9007199254740993}', '{"text": "5", "id": "2020-01-01", "n": null}']
    for suffix in (".jsonl", ".ndjson"):
        path = tmp_path / f"prompts{suffix}"
        path.write_text("\ufeff" + "\n\n".join(lines))
        assert files._read(str(path), suffix, "text").take_all() == [json.loads(line) for line in lines]
    path = tmp_path / "prompts.txt"
    path.write_text("\ufeffThe\u2028sea\r\n \nA\x0ctrain", newline="")
    found = files._read(str(path), ".txt", "prompt").take_all()
    assert found == [{"prompt": "The\u2028sea"}, {"prompt": "A\x0ctrain"}]


@pytest.mark.parametrize(
    ("text", "message"), [(b"[1]\n", "is [1], not a JSON object"), (b"{\n", "is not JSON"), (b"\xff\n", "is not UTF-8")]
)
def test_a_line_that_is_not_json_is_named(cluster, tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"text": "The sea"}\n' + text)
    with pytest.raises(residuum.InvalidRequest, match=re.escape(f"line 2 of prompts.jsonl {message}")):
        files._read(str(path), ".jsonl", "text").materialize()
