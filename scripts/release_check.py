"""Checks whether this tree can be released. `make release-check` runs it; CONTRIBUTING.md has all steps of a release.

    .venv/bin/python -m scripts.release_check             all checks
    .venv/bin/python -m scripts.release_check --builds    only the checks that also hold between releases

* The version in pyproject.toml is that of the changelog's newest entry, which has a date, and it has no tag yet.
* Wheels and sdists of the client and of the server are reproducible byte by byte, also wheels built from the sdists.
* Their metadata is valid.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.metadata import ExceptionGroup, Metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent

_ENTRY = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d{2}-\d{2}))?\s*$", re.MULTILINE)
_SOURCES = (
    *("LICENSE", "README.md", "client", "inference_svc", "protos", "pyproject.toml", "server", "store_svc"),
    "svc_common",
)
"""The files and folders that the distributions are built from."""

PROJECTS = (".", "server")
"""The folders of the distributions."""


class NotReadyError(Exception):
    """The tree cannot be released. The message says why, and what to do."""


def version_of(pyproject: str) -> str:
    """Return the version in pyproject.toml.

    Raises:
        NotReadyError: There is none.
    """
    found = re.search(r'^version = "([^"]+)"', pyproject, re.MULTILINE)
    if found is None:
        raise NotReadyError("pyproject.toml has no version")
    return found.group(1)


def check_changelog(changelog: str, version: str) -> None:
    """Check that the newest entry of the changelog is that of a version.

    Raises:
        NotReadyError: It is not.
    """
    entries = list(_ENTRY.finditer(changelog))
    if not entries:
        raise NotReadyError("CHANGELOG.md has no entries")
    newest = entries[0]
    if newest["version"] == "Unreleased":
        end = entries[1].start() if len(entries) > 1 else len(changelog)
        if changelog[newest.end() : end].strip():
            raise NotReadyError(
                f"CHANGELOG.md has changes under [Unreleased]: rename it to [{version}] - YYYY-MM-DD, and add an "
                "empty [Unreleased] above"
            )
        if len(entries) == 1:
            raise NotReadyError("CHANGELOG.md has no released entry")
        newest = entries[1]
    if newest["version"] != version:
        raise NotReadyError(
            f"pyproject.toml says {version}, but the newest entry of CHANGELOG.md is {newest['version']}"
        )
    if newest["date"] is None:
        raise NotReadyError(f"the entry of {version} in CHANGELOG.md has no date")


def check_untagged(version: str) -> None:
    """Check that a version was not released before.

    Raises:
        NotReadyError: It has a tag.
    """
    listed = subprocess.run(
        ["git", "tag", "--list", f"v{version}"],  # noqa: S607 - git is wherever it is
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    if listed.stdout.strip():
        raise NotReadyError(f"v{version} is tagged already; raise the version in pyproject.toml")


def check_builds(folder: Path) -> list[Path]:
    """Build the wheel and the sdist of both distributions twice, and each wheel from its sdist. Return the first ones.

    Args:
        folder: An empty folder for all builds.

    Raises:
        NotReadyError: Two builds differ, a build fails, or the metadata of one is not valid.
    """
    trees = [_copy_sources(folder / f"tree{turn}") for turn in range(2)]
    return [path for name in PROJECTS for path in _check_project(name, trees, folder / "built" / name)]


def _check_project(name: str, trees: list[Path], folder: Path) -> list[Path]:
    built = [_build(tree / name, folder / f"dist{turn}") for turn, tree in enumerate(trees)]
    for first, second in zip(*built, strict=True):
        if _digest(first) != _digest(second):
            raise NotReadyError(f"{first.name} is not reproducible: a second build differs")
    sdist, wheel = sorted(built[0], key=lambda path: path.suffix != ".gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    (again,) = _build(unpacked, folder / "dist-from-sdist", "wheel")
    if _digest(again) != _digest(wheel):
        raise NotReadyError(
            f"{wheel.name} built from the sdist differs from that of the tree: {_differing(again, wheel)}"
        )
    for path in built[0]:
        _check_metadata(path)
    return built[0]


def _copy_sources(target: Path) -> Path:
    target.mkdir(parents=True)
    for name in _SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
        else:
            shutil.copy2(ROOT / name, target / name)
    return target


def _build(tree: Path, out: Path, *targets: str) -> list[Path]:
    flags = [flag for target in targets or ("sdist", "wheel") for flag in ("--target", target)]
    made = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", str(out), *flags],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise NotReadyError(f"the distributions cannot be built:\n{made.stderr}")
    return sorted(out.iterdir())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _differing(one: Path, other: Path) -> str:
    contents = [{item.filename: item.CRC for item in zipfile.ZipFile(path).infolist()} for path in (one, other)]
    return (
        ", ".join(sorted({name for name, _ in contents[0].items() ^ contents[1].items()}))
        or "the order or dates of files"
    )


def _check_metadata(path: Path) -> None:
    for text in _metadata_in(path):
        try:
            about = Metadata.from_email(text, validate=True)
        except ExceptionGroup as errors:
            told = "; ".join(str(error) for error in errors.exceptions)
            raise NotReadyError(f"the metadata of {path.name} is not valid: {told}") from None
        if about.description_content_type != "text/markdown" or not about.description:
            raise NotReadyError(f"{path.name} does not have README.md as its description")


def _metadata_in(path: Path) -> Iterator[bytes]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield from (wheel.read(name) for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    else:
        with tarfile.open(path) as sdist:
            for item in sdist.getmembers():
                if item.name.count("/") == 1 and item.name.endswith("/PKG-INFO"):
                    file = sdist.extractfile(item)
                    assert file is not None  # noqa: S101 - it is a regular file
                    yield file.read()


def _problems(check: Callable[[str], None], argument: str) -> list[str]:
    try:
        check(argument)
    except NotReadyError as error:
        return [str(error)]
    return []


def _check_changelog(version: str) -> None:
    check_changelog((ROOT / "CHANGELOG.md").read_text(), version)


def _show_builds(folder: str) -> None:
    for path in check_builds(Path(folder)):
        print(f"{_digest(path)}  {path.name}")


def main() -> int:
    """Run the checks. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builds", action="store_true", help="check only the builds")
    options = parser.parse_args()
    version = version_of((ROOT / "pyproject.toml").read_text())
    problems = [] if options.builds else [*_problems(check_untagged, version), *_problems(_check_changelog, version)]
    with tempfile.TemporaryDirectory(prefix="residuum-release-") as scratch:
        problems += _problems(_show_builds, scratch)
    for problem in problems:
        print(f"release-check: {problem}", file=sys.stderr)
    if not problems:
        print(f"release-check: {version} is {'reproducible' if options.builds else 'ready'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
