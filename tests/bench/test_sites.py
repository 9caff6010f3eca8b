import json
from unittest.mock import patch

import pytest

from bench import sites
from bench.capture.results import Iteration, Memory, Run
from bench.capture.workload import Mode, Runner
from bench.sites import bars, main, parse, show, summarise


def run_of(mode, number, *times):
    iterations = tuple(Iteration(each, each, 128, 64, 0, 0, ("a",), each) for each in times)
    return Run(mode, number, Runner.DEFAULT, "v2", False, "cpu", 10, 9.0, Memory({"engine": 1}), iterations)


STOCK = [run_of(Mode.STOCK, 0, 1.0, 1.0, 1.2), run_of(Mode.STOCK, 1, 2.0, 2.0, 2.0)]
ALONE = [run_of(Mode.IDLE, 0, 1.6, 1.6, 1.6), run_of(Mode.IDLE, 1, 1.6, 1.6, 1.6)]
WITH_SITES = [run_of(Mode.IDLE, 0, 1.64, 1.64, 1.6), run_of(Mode.IDLE, 1, 1.68, 1.64, 1.64)]


def test_a_point_costs_what_it_adds_to_the_stream_alone():
    alone, group = summarise(STOCK, {(): ALONE, ("resid_pre", "q", "k"): WITH_SITES})
    assert alone.points == 0
    assert alone.per_point is None
    assert alone.ratio_to_stock == pytest.approx(1.0)  # the medians over both rounds are 1.6
    assert group.points == 21  # one before the first layer, and two in each of ten
    assert group.per_point == pytest.approx((1.64 - 1.6) / 1.6 / 21)
    assert group.ratio_by_round == pytest.approx((1.64, 0.82))
    assert group.ratio_of_best == pytest.approx(1.6)


def test_each_group_with_points_has_a_bar():
    costs = summarise(STOCK, {(): ALONE, ("final_norm",): WITH_SITES, ("q",): WITH_SITES})
    assert [(bar.name, bar.passed) for bar in bars(costs)] == [
        ("a point of final_norm", False),
        ("a point of q", True),
    ]
    assert "resid_post alone" in show(costs)


def test_the_first_group_is_the_stream_alone(capsys):
    with pytest.raises(SystemExit):
        parse(["--groups", "q;k"])
    assert "the first group must be empty" in capsys.readouterr().err
    assert parse(["--groups", ";q,k"]).groups == [(), ("q", "k")]


def test_rounds_alternate_and_the_result_is_written_after_each(tmp_path, capsys):
    asked = []

    def run_turn(turn, workload):
        asked.append((turn.round, turn.modes[0], workload.capture_sites))
        return [run_of(turn.modes[0], turn.round, 1.0)]

    file = tmp_path / "sites.json"
    with patch.object(sites, "run_turn", run_turn):
        main(["--model", "m", "--groups", ";q", "--rounds", "2", "--output", str(file)])
    stock, alone, with_q = [
        (Mode.STOCK, ("resid_post",)),
        (Mode.IDLE, ("resid_post",)),
        (Mode.IDLE, ("resid_post", "q")),
    ]
    assert [each[1:] for each in asked] == [stock, alone, with_q, with_q, alone, stock]
    written = json.loads(file.read_text())
    assert [group["sites"] for group in written["groups"]] == [[], ["q"]]
    assert len(written["runs"]) == 6
    assert "pass\ta point of q" in capsys.readouterr().out
