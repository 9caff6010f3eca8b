import json
import os
from dataclasses import asdict
from unittest.mock import patch

import pytest

from bench import processes
from bench.plain import restore
from bench.processes import RunFailedError
from bench.steering.__main__ import main
from bench.steering.engine import Case, EngineJob, bank_row, bars, rotated, summarise
from bench.steering.engine_child import plan_of, settings_for
from svc_common.launcher import ROOT
from tests import warm_start

CASES = (Case(0), Case(1), Case(2), Case(4), Case(2, per_layer=True))
JOB = EngineJob(shape="tiny", cases=CASES, batch_size=4, prefill=8, decode=10)


def test_every_case_begins_once_and_has_different_neighbours():
    orders = [rotated(CASES, number) for number in range(len(CASES))]
    assert all(sorted(order, key=CASES.index) == list(CASES) for order in orders)
    assert orders[0] == list(CASES)
    assert orders[1] == [CASES[0], *CASES[:0:-1]]
    assert orders[2][0] == CASES[2]


def test_a_configuration_has_one_vector_or_one_for_each_layer():
    plans = [plan_of(JOB, Case(2), index) for index in range(4)]
    assert [[item.row for item in plan.operations] for plan in plans] == [[0], [1], [0], [1]]
    assert plans[0].operations[0].layers == (0, 1, 2, 3)
    per_layer = plan_of(JOB, Case(2, per_layer=True), 1).operations
    assert [(item.row, item.layers) for item in per_layer] == [(4, (0,)), (5, (1,)), (6, (2,)), (7, (3,))]
    assert plan_of(JOB, Case(0), 3) is None


def test_the_bank_has_room_for_all_configurations():
    assert JOB.bank_rows == 8
    rows = {bank_row(CASES[-1], 4, configuration, layer) for configuration in range(2) for layer in range(4)}
    assert rows == set(range(8))
    many = EngineJob(shape="tiny", cases=(Case(256, per_layer=True),))
    assert settings_for(many, "/tmp/x", stock=False).max_active_vectors == 1024
    assert settings_for(JOB, "/tmp/x", stock=False).max_num_seqs >= 4


def test_a_job_survives_json():
    told = json.loads(json.dumps(asdict(JOB)))
    assert restore(EngineJob, told) == JOB


def iteration(case, number, seconds, replies):
    return {
        "case": case, "number": number, "warmup": number == 0, "seconds": seconds, "replies": [str(r) for r in replies]
    }  # fmt: skip


def runs(times, replies):
    def of(names):
        return [iteration(name, number, times[name] + number, replies[name]) for number in range(4) for name in names]

    return [
        {"subject": "stock", "round": 0, "iterations": of(["stock"])},
        {"subject": "taps", "round": 0, "iterations": of([case.name for case in CASES])},
    ]


TIMES = {"stock": 0.0, "K=0": 2.0, "K=1": 3.0, "K=2": 3.0, "K=4": 8.0, "K=2 per layer": 0.0}
REPLIES = {
    "stock": "abcd",
    "K=0": "abcx",
    "K=1": "efgh",
    "K=2": "ejgk",
    "K=4": "elmn",
    "K=2 per layer": "opqr",
}


def test_ratios_are_those_of_medians_without_the_first_iteration():
    part = summarise(JOB, runs(TIMES, REPLIES))
    stock, idle, one, *_ = part["cases"]
    assert stock["tokens_per_second"] == 40 / 2.0
    assert stock["seconds"] == [1.0, 2.0, 3.0]
    assert stock["first_seconds"] == [0.0]
    assert idle["ratio_to_stock"] == pytest.approx(2.0 / 4.0)
    assert one["ratio_to_unsteered"] == pytest.approx(4.0 / 5.0)
    assert (idle["replies_as_stock"], one["replies_as_stock"]) == (0.75, 0.0)
    assert "replies" not in json.dumps(part["runs"])


def test_bars_compare_the_most_configurations_with_one_and_one_with_none():
    most, one = bars(JOB, summarise(JOB, runs(TIMES, REPLIES)))
    assert (most.name, one.name) == ("K=4 over K=1, tokens/s", "K=1 over unsteered, tokens/s")
    assert (most.value, one.value) == pytest.approx((5 / 10, 4 / 5))


@pytest.mark.parametrize(
    ("case", "replies", "message"),
    [("K=1", "abcz", "the same as without steering"), ("K=4", "efgn", "equal those with one configuration")],
)
def test_a_case_that_does_not_steer_is_an_error(case, replies, message):
    with pytest.raises(RunFailedError, match=message):
        summarise(JOB, runs(TIMES, {**REPLIES, case: replies}))


def test_requests_of_the_first_configuration_may_equal_those_with_one():
    replies = {**REPLIES, "K=2": "ejgk"}  # requests 0 and 2 have the configuration that all have with K=1
    assert summarise(JOB, runs(TIMES, replies))["cases"]


def start_fork(arguments, log_file, environment):
    """Start a child of a benchmark as a fork of a process that has imported vLLM."""
    log_file.touch()
    with patch.dict(os.environ, environment, clear=True):
        return warm_start.launch("bench.child", arguments, ROOT, log_file)


@pytest.mark.slow
def test_a_tiny_model_is_steered_in_as_many_ways_as_it_has_requests(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(processes, "start_child", start_fork)
    output = tmp_path / "x.json"
    arguments = (
        "--parts engine --shape tiny --eager --batch-size 4 --prefill 8 --decode 6 --configurations 0,1,4 "
        "--iterations 1 --per-layer-vectors --kv-cache-gib 0.25 --max-num-batched-tokens 64"
    )
    main([*arguments.split(), "--output", str(output)])
    part = json.loads(output.read_text())["parts"]["engine"]
    names = ["stock", "K=0", "K=1", "K=4", "K=1 per layer", "K=4 per layer"]
    assert [case["case"] for case in part["cases"]] == names
    assert all(len(case["seconds"]) == 1 for case in part["cases"])
    assert len(part["bars"]) == 4
    assert "=== engine" in capsys.readouterr().out
