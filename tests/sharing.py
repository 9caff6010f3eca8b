"""Groups tests that must run in the same process, for pytest-xdist.

xdist's own groups (`--dist loadgroup`) do not work, because they add the group to test IDs, which pytest 9.2 no longer
reads.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

_ONE_ENGINE = ("tests/conformance", "tests/integration")
"""Folders whose tests share an engine, which takes a minute to start."""
_OWN_ENGINES = (
    "tests/conformance/test_architectures.py",
    "tests/conformance/test_parallel.py",
    "tests/conformance/test_reference.py",
    "tests/integration/test_lifecycle.py",
    "tests/integration/test_several_stores.py",
)
"""Files in those folders that start engines of their own, or none."""


def group_of(test: str) -> str:
    """Return the group of a test ID: its folder if the folder's tests share an engine, otherwise its file."""
    file = test.partition("::")[0]
    folder = PurePosixPath(file).parent.as_posix()
    return folder if folder in _ONE_ENGINE and file not in _OWN_ENGINES else file


class SharingByEngine(LoadScopeScheduling):
    """Assigns groups in the order of collection, which begins with the longest."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
