"""The examples, built once; and at the end of the run a line for each language with the rows that were compared."""

from __future__ import annotations

import functools
import os
from collections import Counter

import pytest

from tests.languages.programs import LANGUAGES, MissingToolchainError

REQUIRED = os.environ.get("RESIDUUM_TEST_LANGUAGES") == "required"
"""`make test-languages`: a missing toolchain is a failure, not a reason to skip."""

compared: dict[str, Counter] = {}
absent: dict[str, str] = {}


@functools.cache
def missing(name: str) -> str:
    """Build an example, once; return what is missing for it, or ""."""
    try:
        LANGUAGES[name].make()
    except MissingToolchainError as error:
        absent[name] = str(error).partition("\n")[0]
        return str(error)
    return ""


@pytest.fixture(scope="module", params=LANGUAGES)
def program(request):
    """An example, built; skipped if its toolchain is missing."""
    compared.setdefault(request.param, Counter())
    lacks = missing(request.param)
    if lacks and REQUIRED:
        pytest.fail(lacks, pytrace=False)
    if lacks:
        pytest.skip(lacks)
    return LANGUAGES[request.param]


@pytest.fixture
def count(program):
    """Counts what was found equal to what Python's client reads: captures, rows and numbers."""
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
                f"{found['rows']} rows of {found['captures']} captures ({found['numbers']} float32) equal to Python's, "
                f"read and followed; {found['refusals']} failures told apart"
            )
        terminalreporter.write_line(f"{name:<11} {said}")
