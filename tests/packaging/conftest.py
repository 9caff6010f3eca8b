"""Fixtures of the packaging tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(project, folder):
    """Build a wheel with the environment's own hatchling, without a download."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(project)], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The client's wheel."""
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def server_wheel(tmp_path_factory):
    """The services' wheel."""
    return build(ROOT / "server", tmp_path_factory.mktemp("server-wheel"))


@pytest.fixture(scope="session")
def tool():
    """A function from the name of a command-line tool to its path in the tests' environment."""

    def find(name):
        return str(Path(sys.executable).parent / name)

    return find


@pytest.fixture(scope="session")
def environment(tool, tmp_path_factory):
    """A function that takes wheels and more arguments of uv. It returns the Python of a fresh environment with them."""

    def make(*wheels, python=sys.executable):
        folder = tmp_path_factory.mktemp("environment") / "venv"
        subprocess.run([tool("uv"), "venv", "--quiet", "--python", python, folder], check=True)
        command = [tool("uv"), "pip", "install", "--quiet", "--only-binary=:all:", "--python", folder]
        for _ in range(2):  # an index may fail once; a missing or clashing dependency fails twice
            result = subprocess.run([*command, *wheels], capture_output=True, text=True, check=False)
            if result.returncode == 0:
                break
        assert result.returncode == 0, result.stderr
        return folder / "bin/python"

    return make
