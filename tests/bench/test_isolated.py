import json
from dataclasses import asdict

import pytest

from bench.capture.results import Iteration, Memory, Run
from bench.capture.workload import Job, Mode, Runner, Sink, Workload
from bench.isolated.__main__ import configuration_of, parse
from bench.isolated.configuration import BadConfigurationError, Configuration, IsolatedMode, Peer, Tap
from bench.isolated.run import TIMES, document, summary
from bench.plain import restore

ALL = IsolatedMode.ALL_LAYERS


def run_of(*iterations, mode=Mode.ALL_LAYERS):
    return Run(mode, 1, Runner.DEFAULT, "v1", False, "cpu", 4, 10.0, Memory({"engine": 1}), iterations)


def iteration(generation, fetched, rows=8):
    return Iteration(generation, generation, 128, 64, rows, rows * 16, (), generation, fetched)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"mode": IsolatedMode.CUSTOM}, "needs --layers"),
        ({"mode": ALL, "layers": (1,)}, "belongs to mode custom"),
        ({"mode": IsolatedMode.CUSTOM, "layers": (-1, 3)}, "from 0 on"),
        ({"mode": IsolatedMode.CUSTOM, "layers": (3, 3)}, "each once"),
        ({"mode": ALL, "machinery": False}, "nothing can be captured"),
        ({"mode": ALL, "tap": Tap.NOOP}, "use --tap noop only with zero-layer"),
        ({"mode": IsolatedMode.BASELINE, "tap": Tap.NOOP}, "use --tap noop only with zero-layer"),
        ({"mode": IsolatedMode.ZERO_LAYER, "machinery": False, "tap": Tap.NOOP}, "use --tap noop only with zero-layer"),
        ({"mode": IsolatedMode.ZERO_LAYER, "peer": Peer.HOOKS}, "all-layers or custom"),
    ],
)
def test_contradictory_configurations_are_refused(asked, told):
    with pytest.raises(BadConfigurationError, match=told):
        Configuration(**asked)


def test_the_modes_are_those_of_capture():
    modes = [Configuration(mode, layers=(1,) if mode is IsolatedMode.CUSTOM else ()) for mode in IsolatedMode]
    assert [item.mode_of_capture for item in modes] == [Mode.STOCK, Mode.IDLE, Mode.ALL_LAYERS, Mode.CUSTOM]
    assert Configuration(IsolatedMode.ZERO_LAYER, machinery=False).mode_of_capture is Mode.STOCK


def test_only_a_workload_with_a_store_and_captures_is_fetched():
    base = Workload("m")
    assert Configuration(ALL).workload(base).fetch
    assert not Configuration(IsolatedMode.ZERO_LAYER).workload(base).fetch
    assert not Configuration(ALL).workload(Workload("m", sink=Sink.RING)).fetch
    assert Configuration(IsolatedMode.ZERO_LAYER, tap=Tap.NOOP).workload(base).noop_taps
    assert Configuration(IsolatedMode.CUSTOM, layers=(1, 3)).workload(base).layers == (1, 3)


def test_a_workload_survives_json():
    workload = Configuration(IsolatedMode.CUSTOM, layers=(1, 3)).workload(Workload("m"))
    job = Job((Mode.CUSTOM,), 0, workload, "/tmp/x", profile="/tmp/y")
    assert restore(Job, json.loads(json.dumps(asdict(job)))) == job


def test_a_document_has_the_fields_of_the_isolated_benchmark():
    configuration = Configuration(ALL)
    workload = configuration.workload(Workload("/somewhere/m", batch_size=2))
    result = document(configuration, workload, run_of(iteration(2.0, 2.5), iteration(4.0, 5.0)))
    assert {name: result[name] for name in ("mode", "model", "batch_size", "prefill_tokens", "decode_tokens")} == {
        "mode": "all-layers",
        "model": "m",
        "batch_size": 2,
        "prefill_tokens": 64,
        "decode_tokens": 32,
    }
    assert (result["total_layers"], result["capture_layers"], result["num_captured_layers"]) == (4, [0, 1, 2, 3], 4)
    first, second = result["iterations"]
    assert first["iteration"] == 1
    assert [first[name] for name in ("generation_time", "fetch_time", "total_time")] == [2.0, 0.5, 2.5]
    assert first["throughput_tokens_per_sec"] == (128 + 64) / 2.0
    assert second["fetch_time"] == 1.0
    assert result["summary"]["mean_generation_time"] == 3.0
    assert result["summary"]["max_total_time"] == 5.0
    assert result["summary"]["min_fetch_time"] == 0.5
    assert "/somewhere" not in json.dumps(result)


def test_the_fetch_time_is_zero_without_captures_and_none_for_the_ring():
    zero = Configuration(IsolatedMode.ZERO_LAYER)
    idle = document(zero, zero.workload(Workload("m", batch_size=2)), run_of(iteration(2.0, None, 0), mode=Mode.IDLE))
    assert (idle["iterations"][0]["fetch_time"], idle["capture_layers"]) == (0.0, [])
    ring = Configuration(ALL)
    kept = document(ring, Workload("m", batch_size=2, sink=Sink.RING), run_of(iteration(2.0, None)))
    assert (kept["iterations"][0]["fetch_time"], kept["summary"]["mean_fetch_time"]) == (None, None)


def test_a_summary_has_each_statistic_of_each_figure():
    items = [dict.fromkeys(TIMES, value) for value in (1.0, 2.0, 6.0)]
    found = summary(items)
    assert [found[f"{word}_total_time"] for word in ("mean", "median", "min", "max")] == [3.0, 2.0, 1.0, 6.0]
    assert len(found) == 16


def test_the_command_line_defines_the_configuration():
    options = parse(["--mode", "custom", "--layers", "10,0,5", "--shape", "tiny"])
    assert configuration_of(options) == Configuration(IsolatedMode.CUSTOM, layers=(0, 5, 10))
    off = parse(["--mode", "zero-layer", "--capture-machinery", "off"])
    assert configuration_of(off) == Configuration(IsolatedMode.ZERO_LAYER, machinery=False)
    with pytest.raises(SystemExit, match="needs --layers"):
        configuration_of(parse(["--mode", "custom"]))
    with pytest.raises(SystemExit):
        parse(["--mode", "custom", "--layers", "a"])
