import asyncio
import json
from dataclasses import replace
from importlib.metadata import distributions

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

import bench.service.served
import inference_svc.vllm_serve.plugin
from bench.processes import RunFailedError
from bench.service.__main__ import job_of, parse
from bench.service.compare import _check_spread, difference, over_served
from bench.service.http_client import EventCounter
from bench.service.load import Load, Measured, run_load
from bench.service.report import bars, show
from bench.service.served import plugin_environment, serve_flags

LOAD = Load("a", streams=2, requests=3, prefill=5, decode=1, vocab_size=1000, shared=7)


def test_prompts_share_their_start_and_nothing_else():
    one, other = LOAD.prompts(), replace(LOAD, name="b").prompts()
    assert {len(prompt) for prompt in one + other} == {12}
    assert len({tuple(prompt[:7]) for prompt in one + other}) == 1
    assert len({tuple(prompt[7:]) for prompt in one + other}) == 6
    assert one == LOAD.prompts()
    assert {len(prompt) for prompt in replace(LOAD, shared=0).prompts()} == {5}


def summary(first_token_ms):
    return {
        "tokens_per_second": 100.0, "requests_per_second": 4.0, "first_token_ms": first_token_ms, "token_ms": 3.0,
        "request_ms": 9.0, "request_cpu_ms": 1.0, "token_cpu_us": 1.0,
    }  # fmt: skip


def part(ours, vllm, shared_prefix, **more):
    """A result of 32 streams. `more` has the summary of each further way."""
    summaries = {"AsyncLLM": [summary(vllm)], "residuum": [summary(ours)], **{way: [its] for way, its in more.items()}}
    return {
        "parameters": {"shared_prefix": shared_prefix, "captures": "captures" in more, "probes": 8, "features": 9},
        "levels": [
            {
                "streams": 32,
                **summaries,
                "difference": difference(summaries, "AsyncLLM", "residuum"),
                "over_vllm": {way: difference(summaries, "AsyncLLM", way) for way in more},
                "over_residuum": {way: difference(summaries, "residuum", way) for way in more},
            }
        ],
    }


def test_probes_and_features_have_a_bar_for_each_token_over_the_same_without_them():
    measured = part(
        54.0, 50.0, 0, probes={**summary(50.0), "token_ms": 3.06}, features={**summary(9.0), "token_ms": 3.12}
    )
    probes, features = bars(measured)[-2:]
    assert (probes.name, probes.value, probes.passed) == (
        "each token with 8 probes, over without, 32 streams",
        1.02,
        False,
    )
    assert (features.value, features.passed, features.limit) == (1.04, True, 1.05)
    lines = list(show(measured))
    assert "residuum, features" in lines[0]
    assert "32 streams, residuum, probes: each token 1.020 times residuum's (1.020 to 1.020)" in lines


def test_the_report_says_how_many_bytes_captures_take():
    measured = part(54.0, 50.0, 0, probes=summary(50.0), features={**summary(9.0), "stored_bytes_per_token": 260.2})
    stored = [line for line in show(measured) if "stored" in line]
    assert stored == ["32 streams, residuum, features: 260 bytes stored for each token"]


def test_the_first_token_has_a_bar_in_ms_and_with_a_shared_prefix_a_ratio():
    assert [(bar.value, bar.passed) for bar in bars(part(54.0, 50.0, 0))] == [(1.0, True), (0.0, True), (4.0, True)]
    assert [(bar.value, bar.passed) for bar in bars(part(54.0, 50.0, 9))] == [(1.0, True), (0.0, True), (1.08, False)]


def test_with_a_shared_prefix_captures_have_bars_over_both_ways_without_them():
    found = bars(part(54.0, 50.0, 9, captures=summary(55.0)))
    assert [(bar.value, bar.passed) for bar in found[2:]] == [(1.08, False), (1.1, False), (1.0185, True)]


def test_stock_vllm_serve_is_the_base_of_all_ways_with_a_server():
    first_tokens = {
        "AsyncLLM": [1, 1, 1],
        "residuum": [10, 11, 12],
        "captures": [11, 12, 13],
        "vllm serve": [10, 10, 10],
    }
    found = over_served({way: [summary(float(ms)) for ms in rounds] for way, rounds in first_tokens.items()})
    assert set(found) == {"residuum", "captures"}
    assert found["captures"]["first_token_ratio"] == 1.2
    assert found["captures"]["first_token_ratios"] == [1.1, 1.2, 1.3]


