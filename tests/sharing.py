"""Groups tests that must run in the same process, for pytest-xdist.

A file names its group in a mark: `pytestmark = pytest.mark.shares_engine("conformance")`. pytest-xdist's own groups
(`--dist loadgroup`) add the group to test IDs, which does not work with pytest 9.2. The scheduler knows only the IDs of
tests, so this module reads the mark from the file.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[1]
MARK = "shares_engine"


def group_of(test: str) -> str:
    """Return the group of a test, given by its ID: the engine of its file's mark, otherwise the file."""
    file = test.partition("::")[0]
    return _engine_of(ROOT / file) or file


@functools.cache
def _engine_of(file: Path) -> str | None:
    marks = [
        node.value
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    for node in (inner for mark in marks for inner in ast.walk(mark)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"pytest.mark.{MARK}":
            return str(ast.literal_eval(node.args[0]))
    return None


def check(items: Iterable[pytest.Item], fixture: str, engine: str, folder: Path) -> None:
    """Check that every test that uses a folder's engine has the mark.

    Raises:
        pytest.UsageError: A test does not, so another process could start the engine a second time.
    """
    for item in items:
        if fixture in getattr(item, "fixturenames", ()) and folder in item.path.parents:  # the cheap question first
            mark = item.get_closest_marker(MARK)
            if mark is None or mark.args != (engine,):
                raise pytest.UsageError(f"{item.nodeid} uses {fixture}: mark its file pytest.mark.{MARK}({engine!r})")


class SharingByEngine(LoadScopeScheduling):
    """Assigns groups in the order of collection, which starts with the longest."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
