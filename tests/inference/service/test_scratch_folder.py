"""A service that was killed leaves its temporary folder. The next one removes it, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from svc_common.scratch_folder import remove_abandoned_folders
from tests.waiting import wait_for

SERVICE = [
    sys.executable,
    "-m",
    "inference_svc",
    "--model",
    "none",
    "--store",
    "127.0.0.1:1",
    "--listen",
    "127.0.0.1:0",
]

Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, of this process and of services."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def start(scratch: Path) -> Iterator[Start]:
    """Starts real services. They have their folder before they import vLLM."""
    started: list[subprocess.Popen[bytes]] = []

    def begin() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(SERVICE, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def locked(scratch: Path) -> list[Path]:
    return [path.parent for path in scratch.glob("residuum-*/owner.lock")]


def age(folder: Path) -> None:
    """Let a folder be older than it is."""
    os.utime(folder, (0, 0))


def test_a_service_removes_the_folder_of_one_that_was_killed(scratch: Path, start: Start) -> None:
    first = start()
    wait_for(lambda: locked(scratch), "the folder of the first service")
    (left,) = locked(scratch)
    wait_for((left / "vllm-logging.json").exists, "the first service has begun")
    age(left)
    remove_abandoned_folders()
    assert left.exists(), "its owner lives"
    first.kill()
    first.wait()
    start()
    wait_for(lambda: not left.exists(), "the folder is removed")
    wait_for(lambda: locked(scratch), "the second service has its own")


def test_a_new_folder_is_not_removed(scratch: Path) -> None:
    """Its owner may be about to lock it."""
    new = scratch / "residuum-new"
    new.mkdir()
    (new / "owner.lock").touch()
    remove_abandoned_folders()
    assert new.exists()
    age(new)
    remove_abandoned_folders()
    assert not new.exists()


@pytest.mark.parametrize("what", ["no lock", "a link", "a linked lock", "another name", "another user"])
def test_what_belongs_to_others_stays(scratch: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    folder = scratch / ("other-folder" if what in {"a link", "another name"} else "residuum-folder")
    folder.mkdir()
    if what == "a link":
        (scratch / "residuum-link").symlink_to(folder)
    if what == "a linked lock":
        (scratch / "lock").touch()
        (folder / "owner.lock").symlink_to(scratch / "lock")
    elif what != "no lock":
        (folder / "owner.lock").touch()
    if what == "another user":
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    age(folder)
    before = sorted(scratch.rglob("*"))
    remove_abandoned_folders()
    assert sorted(scratch.rglob("*")) == before
