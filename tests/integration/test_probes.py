"""Probes on a real model: scores that come with tokens equal those of the captured rows."""

from __future__ import annotations

import numpy as np
import pytest

import residuum

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("integration")]

PROMPT = "The capital of France is"
WIDTH = 576
RNG = np.random.default_rng(5)
PROBES = [
    residuum.Probe(RNG.normal(size=WIDTH) / 50, 0.25, layer=12, activation="sigmoid", name="early"),
    residuum.Probe(RNG.normal(size=(3, WIDTH)) / 50, [0, 1, -1], layer=25, activation="softmax", name="classes"),
    residuum.Probe(RNG.normal(size=(2, WIDTH)), layer=12, name="plain"),
]
CAPTURE = residuum.Capture(layers=[12, 25])


def check(reply: residuum.Reply, acts: residuum.Activations, sequence: int = 0) -> None:
    """Check the scores of a reply against the rows that were captured of it, in float64."""
    scores, prompt = reply.sequences[sequence].scores, len(reply.prompt_token_ids)
    assert scores is not None
    for probe in PROBES:
        rows = acts[probe.layer].astype(np.float64)
        outputs = rows @ probe.weights.T.astype(np.float64) + probe.bias
        expected = outputs
        if probe.activation == "sigmoid":
            expected = 0.5 * (1 + np.tanh(outputs / 2))
        elif probe.activation == "softmax":
            powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
            expected = powers / powers.sum(axis=1, keepdims=True)
        # A captured row is rounded to bfloat16, each element by up to 2**-9 of it. The probe reads the row before that.
        bound = 1e-5 + 2**-8 * (np.abs(rows) @ np.abs(probe.weights.T)).max(axis=1, keepdims=True)
        found = scores[probe.name].reshape(-1, probe.num_outputs)
        assert found.shape == (len(reply.sequences[sequence].token_ids), probe.num_outputs)
        assert (np.abs(found - expected[prompt - 1 :]) <= bound[prompt - 1 :]).all()
        if reply.prompt_scores is not None and sequence == 0:
            of_prompt = reply.prompt_scores[probe.name].reshape(-1, probe.num_outputs)
            assert len(of_prompt) == prompt
            assert (np.abs(of_prompt - expected[:prompt]) <= bound[:prompt]).all()


@pytest.mark.parametrize("score_prompt", [False, True])
def test_scores_are_those_of_the_captured_rows(client: residuum.Client, score_prompt: bool) -> None:
    reply = client.generate(PROMPT, max_tokens=12, capture=CAPTURE, probes=PROBES, score_prompt=score_prompt)
    assert (reply.prompt_scores is None) == (not score_prompt)
    check(reply, client.activations(reply))
    client.delete(reply)


def test_a_capture_keeps_the_scores_of_its_rows(client: residuum.Client) -> None:
    asked = {"max_tokens": 6, "capture": CAPTURE, "probes": PROBES, "request_id": "kept-scores"}
    reply = client.generate(PROMPT, **asked, score_prompt=True)
    manifest, acts, prompt = client.manifest(reply, wait=30), client.activations(reply), len(reply.prompt_token_ids)
    kept = manifest.scores()
    assert kept is not None
    assert reply.scores is not None
    assert reply.prompt_scores is not None
    assert acts.scores is not None
    for name, scores in reply.scores.items():
        np.testing.assert_array_equal(kept[name], scores)
        np.testing.assert_array_equal(acts.scores[name][prompt - 1 :], scores)
        np.testing.assert_array_equal(acts.scores[name][:prompt], reply.prompt_scores[name])
        assert len(acts.scores[name]) == len(acts.positions)
    again = client.generate(PROMPT, **asked, score_prompt=True, if_exists="skip")
    assert again.skipped
    assert again.scores is not None
    assert again.prompt_scores is not None
    np.testing.assert_array_equal(again.scores["classes"], reply.scores["classes"])
    np.testing.assert_array_equal(again.prompt_scores["classes"], reply.prompt_scores["classes"])
    with pytest.raises(residuum.CaptureExists, match="probes"):
        client.generate(PROMPT, **{**asked, "probes": PROBES[:1]}, if_exists="skip")
    client.delete(reply)
    plain = client.generate(PROMPT, max_tokens=2, capture=CAPTURE, probes=PROBES[0])
    scores = client.activations(plain).scores
    assert scores is not None
    assert np.isnan(scores["early"]).tolist() == [True] * (prompt - 1) + [False] * 2
    client.delete(plain)


def test_a_probe_reads_the_steered_row(client: residuum.Client) -> None:
    steer = residuum.Add(residuum.Vector(10 * RNG.normal(size=WIDTH)), layer=12)
    reply = client.generate(PROMPT, max_tokens=8, capture=CAPTURE, probes=PROBES, steer=steer, score_prompt=True)
    check(reply, client.activations(reply))
    client.delete(reply)


