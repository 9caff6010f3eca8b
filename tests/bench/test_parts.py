import json

import pytest

from bench.output import Bar, compact, table, write_result
from bench.parts import OtherRunError, read_earlier

CONTEXT = {
    "machine": {"cpu": "x", "cores": 2, "gpu": "", "gpu_count": 0, "gpu_driver": "", "load_before": 0.1},
    "versions": {"python": "3"},
    "revision": {"commit": "abc", "changed": ("bench/x.py",)},
}


def other(**changes):
    return {**CONTEXT, **{name: {**CONTEXT[name], **change} for name, change in changes.items()}}


def test_a_bar_is_a_minimum_or_a_maximum():
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
    assert read_earlier(file, "bench.x", CONTEXT) == {}
    write_result(file, {"benchmark": "bench.x", **CONTEXT, "parts": {"rpc": {"a": 1}}})
    parts = read_earlier(file, "bench.x", other(machine={"load_before": 5.0}))
    assert parts == {"rpc": {"a": 1}}
    write_result(file, {"benchmark": "bench.x", **CONTEXT, "parts": {**parts, "kernel": {"b": [1.5, 2]}}})
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
def test_figures_of_another_machine_are_not_mixed_in(tmp_path, changes, named):
    write_result(tmp_path / "x.json", {"benchmark": "bench.x", **CONTEXT, "parts": {"rpc": {}}})
    with pytest.raises(OtherRunError, match=named):
        read_earlier(tmp_path / "x.json", "bench.x", other(**changes))


@pytest.mark.parametrize("text", ["", "[]", '{"benchmark": "bench.host"}'])
def test_a_file_with_other_content_is_not_overwritten(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(OtherRunError, match=r"not a result of bench\.x"):
        read_earlier(tmp_path / "x.json", "bench.x", CONTEXT)


def test_results_have_full_lines_and_each_list_of_numbers_is_one_line():
    data = {"a": [1, 2.5, -3e-07], "long": list(range(100)), "b": [{"x": "y" * 70, "z": (1, 2)}] * 2, "c": [], "d": {}}
    written = compact(data)
    assert json.loads(written) == json.loads(json.dumps(data))
    assert '"a": [1, 2.5, -3e-07]' in written
    assert [line for line in written.splitlines() if len(line) > 120] == [f' "long": {list(range(100))},']
    assert written.endswith('\n ],\n "c": [], "d": {}\n}')
    assert len(written.splitlines()) == 9


def test_columns_are_as_wide_as_their_content():
    assert table(["a", "long"], [["1.25", "2"]]).splitlines() == ["   a  long", "1.25     2"]
