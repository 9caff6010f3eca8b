from dataclasses import replace

from bench.service.compare import bars, difference
from bench.service.load import Load

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
        "tokens_per_second": 100.0, "first_token_ms": first_token_ms, "token_ms": 3.0, "request_ms": 9.0,
        "request_cpu_ms": 1.0, "token_cpu_us": 1.0,
    }  # fmt: skip


def part(ours, vllm, shared_prefix):
    summaries = {"AsyncLLM": [summary(vllm)], "residuum": [summary(ours)]}
    return {
        "parameters": {"shared_prefix": shared_prefix},
        "levels": [{"streams": 32, "difference": difference(summaries)}],
    }


def test_probes_have_a_bar_for_each_token_over_the_same_without_them():
    measured = part(54.0, 50.0, 0)
    summaries = {way: [{**summary(50.0), "token_ms": ms}] for way, ms in (("AsyncLLM", 2.0), ("residuum", 3.0))}
    summaries["residuum with probes"] = [{**summary(50.0), "token_ms": 3.06}]
    measured["parameters"]["probes"] = 8
    measured["levels"][0]["probes"] = difference(summaries, "residuum", "residuum with probes")
    last = bars(measured)[-1]
    assert (last.value, last.passed, last.limit) == (1.02, False, 1.01)


def test_the_first_token_has_a_bar_in_ms_and_with_a_shared_prefix_a_ratio():
    assert [(bar.value, bar.passed) for bar in bars(part(54.0, 50.0, 0))] == [(1.0, True), (0.0, True), (4.0, True)]
    assert [(bar.value, bar.passed) for bar in bars(part(54.0, 50.0, 9))] == [(1.0, True), (0.0, True), (1.08, False)]
