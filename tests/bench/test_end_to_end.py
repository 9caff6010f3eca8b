from dataclasses import replace

import pytest

from bench.capture.results import Iteration, Memory, Run, summarise
from bench.capture.workload import Mode, Runner
from bench.end_to_end import bars, main


def run_of(mode, generation, completed, runner=Runner.V1):
    iteration = Iteration(generation, completed, 128, 64, 0, 0, ("a",), completed)
    return Run(mode, 0, runner, runner.value, False, "cpu", 2, 10.0, Memory({"engine": 1}), (iteration,))


def test_completion_is_compared_with_stocks_generation():
    runs = [run_of(Mode.STOCK, 2.0, 2.0), run_of(Mode.ALL_LAYERS, 2.08, 2.3), run_of(Mode.IDLE, 9.0, 9.0)]
    found = bars(summarise(runs))
    assert [(bar.value, bar.passed) for bar in found] == [
        (pytest.approx(1.15), True),
        (pytest.approx(1.15), False),
        (pytest.approx(1.04), True),
    ]
    assert all(bar.name.startswith("v1: ") for bar in found)


def test_each_runner_has_its_bars():
    runs = [run_of(Mode.STOCK, 2.0, 2.0), run_of(Mode.ALL_LAYERS, 2.0, 2.0)]
    others = [replace(run, runner=Runner.V2, model_runner="v2") for run in runs]
    assert [bar.name[:2] for bar in bars(summarise([*runs, *others]))] == ["v1"] * 3 + ["v2"] * 3
    assert bars(summarise(runs[1:])) == []


@pytest.mark.parametrize("arguments", [["--sink", "ring"], ["--modes", "stock"]])
def test_end_to_end_compares_a_store_with_stock(arguments):
    with pytest.raises(SystemExit, match=r"bench\.capture"):
        main(arguments)