def test_each_sequence_has_its_scores(client: residuum.Client) -> None:
    reply = client.generate(PROMPT, max_tokens=8, n=3, temperature=1.0, seed=3, capture=CAPTURE, probes=PROBES)
    acts = client.activations(reply)
    for sequence in range(3):
        check(reply, acts.select(sequence=sequence), sequence)
    client.delete(reply)


def test_each_token_comes_with_its_scores(client: residuum.Client) -> None:
    with client.stream(PROMPT, max_tokens=8, probes=PROBES) as stream:
        deltas = list(stream)
    for delta in deltas:
        assert delta.scores is not None
        assert all(len(scores) == len(delta.token_ids) for scores in delta.scores.values())
    assert stream.reply.scores is not None
    joined = np.concatenate([delta.scores["classes"] for delta in deltas if delta.scores])
    np.testing.assert_array_equal(joined, stream.reply.scores["classes"])


@pytest.mark.parametrize("score_prompt", [False, True])
def test_an_attention_probe_reads_all_positions(client: residuum.Client, score_prompt: bool) -> None:
    """The prompt is in the prefix cache after the first request, and its rows are read all the same."""
    queries, values = RNG.normal(size=(4, WIDTH)) / 50, RNG.normal(size=(4, 2, WIDTH)) / 50
    slopes = [0.0, 0.1, -0.1, 0.5]
    probe = residuum.Probe.from_attention(
        queries, values, [1, -1], layer=12, position_weights=slopes, activation="sigmoid", name="pooled"
    )
    prompt = "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is"
    for _ in range(2):
        reply = client.generate(prompt, max_tokens=8, n=2, probes=[probe], score_prompt=score_prompt, capture=CAPTURE)
        acts, start = client.activations(reply), len(reply.prompt_token_ids) - 1
        for index, sequence in enumerate(reply.sequences):
            rows = acts.select(sequence=index)[12].astype(np.float64)
            logits = rows @ queries.T + np.arange(len(rows))[:, None] * slopes
            weights = np.exp(logits - logits.max(axis=0))
            tops = np.cumsum(weights[..., None] * np.einsum("tw,how->tho", rows, values), axis=0)
            outputs = (tops / np.cumsum(weights, axis=0)[..., None]).sum(axis=1) + np.array([1, -1])
            expected = 0.5 * (1 + np.tanh(outputs / 2))
            assert sequence.scores is not None
            # Captured rows are rounded to bfloat16, each element by up to 2**-9 of it.
            np.testing.assert_allclose(sequence.scores["pooled"], expected[start:], rtol=0, atol=0.02)
            assert np.ptp(expected) > 0.1, "the bound above would notice"
            if score_prompt and index == 0:
                assert reply.prompt_scores is not None
                np.testing.assert_allclose(reply.prompt_scores["pooled"], expected[: start + 1], rtol=0, atol=0.02)
        client.delete(reply)
    plain = client.generate(prompt, max_tokens=8, probes=[probe])  # without a capture, only the probe needs the prompt
    assert plain.scores is not None
    np.testing.assert_allclose(plain.scores["pooled"], reply.scores["pooled"], rtol=0, atol=0.02)


def test_a_rule_acts_on_an_attention_probe(client: residuum.Client) -> None:
    probe = residuum.Probe.from_attention(np.zeros(WIDTH), np.zeros(WIDTH), 0.5, layer=12, name="half")
    rule = residuum.Rule(probe, above=0.4, for_tokens=3, then="abort", name="stop")
    reply = client.generate(PROMPT, max_tokens=8, rules=[rule])
    assert (reply.finish_reason, reply.stop_reason, len(reply.token_ids)) == ("rule", "stop", 3)


def test_probes_do_not_change_the_reply(client: residuum.Client) -> None:
    plain = client.generate(PROMPT, max_tokens=12)
    assert client.generate(PROMPT, max_tokens=12, probes=PROBES).token_ids == plain.token_ids


def test_scores_of_many_prompts_do_not_mix(client: residuum.Client) -> None:
    prompts = [PROMPT, "Once upon a time", "I", "Write a poem about the sea and the mountains, please:"]
    replies = client.generate_many(
        prompts, max_tokens=10, capture=CAPTURE, probes=PROBES, score_prompt=True, progress=False
    )
    for reply, acts in zip(replies, client.activations(replies), strict=True):
        check(reply, acts)
    client.delete(replies)


def test_bad_probes_are_refused(client: residuum.Client) -> None:
    info = client.info()
    assert "resid_post" in info.probe_sites
    for probes, error in (
        ([residuum.Probe(np.ones(WIDTH), layer=info.num_layers)], residuum.UnknownLayer),
        ([residuum.Probe(np.ones(5), layer=1)], residuum.BadVector),
        ([residuum.Probe(np.ones((info.limits["max_probe_outputs"] + 1, WIDTH)), layer=1)], residuum.ResiduumError),
    ):
        with pytest.raises(error):
            client.generate(PROMPT, max_tokens=1, probes=probes)
