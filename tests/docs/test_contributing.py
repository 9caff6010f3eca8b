"""CONTRIBUTING.md names what there is."""

from __future__ import annotations

import re

from tests.docs.blocks import ROOT


def test_the_table_of_tests_names_every_folder():
    rows = re.findall(r"^\| (`tests/.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named = re.findall(r"`(tests/\w+)`", " ".join(rows))
    there = [f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if any(path.glob("*.py"))]
    assert sorted(named) == sorted(there)
