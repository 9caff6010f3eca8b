"""Which tests run in the same process when several share them out: pytest-xdist asks.

Its own way, marks by group (`--dist loadgroup`), writes them into the ids of tests, which pytest 9.2 no longer reads.
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
    """Return what a test, given by its id, shares with others: its folder's engine, or whatever its file has."""
    file = test.partition("::")[0]
    folder = PurePosixPath(file).parent.as_posix()
    return folder if folder in _ONE_ENGINE and file not in _OWN_ENGINES else file


class SharingByEngine(LoadScopeScheduling):
    """Hands out groups in the order of collection; the longest are in its beginning."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
