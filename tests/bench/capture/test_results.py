import json
from dataclasses import asdict

import pytest

from bench.capture.__main__ import parse, result
from bench.capture.options import workload_of
from bench.capture.results import Iteration, Memory, Run, summarise
from bench.capture.shapes import SHAPES
from bench.capture.workload import Mode, Runner, Sink, Vectors, Workload
from bench.plain import restore


def make_run(mode, number, times, replies=("a", "b"), settled=0.0, runner=Runner.V1):
    iterations = tuple(
        Iteration(
            *(seconds, seconds + settled, 128, 64, 40 if settled else 0, 400 if settled else 0, replies),
            completed_seconds=seconds + settled,
        )
        for seconds in times
    )
    memory = Memory({"engine": 100 + number}, blocks_mib=5 - number)
    return Run(mode, number, runner, runner.value, True, "cpu", 2, 10.0, memory, iterations)


RUNS = [
    make_run(Mode.STOCK, 0, [1.0, 2.0, 3.0]),
    make_run(Mode.ALL_LAYERS, 0, [2.2, 2.1, 2.0], settled=0.5),
    make_run(Mode.STEER, 0, [2.0, 2.0, 2.0], replies=("a", "c")),
    make_run(Mode.STEER, 1, [4.0, 4.0, 4.0], replies=("d", "c")),
    make_run(Mode.ALL_LAYERS, 1, [4.0, 4.4, 4.2], settled=0.5),
    make_run(Mode.STOCK, 1, [4.0, 4.0, 4.0]),
]


def test_ratios_are_medians_over_stocks_median():
    stock, captured, _ = summarise(RUNS)
    assert stock.generation_seconds.median == 3.5
    assert stock.generation_seconds.ratio_to_stock == 1.0
    assert captured.generation_seconds.median == pytest.approx(3.1)
    assert captured.generation_seconds.ratio_to_stock == pytest.approx(3.1 / 3.5)
    assert captured.generation_seconds.ratio_of_best == pytest.approx(2.0)
    assert captured.settled_seconds.median == pytest.approx(3.6)
    assert captured.tokens_per_second == pytest.approx(64 / 3.1)


def test_a_round_is_compared_with_stock_of_that_round():
    captured = summarise(RUNS)[1]
    assert captured.generation_seconds.ratio_by_round == pytest.approx((1.05, 1.05))


def test_replies_are_compared_with_stocks():
    stock, captured, steered = summarise(RUNS)
    assert stock.replies_as_stock == captured.replies_as_stock == 1.0
    assert steered.replies_as_stock == 0.25


def test_memory_is_the_worst_of_all_rounds():
    assert summarise(RUNS)[0].memory == Memory({"engine": 101}, blocks_mib=5)


def test_accumulation_within_a_process_is_visible():
    stock, captured, _ = summarise(RUNS)
    assert stock.generation_seconds.last_over_first == pytest.approx(2.0)  # of 3.0 and 1.0
    assert captured.generation_seconds.last_over_first == pytest.approx((2.0 / 2.2 + 4.2 / 4.0) / 2)


def test_a_mode_is_compared_with_stock_on_the_same_model_runner():
    other = [
        make_run(Mode.ALL_LAYERS, 0, [12.0], runner=Runner.V2),
        make_run(Mode.STOCK, 0, [10.0], runner=Runner.V2),
    ]
    summaries = summarise([*RUNS, *other])
    assert [(item.runner, item.mode) for item in summaries[3:]] == [
        (Runner.V2, Mode.ALL_LAYERS),
        (Runner.V2, Mode.STOCK),
    ]
    assert summaries[1] == summarise(RUNS)[1]
    assert summaries[3].generation_seconds.ratio_to_stock == pytest.approx(1.2)
    assert summaries[3].replies_as_stock == 1.0


def test_without_stock_there_is_no_ratio():
    (steered,) = summarise([run for run in RUNS if run.mode is Mode.STEER])
    assert steered.generation_seconds.ratio_to_stock is None
    assert steered.generation_seconds.ratio_of_best is None
    assert steered.generation_seconds.ratio_by_round == ()
    assert steered.replies_as_stock is None


def test_a_run_survives_json():
    assert restore(Run, json.loads(json.dumps(asdict(RUNS[1])))) == RUNS[1]


def test_a_result_has_the_models_name_without_its_path():
    workload = Workload("/some/private/folder/SmolLM2")
    written = json.dumps(result(workload, RUNS))
    assert "private" not in written
    data = json.loads(written)
    assert data["workload"]["model"] == "SmolLM2"
    assert data["runs"][1]["iterations"][0]["rows"] == 40
    assert "replies" not in data["runs"][0]["iterations"][0]
    assert data["rounds"] == 2


def test_the_command_line_defines_the_workload():
    options = parse(["--model", "m", "--eager", "--sink", "ring", "--decode", "7", "--engine-args", '{"seed": 3}'])
    assert workload_of(options) == Workload("m", eager=True, sink=Sink.RING, decode=7, engine_args={"seed": 3})
    assert options.modes == [Mode.STOCK, Mode.IDLE, Mode.ALL_LAYERS, Mode.STEER, Mode.ALL_LAYERS_STEER]


def test_sites_and_folding_are_recorded():
    plain = result(workload_of(parse(["--model", "m"])), RUNS)["workload"]
    assert (plain["capture_sites"], plain["fold_norms"]) == (("resid_post",), None)
    arguments = ["--model", "m", "--capture-sites", "resid_pre,attn_out", "--no-fold-norms"]
    plain = result(workload_of(parse(arguments)), RUNS)["workload"]
    assert (plain["capture_sites"], plain["fold_norms"]) == (("resid_pre", "attn_out"), False)
    assert parse(["--fold-norms"]).fold_norms is True


def test_a_shape_has_its_own_arguments(monkeypatch, tmp_path):
    monkeypatch.setenv("RESIDUUM_CACHE", str(tmp_path))
    workload = workload_of(parse(["--shape", "tiny", "--vectors", "layer", "--engine-args", '{"load_format": "auto"}']))
    assert workload.model == str(tmp_path / "shapes" / "tiny")
    assert workload.engine_args == {**SHAPES["tiny"].engine_args, "load_format": "auto"}
    assert workload.vectors is Vectors.LAYER


@pytest.mark.parametrize(
    "arguments",
    [
        ["--modes", "none"],
        ["--decode", "0"],
        ["--eager", "--compiled"],
        ["--sink", "x"],
        ["--runners", "v3"],
        ["--shape", "x"],
        ["--capture-sites", "resid"],
        ["--capture-sites", "mlp_out,mlp_out"],
        ["--model", "m", "--shape", "tiny"],
    ],
)
def test_a_bad_flag_ends_the_program(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert arguments[0] in capsys.readouterr().err
