"""The kernel part of the steering benchmark, as far as it can be tested without a GPU."""

import json
import math
import subprocess
import sys

import pytest

from bench.plain import restore
from bench.steering import kernel
from bench.steering.kernel import KernelJob, Measurement, bars, tap_bytes
from bench.steering.timing import Times
from inference_svc.taps.plan import STEERING_KINDS
from svc_common.launcher import ROOT

PEERS = {kernel.LOOP, kernel.GATHER}


@pytest.fixture(scope="module")
def interpreted():
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.steering.interpreted_kernel"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return [Measurement(**item) for item in json.loads(done.stdout)]


def test_all_ways_compute_the_same(interpreted):
    assert [item.failed for item in interpreted if item.failed] == []
    ours = {item.error for item in interpreted if item.way in kernel.OURS and item.operation != kernel.IDLE}
    assert 0 < min(ours) <= max(ours) <= 1


def test_every_way_is_measured_at_every_size(interpreted):
    seen = {item.key for item in interpreted}
    hidden, sizes = 48, (1, 4)
    for kind in STEERING_KINDS:
        for unique in sizes:
            uniform = {kernel.UNIFORM} if unique == 1 else set()
            ways = {key[3] for key in seen if key[:3] == (hidden, kind.name.lower(), unique)}
            assert ways == {*kernel.OURS, *PEERS, *uniform}
    for unique in sizes:
        assert {key[3] for key in seen if key[:3] == (hidden, kernel.GATED, unique)} == {*kernel.OURS}
    idle = {key[3] for key in seen if key[:3] == (hidden, kernel.IDLE, 0)}
    assert idle == {kernel.TAP, kernel.TAP_NORM, kernel.COMPILED_NORM, kernel.MOVE, kernel.MOVE_NORM}
    assert {item.us("memory") for item in interpreted} == {2.0}


def test_an_idle_tap_changes_nothing(interpreted):
    assert {item.error for item in interpreted if item.operation == kernel.IDLE and item.way == kernel.TAP} == {0.0}


def measured(unique, us, hidden=2560, operation="add", way=kernel.TAP):
    times = {how: Times((us,)).to_json() for how in ("memory", "cache", "launched")}
    return Measurement(hidden, operation, unique, way, times=times)


def all_measured(us):
    return [
        measured(unique, us(unique), operation=kind.name.lower()) for kind in STEERING_KINDS for unique in (1, 8, 32)
    ]


def test_bars_use_the_slowest_measurement():
    slowest, _, _, spread, *_ = bars(all_measured(lambda unique: 10.0 + unique / 16))
    assert (slowest.value, slowest.passed) == (12.0, True)
    assert spread.value == pytest.approx(12 / 10.0625, rel=1e-3)
    assert spread.passed
    slowest, _, _, spread, *_ = bars(all_measured(lambda unique: 10.0 if unique == 1 else 13.5))
    assert not slowest.passed
    assert not spread.passed


def test_alternatives_have_no_bar():
    peers = [measured(1, 1000.0, way=kernel.LOOP), measured(0, 1.0, operation=kernel.IDLE)]
    assert bars([*all_measured(lambda unique: 10.0), *peers])[0].value == 10.0


def test_a_missing_figure_fails_its_bar():
    missing = Measurement(2560, "cap", 32, kernel.TAP, failed="off")
    found = bars([*all_measured(lambda unique: 10.0), missing])
    assert [bar.value for bar in found] == [math.inf] * 8
    assert not any(bar.passed for bar in found)


def test_the_bar_of_a_gate_is_its_cost_on_top_of_the_same_operation():
    plain = [
        measured(unique, us, way=way) for way in (kernel.TAP, kernel.TAP_NORM) for unique, us in ((1, 10.0), (32, 12.0))
    ]
    gated = [measured(unique, us, operation=kernel.GATED) for unique, us in ((1, 11.25), (32, 13.0))]
    slow = [measured(unique, 13.75, operation=kernel.GATED, way=kernel.TAP_NORM) for unique in (1, 32)]
    _, of_tap, of_norm, *_ = bars([*plain, *gated, *slow])
    assert (of_tap.value, of_tap.passed) == (1.25, True)
    assert (of_norm.value, of_norm.passed) == (3.75, False)
    _, of_tap, *_ = bars([*plain, *gated[:1], *slow])
    assert of_tap.value == math.inf, "a figure is missing"


def test_the_floor_is_the_time_of_the_rows_bytes():
    assert tap_bytes(KernelJob(), 2560, norm=False) == 31_457_280
    assert tap_bytes(KernelJob(), 2560, norm=True) == 41_943_040


def test_a_job_survives_json():
    job = KernelJob(hidden=(64,), unique=(1, 2), compile_seconds=0.0)
    assert restore(KernelJob, json.loads(json.dumps(vars(job)))) == job
