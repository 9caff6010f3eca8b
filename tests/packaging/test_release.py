"""The requirements of a release: one version, reproducible builds, allowed licences, old Pythons."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from scripts import release_check
from scripts.release_check import NotReadyError, check_changelog

pytestmark = pytest.mark.slow  # it builds wheels

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = ROOT / "pyproject.toml"


def test_the_version_is_in_one_place():
    version = release_check.version_of(PYPROJECT.read_text())
    assert metadata.version("residuum") == version, "make setup installs it anew"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    code = [
        ROOT / name for name in listed if re.match(r"(client|inference_svc|store_svc|svc_common|deploy|scripts)/", name)
    ]
    assert code
    named = re.compile(rf"(?i)(?:residuum|version)\W{{0,4}}v?{re.escape(version)}")
    assert [str(path) for path in code if path.is_file() and named.search(path.read_text(errors="ignore"))] == []


def test_the_newest_entry_of_the_changelog_is_the_version():
    released = "# Changelog\n\n## [0.2.0] - 2026-01-31\n\n- A thing.\n\n## [0.1.0] - 2026-01-01\n"
    check_changelog(released, "0.2.0")
    check_changelog(released.replace("## [0.2.0]", "## [Unreleased]\n\n## [0.2.0]"), "0.2.0")
    for text, version, why in (
        (released, "0.3.0", "says 0.3.0, but the newest entry"),
        (released, "0.1.0", "says 0.1.0, but the newest entry"),
        (released.replace(" - 2026-01-31", ""), "0.2.0", "has no date"),
        (released.replace("[0.2.0] - 2026-01-31", "[Unreleased]"), "0.1.0", "under .Unreleased."),
        ("# Changelog\n", "0.1.0", "no entries"),
        ("## [Unreleased]\n", "0.1.0", "no released entry"),
    ):
        with pytest.raises(NotReadyError, match=why):
            check_changelog(text, version)


def test_the_changelog_can_be_parsed():
    """Between releases, unreleased changes are the only obstacle."""
    changelog, version = (ROOT / "CHANGELOG.md").read_text(), release_check.version_of(PYPROJECT.read_text())
    released = changelog.replace("## [Unreleased]", f"## [{version}] - 2026-01-31", 1)
    check_changelog(released, version)


def test_wheel_and_sdist_builds_are_reproducible(tmp_path):
    built = release_check.check_builds(tmp_path)
    assert [path.name.split("-")[0] for path in built] == ["residuum"] * 2 + ["residuum_server"] * 2
    assert sorted({path.suffix for path in built}) == [".gz", ".whl"]


def test_a_build_that_differs_is_reported(tmp_path, monkeypatch):
    copies = []
    copy_sources = release_check._copy_sources

    def copy_and_change(target):
        tree = copy_sources(target)
        copies.append(tree)
        (tree / "client/residuum/drift.py").write_text(f"TURN = {len(copies)}\n")
        return tree

    monkeypatch.setattr(release_check, "_copy_sources", copy_and_change)
    with pytest.raises(NotReadyError, match="is not reproducible"):
        release_check.check_builds(tmp_path)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_licence_that_is_not_allowed_is_refused(tool, tmp_path, allowed):
    """For client and store. `make licences` checks the same in an environment made from store.lock."""
    pinned = [
        line.split("==")[0] for line in (ROOT / "requirements/store.lock").read_text().splitlines() if "==" in line
    ]
    for name in pinned:
        files = metadata.distribution(name).files
        (about,) = {file.parent for file in files if file.name == "METADATA"}
        (tmp_path / str(about)).mkdir()
        (tmp_path / str(about) / "METADATA").write_text(metadata.distribution(name).read_text("METADATA"))
    if not allowed:
        (tmp_path / "viral-1.dist-info").mkdir()
        (tmp_path / "viral-1.dist-info/METADATA").write_text(
            "Name: viral\nVersion: 1\nLicense-Expression: GPL-3.0-only\n"
        )
    python = tmp_path / "python"  # a Python that finds only these packages
    python.write_text(f"#!/bin/sh\necho {tmp_path}\n")
    python.chmod(0o755)
    checked = subprocess.run(
        [tool("pip-licenses"), "--python", python], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (checked.returncode == 0) is allowed, checked.stdout + checked.stderr
    assert ("grpcio" in checked.stdout) is allowed
    assert ("viral" in checked.stderr) is not allowed


PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def find_interpreter(version):
    """Return a working Python of a version, from PATH, pyenv or uv; None if there is none."""
    home = Path.home()
    kept = [
        *Path(os.environ.get("PYENV_ROOT", home / ".pyenv"), "versions").glob(f"{version}.*"),
        *Path(home, ".local/share/uv/python").glob(f"cpython-{version}.*"),
    ]
    on_path = shutil.which(f"python{version}")
    for candidate in [*([on_path] if on_path else []), *(folder / "bin" / f"python{version}" for folder in kept)]:
        told = subprocess.run([candidate, "-V"], capture_output=True, text=True, check=False)
        if told.returncode == 0 and told.stdout.startswith(f"Python {version}."):
            return candidate
    return None


@pytest.mark.parametrize("python", PYTHONS)
def test_the_clients_dependencies_have_wheels_for_each_python(wheel, tool, python, tmp_path):
    """Dependencies are resolved for that Python from the index, without builds and without newer Python versions."""
    command = [tool("uv"), "pip", "install", "--quiet", "--dry-run", "--python-version", python]
    target = ["--only-binary=:all:", "--target", str(tmp_path), str(wheel)]
    for _ in range(2):  # an index may fail once
        result = subprocess.run([*command, *target], capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return
    pytest.fail(result.stderr)


@pytest.mark.parametrize("python", [python for python in PYTHONS if not sys.version.startswith(python)])
def test_the_client_works_on_each_other_python_that_is_here(wheel, environment, python, tmp_path):
    interpreter = find_interpreter(python)
    if interpreter is None:
        pytest.skip(f"there is no python{python} on this machine")
    ours = environment(wheel, python=interpreter)
    code = """
import residuum, residuum.cli
capture = residuum.Capture(layers=[0, 2], positions="last_prompt", encoding="rp8", dimensions=4)
joy = residuum.Vector.from_array([0.0, 1.0, 0.0, 2.0])
asked = residuum.vllm_xargs(capture, [residuum.Add(joy, layer=1, scale=2.0)])
assert "RP8" in asked["residuum"] and len(asked["residuum_vectors"]) == 1
for name in residuum.__all__:
    getattr(residuum, name)
"""
    subprocess.run([ours, "-I", "-c", code], check=True, cwd=tmp_path)


def test_no_code_needs_a_newer_python_than_the_project_declares(tool):
    """vermin checks the syntax and the names of the standard library."""
    flags = ["--target=3.10-", "--violations", "--no-tips", "--eval-annotations", "--backport", "typing_extensions"]
    stubs = ["--exclude-regex", r"\.pyi$"]  # these check the version at run time
    checked = subprocess.run(
        [
            tool("vermin"),
            *flags,
            *stubs,
            *(str(ROOT / name) for name in ("client", "inference_svc", "store_svc", "svc_common")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout
