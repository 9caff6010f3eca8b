"""bench.extract: a small real run of the part that reads, and its figures."""

from __future__ import annotations

import json

import numpy as np
import pytest

import residuum

torch = pytest.importorskip("torch")
from bench import extract, rates  # noqa: E402 - only if torch is there


def test_files_are_those_of_a_job(tmp_path):
    rows = residuum.Extracted(extract.write_rows(tmp_path / "rows", 1))
    assert rows.is_complete
    assert rows.layer(12).shape == ((1 << 20) // (2 * 576), 576)
    assert np.isfinite(np.asarray(rows.layer(12), np.float32)).mean() > 0.9


def test_a_small_run_reads_every_row(tmp_path, capsys):
    out = tmp_path / "x.json"
    extract.main(["--parts", "shuffle", "--mib", "2", "--rounds", "2", "--folder", str(tmp_path), "--output", str(out)])
    found = json.loads(out.read_text())["parts"]["shuffle"]
    for state in ("cached", "from disk"):
        assert {len(rates) for rates in found[state]["mb_per_second"].values()} == {2}
        assert found[state]["ratio"]["lowest"] <= found[state]["ratio"]["median"] <= found[state]["ratio"]["highest"]
    assert "MB/s" in capsys.readouterr().out


def test_ratios_are_taken_round_by_round():
    found = rates.compared("x", {"ours": [9.0, 20.0, 4.0], "other": [10.0, 10.0, 8.0]}, "ours", "other")
    assert found["ratio"] == {"median": 0.9, "lowest": 0.5, "highest": 2.0}
