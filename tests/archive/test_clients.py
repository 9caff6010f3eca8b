"""What clients and the command see of an archive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import residuum
from residuum.cli.services.doctor import _examine_stats
from residuum.v1 import store_pb2
from tests.archive.s3 import Call, Proxy
from tests.archive.support import MOVED, PROMPT, capture, listed_states, wait_for_state
from tests.store.support import POST, Client, describe, row, serving
from tests.waiting import wait_for

NOBODY = "127.0.0.1:1"
"""No inference service. Reading needs none."""


@pytest.fixture
def plain(tmp_path: Path, url: str) -> Iterator[Client]:
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (_, plain):
        yield plain


@pytest.fixture
def client(plain: Client) -> Iterator[residuum.Client]:
    with residuum.Client(NOBODY, store=plain.target, timeout=20) as client:
        yield client


def test_a_client_waits_for_the_archive_and_reads_from_it(plain: Client, client: residuum.Client) -> None:
    capture(plain)
    manifest = client.manifest("a", wait=20, archived=True)
    assert manifest.archive_state in ("copied", "moved")
    wait_for(lambda: listed_states(plain) == {"a": MOVED}, "move")
    acts = client.activations("a")
    expected = np.stack([row((0, POST, 2, at)) for at in range(4)])
    np.testing.assert_array_equal(acts[2], expected)
    assert [item.archive_state for item in client.captures()] == ["moved"]
    assert "archive_state" not in client.manifest("a").to_dict(), "an exported manifest does not depend on the moment"
    (stats,) = client.stats()
    assert (stats.archive_moved, stats.archive_pending, stats.archive_behind) == (1, 0, "")


def test_a_client_waits_for_an_archive_that_is_away(plain: Client, client: residuum.Client, s3: Proxy) -> None:
    capture(plain)
    wait_for_state(plain, MOVED)
    wait_for(lambda: not plain.stub.GetStats(store_pb2.GetStatsRequest()).num_chunks, "empty database")
    s3.before = lambda call: call.answer(403, "ExpiredToken")
    with pytest.raises(residuum.ArchiveUnreachable, match="only in the archive"):
        read_soon(client)
    timer = threading.Timer(1.0, s3.work)
    timer.start()
    assert client.activations("a", timeout=60).manifest.is_complete
    timer.join()


def test_reads_of_many_captures_wait_for_an_archive_that_is_away(
    plain: Client, client: residuum.Client, s3: Proxy
) -> None:
    for name in "ab":
        capture(plain, name)
    wait_for_state(plain, MOVED, "ab")
    wait_for(lambda: not plain.stub.GetStats(store_pb2.GetStatsRequest()).num_chunks, "empty database")
    s3.before = lambda call: call.answer(403, "ExpiredToken")
    with pytest.raises(residuum.ArchiveUnreachable, match=r"only in the archive.* tried again for"):
        read_soon(client, ["a", "b"])
    threading.Timer(1.0, s3.work).start()
    assert [acts.manifest.capture_id for acts in client.activations(["b", "a"], timeout=60)] == ["b", "a"]
    s3.before = lambda call: call.answer(403, "ExpiredToken")
    threading.Timer(1.0, s3.work).start()
    assert len(client.rows(["a", "b"], layer=2)) == 2 * PROMPT


def read_soon(client: residuum.Client, capture_ids: str | list[str] = "a") -> None:
    try:
        client.activations(capture_ids, timeout=0.5)
    except residuum.DeadlineExceeded:  # on a busy machine, no attempt had an answer
        client.activations(capture_ids, timeout=30)


def test_archived_alone_waits_and_a_limit_ends_the_wait(plain: Client, client: residuum.Client, s3: Proxy) -> None:
    s3.before = failing_puts
    capture(plain)
    before = time.monotonic()
    assert client.manifest("a", wait=1, archived=True).archive_state == "pending"
    assert time.monotonic() - before >= 1
    timer = threading.Timer(1.0, s3.work)
    timer.start()
    assert client.manifest("a", archived=True).archive_state in ("copied", "moved")
    timer.join()


def test_the_command_fails_if_the_capture_is_not_in_the_archive(plain: Client, s3: Proxy, tmp_path: Path) -> None:
    s3.before = failing_puts
    capture(plain)
    done = run(plain, "manifest", "a", "--archived", "--timeout", "1")
    assert done.returncode == 1
    assert "The capture a is not in the archive yet" in done.stderr
    assert json.loads(done.stdout)["state"] == "CAPTURE_STATE_COMPLETE"
    plain.open(describe("open"))
    done = run(plain, "manifest", "open", "--archived", "--timeout", "1")
    assert done.returncode == 1
    assert "still open" in done.stderr
    s3.work()
    with serving(tmp_path / "plain") as (_, other):
        capture(other)
        done = run(other, "manifest", "a", "--archived")
        assert done.returncode == 1
        assert "has no archive" in done.stderr


def failing_puts(call: Call) -> None:
    if call.method == "PUT":
        call.answer(403, "ExpiredToken")


def run(plain: Client, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "RESIDUUM_ENDPOINT": NOBODY,
        "RESIDUUM_STORE": plain.target,
    }
    line = [sys.executable, "-m", "residuum", *arguments, "--store", plain.target, "--json"]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=60)


def command(plain: Client, *arguments: str) -> str:
    done = run(plain, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_waits_for_the_archive_and_shows_it(plain: Client) -> None:
    capture(plain)
    assert json.loads(command(plain, "manifest", "a", "--archived"))["state"] == "CAPTURE_STATE_COMPLETE"
    wait_for_state(plain, MOVED)
    stats = json.loads(command(plain, "stats"))
    assert stats["archive_moved"] == 1
    assert stats["archive_url"].startswith("s3://")


def test_doctor_says_whether_captures_reach_the_archive(client: residuum.Client) -> None:
    (stats,) = client.stats()
    (finding,) = [item for item in _examine_stats(stats, 0.0) if item.check.endswith(": archive")]
    assert finding.ok
    damaged = replace(stats, archive_not_copied=2)
    (finding,) = [item for item in _examine_stats(damaged, 0.0) if item.check.endswith(": archive")]
    assert not finding.ok
    assert "2 captures are not copied" in finding.detail
    behind = replace(stats, archive_behind="403 Forbidden", archive_pending=7)
    (finding,) = [item for item in _examine_stats(behind, 0.0) if item.check.endswith(": archive")]
    assert not finding.ok
    assert "403 Forbidden" in finding.detail
    assert "7 captures wait" in finding.detail
