import json

import pytest

from bench.parts import Part
from bench.processes import RunFailedError
from bench.steering.__main__ import MEASURES, engine_job, main, parse
from bench.steering.engine import Case


def test_a_file_of_something_else_is_left_alone(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"benchmark": "bench.host"}')
    with pytest.raises(SystemExit, match=r"no result of bench\.steering"):
        main(["--parts", "rpc", "--output", str(file)])
    assert file.read_text() == '{"benchmark": "bench.host"}'


def test_the_parts_follow_the_machine():
    assert parse([], has_gpu=True).parts == ["kernel", "rpc", "engine"]
    assert parse([], has_gpu=False).parts == ["rpc", "engine"]
    assert parse(["--parts", "kernel"], has_gpu=False).parts == ["kernel"]
    assert (parse([], has_gpu=True).shape, parse([], has_gpu=False).shape) == ("qwen2.5-1.5b", "tiny")


def test_configurations_fit_the_batch(capsys):
    assert parse([], has_gpu=True).configurations == [0, 1, 8, 32, 64, 128, 256]
    assert parse(["--batch-size", "16"], has_gpu=True).configurations == [0, 1, 8]
    with pytest.raises(SystemExit):
        parse(["--batch-size", "16", "--configurations", "17"], has_gpu=True)
    assert "--configurations" in capsys.readouterr().err


def test_a_part_that_fails_leaves_the_others(tmp_path, monkeypatch):
    def fails(options):
        raise RunFailedError("no GPU")

    monkeypatch.setitem(MEASURES, "kernel", fails)
    monkeypatch.setitem(MEASURES, "rpc", lambda options: Part({"a": 1}, failures=["one figure"]))
    with pytest.raises(SystemExit, match="BENCH FAILED: kernel: no GPU\nBENCH FAILED: rpc: one figure"):
        main(["--parts", "kernel,rpc", "--output", str(tmp_path / "x.json")])
    parts = json.loads((tmp_path / "x.json").read_text())["parts"]
    assert list(parts) == ["rpc"]
    assert parts["rpc"]["a"] == 1


def test_unsteered_is_measured_once():
    options = parse(["--batch-size", "8", "--configurations", "0,8", "--per-layer-vectors"], has_gpu=True)
    assert engine_job(options).cases == (Case(0), Case(8), Case(8, per_layer=True))


@pytest.mark.parametrize("arguments", [["--parts", "x"], ["--decode", "0"], ["--shape", "x"], ["--unique", "a"]])
def test_bad_flags_end_the_program(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(arguments, has_gpu=True)
    assert arguments[0] in capsys.readouterr().err
