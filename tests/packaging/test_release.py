"""The requirements of a release: one version, reproducible builds, allowed licences, old Pythons."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts import licences, release_check, sbom
from scripts.release_check import NotReadyError, check_changelog

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
        (released, "0.3.0", "says 0.3.0, and the newest entry"),
        (released, "0.1.0", "says 0.1.0, and the newest entry"),
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
    assert sorted(path.suffix for path in built) == [".gz", ".whl"]


def test_a_build_that_differs_is_reported(tmp_path, monkeypatch):
    copies = []
    copy_sources = release_check._copy_sources

    def copy_and_change(target):
        tree = copy_sources(target)
        copies.append(tree)
        (tree / "client/residuum/drift.py").write_text(f"TURN = {len(copies)}\n")
        return tree

    monkeypatch.setattr(release_check, "_copy_sources", copy_and_change)
    with pytest.raises(NotReadyError, match="differently"):
        release_check.check_builds(tmp_path)


@pytest.mark.parametrize("part", licences.GUARDED)
def test_every_dependency_carries_a_licence_that_is_allowed(part):
    packages = licences.needed_by(part)
    assert {"grpcio", "numpy", "protobuf"} <= {package.name for package in packages}
    assert licences.not_allowed(packages) == []


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True),
        ("MIT OR GPL-3.0-only", True),
        ("Apache-2.0 AND BSD-2-Clause", True),
        ("Apache-2.0 AND GPL-3.0-only", False),
        ("GPL-3.0-or-later", False),
        ("LGPL-2.1-or-later", False),
        ("", False),
    ],
)
def test_the_allowed_licences(licence, allowed):
    package = licences.Package("something", "1", licence, ())
    assert (licences.not_allowed([package]) == []) == allowed


def test_a_licence_exception_is_for_one_package():
    assert licences.not_allowed([licences.Package("crc32c", "1", "LGPL-2.1-or-later", ())]) == []


def test_required_packages_are_those_in_the_lock():
    lock = (ROOT / "requirements/store.lock").read_text()
    pinned = {line.split("==")[0] for line in lock.splitlines() if "==" in line}
    assert {package.name for package in licences.needed_by("store")} == pinned


def test_bills_of_materials_name_every_package_and_its_licence(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767225600")
    for part in licences.PARTS:
        text = sbom.document(part)
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
        listed = {item["name"]: item for item in json.loads(text)["components"]}
        needed = {package.name: package for package in licences.needed_by(part)}
        assert {name: item["version"] for name, item in listed.items()} == {
            name: package.version for name, package in needed.items()
        }
        assert all(("licenses" in listed[name]) == bool(package.licence) for name, package in needed.items())
        assert listed["crc32c"]["licenses"] == [{"license": {"id": "LGPL-2.1-or-later"}}]
    assert sbom.document("store") == sbom.document("store"), "the same each time"


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
def test_the_clients_dependencies_have_wheels_for_each_python(wheel, python, tmp_path):
    """pip resolves the dependencies for each Python from the index, with wheels only."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-input"]
    target = ["--python-version", python, "--only-binary=:all:", "--target", str(tmp_path), str(wheel)]
    for _ in range(2):  # retry once, because the index may fail
        result = subprocess.run([*command, *target], capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return
    pytest.fail(result.stderr)


@pytest.mark.parametrize("python", [python for python in PYTHONS if not sys.version.startswith(python)])
def test_the_client_works_on_each_other_installed_python(wheel, python, tmp_path):
    interpreter = find_interpreter(python)
    if interpreter is None:
        pytest.skip(f"there is no python{python} on this machine")
    subprocess.run([interpreter, "-m", "venv", str(tmp_path / "venv")], check=True)
    ours = tmp_path / "venv/bin/python"
    command = [ours, "-m", "pip", "install", "--quiet", "--no-input", "--only-binary=:all:", wheel]
    subprocess.run(command, check=True, capture_output=True)
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
