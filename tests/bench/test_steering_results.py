import json

import pytest

from bench.children import RunFailedError
from bench.steering.__main__ import _MEASURES, engine_job, main, parse
from bench.steering.engine import Case
from bench.steering.results import Bar, OtherRunError, compact, read_earlier, table, write

CONTEXT = {
    "machine": {"cpu": "x", "cores": 2, "gpu": "", "gpu_count": 0, "gpu_driver": "", "load_before": 0.1},
    "versions": {"python": "3"},
    "revision": {"commit": "abc", "changed": ("bench/x.py",)},
}


def other(**changes):
    return {**CONTEXT, **{name: {**CONTEXT[name], **change} for name, change in changes.items()}}


def test_a_bar_is_a_limit_from_one_side():
    assert Bar("a", 13.0, 13.0).passed
    assert not Bar("a", 13.1, 13.0).passed
    assert Bar("a", 0.9, 0.85, at_most=False).passed
    assert not Bar("a", 0.8, 0.85, at_most=False).passed
    assert Bar("a", 0.8, 0.85, at_most=False).line() == "MISSED\ta\t0.8 >= 0.85"
    assert Bar("a", 1.0, 2.0).to_json()["passed"] is True
    assert json.dumps(Bar("a", float("inf"), 2.0).to_json()) == (
        '{"name": "a", "value": null, "limit": 2.0, "at_most": true, "passed": false}'
    )


def test_parts_are_added_to_a_file(tmp_path):
    file = tmp_path / "results" / "x.json"
    assert read_earlier(file, CONTEXT) == {}
    write(file, CONTEXT, {"rpc": {"a": 1}})
    parts = read_earlier(file, other(machine={"load_before": 5.0}))
    assert parts == {"rpc": {"a": 1}}
    write(file, CONTEXT, {**parts, "kernel": {"b": [1.5, 2]}})
    assert json.loads(file.read_text())["parts"] == {"rpc": {"a": 1}, "kernel": {"b": [1.5, 2]}}
    assert [path.name for path in file.parent.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"revision": {"commit": "def"}}, "another revision"),
        ({"revision": {"changed": ()}}, "another revision"),
        ({"machine": {"gpu": "H200"}}, "another machine"),
        ({"machine": {"cores": 3}, "versions": {"torch": "2"}}, "another machine, another versions"),
    ],
)
def test_what_was_measured_elsewhere_is_not_mixed(tmp_path, changes, named):
    write(tmp_path / "x.json", CONTEXT, {"rpc": {}})
    with pytest.raises(OtherRunError, match=named):
        read_earlier(tmp_path / "x.json", other(**changes))


@pytest.mark.parametrize("text", ["", "[]", '{"benchmark": "bench.host"}'])
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(OtherRunError, match=r"no result of bench\.steering"):
        read_earlier(tmp_path / "x.json", CONTEXT)
    with pytest.raises(SystemExit, match="no result"):
        main(["--parts", "rpc", "--output", str(tmp_path / "x.json")])
    assert (tmp_path / "x.json").read_text() == text


def test_numbers_stand_on_one_line():
    data = {"a": [1, 2.5, -3e-07], "b": ["x", 1], "c": [[1, 2], [3]], "d": []}
    written = compact(data)
    assert json.loads(written) == data
    assert '"a": [1, 2.5, -3e-07]' in written
    assert "[1, 2]" in written


def test_columns_are_as_wide_as_they_need_to_be():
    assert table(["a", "long"], [["1.25", "2"]]).splitlines() == ["   a  long", "1.25     2"]


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

    monkeypatch.setitem(_MEASURES, "kernel", fails)
    monkeypatch.setitem(_MEASURES, "rpc", lambda options: ({"a": 1}, ["one figure"]))
    with pytest.raises(SystemExit, match="BENCH FAILED: no GPU\nBENCH FAILED: one figure"):
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
