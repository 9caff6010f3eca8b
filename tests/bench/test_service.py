from dataclasses import replace

from bench.service.compare import bars, difference, show
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
    assert "residuum, features" in "".join(show(measured))


def test_the_first_token_has_a_bar_in_ms_and_with_a_shared_prefix_a_ratio():
    assert [(bar.value, bar.passed) for bar in bars(part(54.0, 50.0, 0))] == [(1.0, True), (0.0, True), (4.0, True)]
    assert [(bar.value, bar.passed) for bar in bars(part(54.0, 50.0, 9))] == [(1.0, True), (0.0, True), (1.08, False)]


def test_with_a_shared_prefix_captures_have_bars_over_both_ways_without_them():
    found = bars(part(54.0, 50.0, 9, captures=summary(55.0)))
    assert [(bar.value, bar.passed) for bar in found[2:]] == [(1.08, False), (1.1, False), (1.0185, True)]
