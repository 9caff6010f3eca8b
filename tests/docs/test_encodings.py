"""The figures of docs/encodings.md match the result. tests/integration/test_docs.py runs its code."""

from __future__ import annotations

import json
from pathlib import Path

from bench.encodings import rows

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/encodings.md"
RESULT = ROOT / "bench/results/cpu/encodings.json"


def test_the_table_of_the_encoding_page_matches_the_result():
    part = json.loads(RESULT.read_text())["parts"]["rows"]
    assert rows.table(part) in PAGE.read_text()
    facts = f"{part['layers']} layers, width {part['width']}, bfloat16) over {part['positions']} tokens"
    assert facts in PAGE.read_text()
    assert f"{100 * part['svd']['svd_l2']:.1f} % off with {part['svd']['dimensions']} of them" in PAGE.read_text()
