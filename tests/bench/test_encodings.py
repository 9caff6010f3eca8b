"""The figures and the command line of bench.encodings."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from bench.capture.workload import Mode, Sink
from bench.encodings import blocks, rows
from bench.encodings.__main__ import bars
from bench.encodings.forms import CASES
from bench.machine import ROOT
from residuum.v1 import capture_pb2, tensor_pb2
from residuum.wire.rows.encodings import ENCODINGS, SAE, basis_of
from tests.bench.capture.test_results import make_run


@pytest.fixture(scope="module")
def some_rows():
    """Return rows with a common component, like a residual stream: [layers, positions, width]."""
    rng = np.random.default_rng(3)
    return (rng.standard_normal((3, 65, 96)) + 2 * rng.standard_normal(96)).astype(ml_dtypes.bfloat16)


def case(name):
    return next(item for item in CASES if item.name == name)


def test_every_encoding_is_measured():
    assert {item.encoding for item in CASES} == set(ENCODINGS.values()) - {SAE}, "SAE needs an autoencoder"
    assert CASES[0].name == "raw"


@pytest.mark.parametrize("name", [item.name for item in CASES])
def test_bytes_and_errors_of_an_encoding(some_rows, name):
    vectors = rows.principal_directions(some_rows)
    found = rows.measure_case(case(name), some_rows, vectors)
    form = case(name).form(96, tensor_pb2.DATA_TYPE_BFLOAT16)
    blocks = 3 if form.prefix_bytes else 0  # 65 positions in blocks of 32
    assert found["bytes_per_row"] == pytest.approx(form.row_bytes + blocks * form.prefix_bytes / 65)
    assert found["encode_us"] > 0
    assert -1 <= found["score"] <= 1 + 1e-12
    if name in {"raw", "fp32", "fp16", "bf16"}:
        assert found["l2_worst"] < 1e-6
    assert (found["l2"] is None) == (case(name).projects or name == "project 8")
    json.dumps(found)


def test_errors_follow_their_definitions(some_rows):
    exact = some_rows.astype(np.float64)
    half = exact.copy()
    half[:, :, ::2] = 0
    found = rows.errors(case("full8"), exact, half, rows.principal_directions(some_rows), None)
    distances = [np.sqrt((x[::2] ** 2).sum() / (x**2).sum()) for x in exact.reshape(-1, 96)]
    assert found["l2"] == pytest.approx(np.median(distances))
    assert found["l2_worst"] == pytest.approx(max(distances))
    truth = np.array([[np.corrcoef(np.c_[a, b].T)[0, 1] for a, b in zip(x.T, y.T, strict=True)]
                      for x, y in zip(exact[:, 1:, :4], half[:, 1:, :4] + exact[:, 1:, 4:8], strict=True)])  # fmt: skip
    pair = np.zeros_like(exact)
    pair[..., :4] = half[..., :4] + exact[..., 4:8]
    np.testing.assert_allclose(rows.correlations(exact[..., :4], pair[..., :4]), truth, atol=1e-12)
    assert rows.cosine_error(exact, exact) == 0
    assert rows.cosine_error(exact, 3 * exact) == pytest.approx(0, abs=1e-12)
    assert rows.cosine_error(exact, np.roll(exact, 1, axis=1)) > 0.01


def test_projected_rows_are_scored_with_projected_directions(some_rows):
    """Without quantisation, the scores of a square orthogonal projection would be exact."""
    item = dataclasses.replace(case("rp 512"), dimensions=96)
    form = item.form(96, tensor_pb2.DATA_TYPE_BFLOAT16)
    basis = basis_of(form, capture_pb2.EncodingOptions())
    orthogonal = np.linalg.qr(basis.astype(np.float64))[0]
    exact = some_rows.astype(np.float64)
    vectors = rows.principal_directions(some_rows)
    found = rows.errors(item, exact, exact @ orthogonal, vectors, orthogonal)
    assert found["score"] == pytest.approx(1, abs=1e-6)
    assert found["cosine"] == pytest.approx(0, abs=1e-9)
    assert found["l2"] is None


def test_svd_is_reported_with_its_cost(some_rows):
    svd = rows.compare_with_svd(some_rows)
    assert svd["dimensions"] == 65
    assert svd["svd_basis_bytes"] == 65 * 96 * 4
    assert svd["svd_l2"] < 1e-5  # as many dimensions as rows
    assert svd["times_slower"] == pytest.approx(svd["svd_seconds"] / svd["projection_seconds"])


def test_the_table_is_markdown(some_rows):
    vectors = rows.principal_directions(some_rows)
    cases = [{**rows.measure_case(case(name), some_rows, vectors), "smaller": 2.0} for name in ("raw", "rp8 128")]
    lines = rows.table({"cases": cases}).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| `raw` | 192 | 2× | 0 % | 0 % | 0 | 1.0000 |")
    assert lines[3].startswith("| `rp8 128` | 104 | 2× |  |  | 0.")


def test_bars():
    from bench.capture.results import summarise

    runs = [
        make_run(Mode.STOCK, 0, [1.0]),
        make_run(Mode.ALL_LAYERS, 0, [1.10], settled=0.5),
        make_run(Mode.ALL_LAYERS_ENCODED, 0, [1.12], settled=0.1),
    ]
    (slower,) = (bar for bar in bars(summarise(runs), Sink.RING) if "beyond raw" in bar.name)
    assert slower.value == pytest.approx(0.02)
    assert not slower.passed
    (sooner,) = bars(summarise(runs), Sink.STORE)
    assert sooner.passed
    assert sooner.value == pytest.approx(1.22 / 1.6)


def test_blocks_are_encoded_in_every_way():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.bench.interpreted_blocks"],
        cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=200,
    )  # fmt: skip
    part = json.loads(done.stdout)
    generated, prompt = part["blocks"]
    assert (generated["positions"], prompt["positions"]) == (3, 20)
    for block in part["blocks"]:
        count = 2 * block["positions"]
        sizes = {item["name"]: item["bytes"] for item in block["cases"]}
        assert sizes.keys() == {item.name for item in CASES}
        assert (sizes["raw"], sizes["full8"], sizes["rp8 512"]) == (96 * count, 56 * count, 56 * count)
        assert sizes["full8, dimension"] == 48 * count + 2 * 8 * 48
        assert all(item["floor_seconds"] == pytest.approx(item["bytes"] / sizes["raw"]) for item in block["cases"])
    assert len(blocks.lines(part)) == 2 * (1 + len(CASES))
