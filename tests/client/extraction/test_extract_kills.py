"""`residuum extract` when its process is killed, and when an inference service dies."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

import residuum
from tests.client.extraction.test_extract import WHAT, check_rows, files, job_id, write_prompts
from tests.client.support.peer import RunningPeer
from tests.client.support.running_store import RunningStore
from tests.waiting import wait_for

COUNT = 200
FLAGS = ["--capture", "1,4", "--keep", "y,id", "--shard-bytes", "600", "--max-concurrency", "4"]


@pytest.fixture
def kind():
    return residuum.Client


def start(source, folder, endpoint, *more):
    command = [sys.executable, "-m", "residuum", "extract", str(source), "--output", str(folder)]
    return subprocess.Popen(
        [*command, "--endpoint", endpoint, *FLAGS, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process):
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return out


def shards_of(folder):
    return len(list(folder.glob("rows-*.safetensors")))


@pytest.fixture
def source(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", COUNT)


@pytest.fixture(scope="module")
def whole(running_peer, tmp_path_factory):
    """The folder of a job that nothing interrupted."""
    running_peer.servicer.reset()
    folder = tmp_path_factory.mktemp("whole")
    source = write_prompts(folder / "prompts.jsonl", COUNT)
    with residuum.Client(running_peer.endpoint) as client:
        client.extract(source, folder / "rows", capture=WHAT, keep="y,id", shard_bytes=600, progress=False)
    assert running_peer.servicer.calls.count("Generate") == COUNT
    return folder / "rows"


def at_most(deltas, prompts, go_on):
    """Let a number of generations begin, and the others only when an event is set."""
    begun = itertools.count()

    def held(*arguments):
        assert next(begun) < prompts or go_on.wait(60)
        yield from deltas(*arguments)

    return held


def test_a_job_that_is_killed_makes_the_same_files(source, endpoint, peer, tmp_path, whole, monkeypatch):
    """It is killed while it writes some shard, three times, and continues each time."""
    chance, out = random.Random(), tmp_path / "killed"
    kills, deltas = 0, peer._deltas
    for least in (1, 4, 8):
        killed = threading.Event()
        monkeypatch.setattr(peer, "_deltas", at_most(deltas, 60, killed))  # it cannot end before it is killed
        process = start(source, out, endpoint)
        wait_for(
            lambda process=process, least=least: process.poll() is not None or shards_of(out) >= least, every=0.002
        )
        time.sleep(chance.random() * 0.03)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed.set()
        kills += process.returncode == -signal.SIGKILL
        found = residuum.Extracted(out)
        assert least <= shards_of(out)
        assert [line["index"] for line in found.prompts] == list(range(len(found.prompts)))
    assert kills == 3
    monkeypatch.undo()
    ended(start(source, out, endpoint))
    assert shards_of(out) > 10
    assert files(out) == files(whole)
    found = residuum.Extracted(out)
    check_rows(found, COUNT)
    assert found.labels("id")[-1] == f"p{COUNT - 1}"
    with residuum.Client(endpoint) as client:
        assert {item.state for item in client.captures(prefix=job_id(out))} <= {"open"}


def test_ctrl_c_says_how_to_continue(source, endpoint, peer, tmp_path):
    peer.script.hold = threading.Event()
    process = start(source, tmp_path / "out", endpoint)
    assert peer.generating.wait(30)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "To continue the job, run the same command again" in errors
    assert "Traceback" not in errors


def test_a_dry_run_that_is_stopped_leaves_no_captures(source, endpoint, peer, tmp_path):
    with residuum.Client(endpoint) as client:
        before = {item.capture_id for item in client.captures(prefix="extract-")}  # of other tests
    peer.script.hold = threading.Event()
    process = start(source, tmp_path / "out", endpoint, "--dry-run", "--max-tokens", "2")
    assert peer.generating.wait(30)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    with residuum.Client(endpoint) as client:
        assert {item.capture_id for item in client.captures(prefix="extract-")} <= before


def test_a_complete_job_asks_for_nothing_again(source, endpoint, peer, whole):
    assert "all 200 prompts were done before" in ended(start(source, whole, endpoint))
    assert peer.calls.count("Generate") == 0


@pytest.fixture
def second(store):
    running = RunningPeer(store.endpoint)
    yield running
    running.stop()


async def test_two_services_share_the_prompts(client, peer, second, source, tmp_path):
    found = await client.extract(source, tmp_path / "out", capture=WHAT, endpoints=[second.endpoint], progress=False)
    check_rows(found, COUNT)
    counts = [servicer.calls.count("Generate") for servicer in (peer, second.servicer)]
    assert sum(counts) == COUNT
    assert min(counts) > COUNT / 4


async def test_services_may_have_stores_of_their_own(client, source, tmp_path):
    own = RunningStore(tmp_path / "store")
    second = RunningPeer(own.endpoint)
    try:
        found = await client.extract(
            source, tmp_path / "out", capture=WHAT, endpoints=[second.endpoint], progress=False
        )
        check_rows(found, COUNT)
        with residuum.Client(store=own.endpoint) as stored:
            assert list(stored.captures()) == []
    finally:
        second.stop()
        own.stop()


def slowly(deltas, is_back=None):
    """Make generations slow; and those after the first 100 very slow, until an event is set."""
    begun = itertools.count()

    def slow(*arguments):
        time.sleep(0.02)
        if is_back is not None and next(begun) > 100:
            is_back.wait(2)
        yield from deltas(*arguments)

    return slow


def noting(deltas, event):
    """Set an event when a generation begins."""

    def noted(*arguments):
        event.set()
        yield from deltas(*arguments)

    return noted


async def test_a_service_that_dies_is_left_out_and_taken_back(client, peer, store, source, tmp_path):
    """It dies with prompts that it has accepted, and comes back at the same address."""
    dying = RunningPeer(store.endpoint)
    port = int(dying.endpoint.rpartition(":")[2])
    again = []
    is_back = threading.Event()
    # Slow, so that some prompts run when it dies, and some are left when it is back.
    peer._deltas = slowly(peer._deltas, is_back)
    dying.servicer._deltas = slowly(dying.servicer._deltas)

    def die():
        while dying.servicer.calls.count("Generate") < 20:
            time.sleep(0.005)
        dying.stop()
        again.append(RunningPeer(store.endpoint, port))
        again[0].servicer._deltas = noting(again[0].servicer._deltas, is_back)

    thread = threading.Thread(target=die)
    thread.start()
    try:
        with pytest.warns(residuum.OutageWarning, match="leaves out .*The other service continues"):
            found = await client.extract(
                source, tmp_path / "out", capture=WHAT, endpoints=[dying.endpoint], max_concurrency=8, progress=False,
                max_tokens=1,
            )  # fmt: skip
    finally:
        del peer._deltas
        thread.join()
        for running in again:
            running.stop()
    check_rows(found, COUNT)
    assert again[0].servicer.calls.count("Generate") > 0
    assert json.loads((tmp_path / "out" / "index.json").read_text())["failed"] == 0


async def test_services_of_different_models_are_refused(client, second, source, tmp_path):
    second.servicer.script.num_layers = 7
    with pytest.raises(residuum.InvalidRequest, match=r"different models.*num_layers is 7"):
        await client.extract(source, tmp_path / "out", capture=WHAT, endpoints=[second.endpoint], progress=False)
