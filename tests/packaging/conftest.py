"""What the packaging tests share."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def tool():
    """A function: name of a command-line tool → its path in the environment that runs the tests."""

    def find(name):
        return str(Path(sys.executable).parent / name)

    return find
