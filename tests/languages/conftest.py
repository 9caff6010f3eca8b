"""Builds the examples once. At the end of the run, a line for each language shows the number of compared rows."""

from __future__ import annotations

import functools
import os
from collections import Counter

import pytest

from tests.languages.programs import LANGUAGES, BuildError, MissingToolchainError

REQUIRED = os.environ.get("RESIDUUM_TEST_LANGUAGES") == "required"
"""`make test-languages`: a missing toolchain is a failure, not a reason to skip."""

compared: dict[str, Counter] = {}
absent: dict[str, str] = {}


@functools.cache
def built(name: str) -> MissingToolchainError | BuildError | None:
    """Build an example once; return the reason if that failed, or None."""
    try:
        LANGUAGES[name].make()
    except (MissingToolchainError, BuildError) as error:
        absent[name] = str(error).partition("\n")[0].rstrip(":")
        return error
    return None


@pytest.fixture(scope="module", params=LANGUAGES)
def program(request):
    """A built example. Skips the test if its toolchain is missing."""
    compared.setdefault(request.param, Counter())
    failure = built(request.param)
    if isinstance(failure, MissingToolchainError) and not REQUIRED:
        pytest.skip(str(failure))
    if failure:
        pytest.fail(str(failure), pytrace=False)
    return LANGUAGES[request.param]


@pytest.fixture
def count(program):
    """Counts verified results: rows that equal the Python client's, decoded numbers, reported failures."""
    return compared[program.name]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    if not compared:
        return
    terminalreporter.section("other languages")
    for name, found in compared.items():
        if name in absent:
            said = f"not run: {absent[name].removeprefix(f'{name}: ')}"
        else:
            said = (
                f"{found['rows']} rows of {found['captures']} captures equal to those of Python's client, read and "
                f"followed; {found['decoded']} scripted numbers decoded; {found['refusals']} failures told apart"
            )
        terminalreporter.write_line(f"{name:<11} {said}")
