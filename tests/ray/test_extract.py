"""`residuum.ray.extract` on two real services: every row equals that of `Client.extract`, and no prompt is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import ray
from jobs import CAPTURE, TEXTS, check_rows, command_of, processes
from pyarrow import dataset as tables
from pyarrow import parquet

import residuum
import residuum.ray


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": at}) + "\n" for at, text in enumerate(TEXTS)))
    return path


def test_rows_equal_those_of_extract_and_no_capture_is_left(cluster, services, client, jsonl, tmp_path):
    rows = residuum.ray.extract(
        ray.data.read_json(str(jsonl), lines=True), services["inference"], capture=CAPTURE, keep="id", batch_size=16
    )
    rows.write_parquet(str(tmp_path / "rows"))
    table = parquet.read_table(tmp_path / "rows")
    check_rows(table, client, tmp_path / "reference")
    assert table["error"].null_count == len(table)
    assert [item.capture_id for item in client.captures(prefix="ray-")] == []


def test_prompts_that_fail_are_rows(cluster, services, client):
    long = "word " * 500
    items = [{"text": text, "id": at} for at, text in enumerate([*TEXTS[:10], long, *TEXTS[10:20], long])]
    rows = residuum.ray.extract(
        ray.data.from_items(items), services["inference"], capture=CAPTURE, keep=["id"], batch_size=4
    ).to_pandas()
    assert sorted(rows["id"].unique()) == list(range(22))
    failed = rows[rows["error"].notna()]
    assert sorted(failed["id"]) == [10, 21]
    assert all(text.startswith("PROMPT_TOO_LONG: ") for text in failed["error"])
    assert failed["blocks.0.hook_resid_post"].isna().all()
    assert rows[rows["error"].isna()]["blocks.0.hook_resid_post"].notna().all()


def test_tables_have_one_schema_even_if_every_prompt_fails(cluster, services):
    good = residuum.ray.extract(ray.data.from_items([{"text": "The sea"}]), services["inference"], capture=CAPTURE)
    bad = residuum.ray.extract(ray.data.from_items([{"text": "word " * 500}]), services["inference"], capture=CAPTURE)
    schemas = [dataset.materialize().schema().base_schema for dataset in (good, bad)]
    assert schemas[0].equals(schemas[1])


def test_stop_raises_with_the_prompt(cluster, services):
    rows = residuum.ray.extract(
        ray.data.from_items([{"text": "word " * 500}]), services["inference"], capture=CAPTURE, on_error="stop"
    )
    with pytest.raises(residuum.ExtractStopped, match=r"row 0 of a batch of the dataset.*on_error='skip'"):
        rows.materialize()


def test_bad_arguments(cluster, services):
    prompts = ray.data.from_items([{"text": "a"}])
    with pytest.raises(residuum.InvalidRequest, match=r"no column 'label'.*It has 'text'"):
        residuum.ray.extract(prompts, services["inference"], capture=CAPTURE, keep="label")
    with pytest.raises(residuum.InvalidRequest, match="no service"):
        residuum.ray.extract(prompts, [], capture=CAPTURE)
    with pytest.raises(residuum.InvalidRequest, match="on_error='ignore'"):
        residuum.ray.extract(prompts, services["inference"], capture=CAPTURE, on_error="ignore")
    rows = residuum.ray.extract(prompts, "127.0.0.1:1", capture=CAPTURE, timeout=3)
    with pytest.raises(residuum.Unreachable, match=r"Nothing answers at 127\.0\.0\.1:1"):
        rows.materialize()


def test_the_command_on_this_machine(services, client, jsonl, tmp_path):
    endpoints = [part for name in services["inference"] for part in ("--endpoint", name)]
    done = subprocess.run(
        [sys.executable, "-m", "residuum", "extract", str(jsonl), "--output", str(tmp_path / "rows"), "--capture",
         "0,2", "--keep", "id", "--ray", "local", *endpoints],
        check=False, capture_output=True, text=True, timeout=200, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0 prompts failed" in done.stdout
    check_rows(tables.dataset(tmp_path / "rows").to_table(), client, tmp_path / "reference")


def test_an_actor_that_is_killed_loses_and_doubles_nothing(cluster, services, client, tmp_path):
    texts = TEXTS * 5
    rows = residuum.ray.extract(
        ray.data.from_items([{"text": text, "id": at} for at, text in enumerate(texts)]), services["inference"],
        capture=CAPTURE, keep="id", batch_size=32, max_concurrency=8,
    )  # fmt: skip
    killed = []

    def kill():
        until = time.monotonic() + 60
        while not list(client.captures(prefix="ray-")) and time.monotonic() < until:
            time.sleep(0.01)
        killed.extend(pid for pid in processes() if b"MapWorker" in command_of(pid))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    rows.write_parquet(str(tmp_path / "rows"))
    killer.join()
    assert killed, "no actor ran while there were captures"
    table = parquet.read_table(tmp_path / "rows")
    assert table["error"].null_count == len(table)
    check_rows(table, client, tmp_path / "reference", texts)
    assert [item.capture_id for item in client.captures(prefix="ray-")] == []


def test_a_service_that_is_killed_loses_no_prompt(cluster, services, client, tmp_path):
    """The last test: it kills the second service while it has prompts."""
    texts = TEXTS * 5
    rows = residuum.ray.extract(
        ray.data.from_items([{"text": text, "id": at} for at, text in enumerate(texts)]), services["inference"],
        capture=CAPTURE, keep="id", batch_size=32, max_concurrency=8,
    )  # fmt: skip

    def kill():
        with residuum.Client(services["inference"][1], timeout=5) as other:
            until = time.monotonic() + 60
            while not list(other.captures(prefix="ray-")) and time.monotonic() < until:
                time.sleep(0.01)
        os.killpg(services["pids"][1], signal.SIGKILL)
        killed.append(time.monotonic())

    killed = []
    killer = threading.Thread(target=kill)
    killer.start()
    rows.write_parquet(str(tmp_path / "rows"))
    assert killed, "the job was over before the service was killed"
    killer.join()
    table = parquet.read_table(tmp_path / "rows")
    assert table["error"].null_count == len(table)
    check_rows(table, client, tmp_path / "reference", texts)
