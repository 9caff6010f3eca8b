"""Fixtures of the packaging tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel, built without downloads by the environment's hatchling."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, capture_output=True)
    (built,) = folder.glob("residuum-*.whl")
    return built


@pytest.fixture
def tool():
    """A function from the name of a command-line tool to its path in the tests' environment."""

    def find(name):
        return str(Path(sys.executable).parent / name)

    return find