def served(shared_prefix):
    measured = part(54.0, 50.0, shared_prefix, captures=summary(55.0))
    ways = {"vllm serve": 50.0, "vllm serve, taps": 51.0, "vllm serve, captures": 53.0}
    level = measured["levels"][0]
    level.update({way: [summary(ms)] for way, ms in ways.items()})
    level["over_served"] = over_served({way: level[way] for way in ("AsyncLLM", "residuum", "captures", *ways)})
    return measured


def test_captures_in_both_servers_have_a_bar_over_stock_vllm_serve_if_prompts_share_their_start():
    found = bars(served(9))[-2:]
    assert [(bar.name, bar.value, bar.passed) for bar in found] == [
        ("to the first token, captures in vllm serve, of 32 streams, over vllm serve's", 1.06, False),
        ("to the first token, captures through gRPC, of 32 streams, over vllm serve's", 1.1, False),
    ]
    assert not [bar for bar in bars(served(0)) if "vllm serve" in bar.name]


def test_the_report_says_how_the_rounds_spread():
    lines = list(show(served(9)))
    assert "32 streams, vllm serve, taps: to the first token 1.020 times vllm serve's (1.020 to 1.020)" in lines
    assert "residuum, captures - vllm serve" in lines[0]


def test_vllm_serve_gets_the_arguments_of_the_services_engine():
    options = parse(["--shape", "tiny", "--served", "--shared-prefix", "9", "--streams", "3", "--eager"])
    job = job_of(options, options.runners[0])
    flags = serve_flags(job.served)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("model")
    parser.add_argument("--disable-uvicorn-access-log", action="store_true")
    parser.set_defaults(model=None)
    found = vars(parser.parse_args(flags))
    wanted = {**job.served, "served_model_name": ["bench"], "disable_uvicorn_access_log": True}
    assert {name: found[name] for name in wanted} == wanted
    service = dict(zip(job.flags[::2], job.flags[1::2], strict=False))
    assert json.loads(service["--engine-args"]).items() <= job.served.items()
    assert float(service["--kv-cache-gib"]) * 2**30 == job.served["kv_cache_memory_bytes"]


def test_vllm_finds_the_plugin_also_where_residuum_runs_from_its_checkout(tmp_path, monkeypatch):
    assert plugin_environment(tmp_path, {}) == {}
    monkeypatch.setattr(bench.service.served, "entry_points", lambda group: [])
    found = plugin_environment(tmp_path, {"PYTHONPATH": "/more"})["PYTHONPATH"].split(":")
    assert found[1:] == ["/more"]
    (distribution,) = distributions(path=found[:1])
    (plugin,) = distribution.entry_points
    assert (plugin.group, plugin.name) == ("vllm.general_plugins", "residuum")
    assert plugin.load() is inference_svc.vllm_serve.plugin.register


EVENT = b'data: {"id":"cmpl-a","choices":[{"index":0,"text":"x"}]}\n\n'
LAST = b'data: {"id":"cmpl-a","choices":[],"usage":{"prompt_tokens":5,"total_tokens":9,"completion_tokens":4}}\n\n'


@pytest.mark.parametrize("size", [1, 7, 60, 1000])
def test_events_with_tokens_are_counted_however_the_stream_is_cut(size):
    stream = 3 * EVENT + LAST + b"data: [DONE]\n\n"
    counter = EventCounter("a")
    assert sum(counter.add(stream[at : at + size]) for at in range(0, len(stream), size)) == 3
    assert counter.finished() == 4


def test_a_stream_that_fails_or_ends_early_is_an_error():
    with pytest.raises(RunFailedError, match="no store"):
        EventCounter("a").add(b'data: {"error": {"message": "no store"}}\n\n')
    counter = EventCounter("a")
    counter.add(EVENT)
    with pytest.raises(RunFailedError, match="ended early"):
        counter.finished()


def test_replies_that_come_in_one_message_are_an_error():
    """Otherwise the time of a token would be 0, by which the ratios divide."""
    _check_spread(Measured(1.0, 8, [5.0], [0.5], [9.0]), "AsyncLLM")
    with pytest.raises(RunFailedError, match="AsyncLLM came in one message, so"):
        _check_spread(Measured(1.0, 8, [5.0, 5.0, 5.0], [0.0, 0.0, 3.0], [9.0, 9.0, 9.0]), "AsyncLLM")


def test_requests_are_made_ready_before_the_time_begins():
    happened = []

    def start(name, _prompt, decode):
        happened.append(f"ready {name}")

        async def arrivals():
            happened.append(f"begin {name}")
            yield decode

        return arrivals()

    asyncio.run(run_load(replace(LOAD, streams=1), start))
    assert happened == ["ready a-0", "ready a-1", "ready a-2", "begin a-0", "begin a-1", "begin a-2"]
