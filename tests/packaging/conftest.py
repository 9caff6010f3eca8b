"""What the packaging tests share."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel, built by the environment's own hatchling: no download."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, capture_output=True)
    (built,) = folder.glob("residuum-*.whl")
    return built


@pytest.fixture
def tool():
    """A function: name of a command-line tool → its path in the environment that runs the tests."""

    def find(name):
        return str(Path(sys.executable).parent / name)

    return find
