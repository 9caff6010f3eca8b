"""Rules act at the token that they say, and the rows of the reply show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum
from tests.conformance.rows import make_prompt
from tests.conformance.steering import add, in_turn, tensor
from tests.conformance.test_probes import check_scores, make_vector

if TYPE_CHECKING:
    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

CAPTURE = residuum.Capture(layers="all")
SAMPLING = {"temperature": 0.0, "ignore_eos": True}


def scores_of_plain_reply(
    engine: Engine, prompt: list[int], probe: residuum.Probe, tokens: int
) -> tuple[residuum.Reply, np.ndarray]:
    reply = engine.client.generate(prompt, max_tokens=tokens, probes=probe, **SAMPLING)
    assert reply.scores is not None
    return reply, reply.scores[probe.name]


def last_new_maximum(scores: np.ndarray) -> int:
    """Return a late token whose score is above all scores before it."""
    return int(np.argmax(scores[: len(scores) // 2]))


def test_a_reply_ends_at_the_token_of_its_rule_and_its_capture_is_complete(engine: Engine) -> None:
    prompt = make_prompt(np.random.default_rng(31), 40)
    probe = residuum.Probe(make_vector(engine, 60).values, layer=2, name="p")
    plain, scores = scores_of_plain_reply(engine, prompt, probe, 60)
    at = last_new_maximum(scores)
    threshold = float(np.sort(scores[: at + 1])[-2] + scores[at]) / 2 if at else float(scores[0]) - 1
    rule = residuum.Rule(probe, above=threshold, then="abort", name="stop")
    assert rule.fires_at(scores) == at
    reply = engine.client.generate(prompt, max_tokens=60, rules=rule, capture=CAPTURE, **SAMPLING)
    assert reply.token_ids == plain.token_ids[: at + 1]
    assert (reply.finish_reason, reply.stop_reason) == ("rule", "stop")
    (event,) = reply.events
    assert (event.token, event.action) == (at, "abort")
    manifest = engine.client.manifest(reply, wait=30)
    assert manifest.state == "complete"
    assert manifest.rule_events == (event,)
    assert manifest.sequences[0].finish_reason == "rule"
    assert engine.client.activations(reply)[2].shape[0] == len(prompt) + at
    engine.client.delete(reply)


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_rule_steers_from_the_position_that_it_says(engine: Engine, reference: Reference, sequences: int) -> None:
    """Each sequence is steered by what its own tokens score, and from its own position."""
    prompt = make_prompt(np.random.default_rng(32), 30)
    joy = make_vector(engine, 61)
    probe = residuum.Probe(make_vector(engine, 62).values, layer=3, name="p")
    sampling = {**SAMPLING, "n": sequences, **({"temperature": 1.5, "seed": 5} if sequences > 1 else {})}
    plain = engine.client.generate(prompt, max_tokens=60, probes=probe, **sampling)
    first = [sequence.scores["p"] for sequence in plain.sequences]
    rule = residuum.Rule(probe, above=float(np.median(first[0][:6])), then=residuum.Add(joy, layer=1, scale=0.5))
    with engine.paced():
        reply = engine.client.generate(prompt, max_tokens=60, rules=rule, capture=CAPTURE, **sampling)
    assert [rule.fires_at(scores) for scores in first] == [
        next((event.token for event in reply.events if event.sequence == index), None) for index in range(sequences)
    ]
    changes = engine.client.manifest(reply, wait=30).steering_changes
    assert [change.rule for change in changes] == ["p"] * len(reply.events)
    acts = engine.client.activations(reply)
    for index, sequence in enumerate(reply.sequences):
        (event,) = [event for event in reply.events if event.sequence == index]
        start = event.first_position
        assert start is not None
        assert len(prompt) + event.token <= start < len(prompt) + 59, "soon after the token, and during the reply"
        assert start in {change.first_positions[index] for change in changes}
        steered = in_turn([(0, None), (start, add(tensor(joy), 0.5))])
        rows = reference.rows([*prompt, *sequence.token_ids[:-1]], {1: steered})["resid_post"]
        for layer in range(4):
            found = acts.select(sequence=index)[layer]
            np.testing.assert_allclose(found, rows[layer], atol=2e-3 * np.abs(rows[layer]).max())
        check_scores(sequence.scores["p"], rows[3][len(prompt) - 1 :] @ probe.weights[0])
    engine.client.delete(reply)


def test_the_scores_of_an_mlp_are_those_of_the_rows(engine: Engine, reference: Reference) -> None:
    prompt = make_prompt(np.random.default_rng(34), 20)
    weights = np.stack([make_vector(engine, seed).values for seed in (65, 66, 67)]) / 8
    head = residuum.ProbeLayer([[1.0, -1.0, 0.5], [0.25, 2.0, 1.0]], [0.5, 0], "tanh")
    probe = residuum.Probe(weights, [0.5, 0, 0], layer=2, mlp=[head], activation="softmax")
    reply = engine.client.generate(prompt, max_tokens=12, probes=probe, **SAMPLING)
    rows = reference.rows([*prompt, *reply.token_ids[:-1]])["resid_post"][2][len(prompt) - 1 :]
    outputs = np.tanh(rows @ weights.T + probe.bias) @ head.weights.T + head.bias
    expected = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
    assert reply.scores is not None
    np.testing.assert_allclose(reply.scores["probe"], expected, atol=5e-3)


def test_smoothed_scores_are_those_of_the_rows(engine: Engine, reference: Reference) -> None:
    prompt = make_prompt(np.random.default_rng(33), 20)
    weights = np.stack([make_vector(engine, seed).values for seed in (63, 64)])
    kinds = {"ema": residuum.EMA(0.75), "max": residuum.RollingMax(3), "mean": residuum.RollingMean()}
    probes = [residuum.Probe(weights, [0.5, 0], layer=2, name=name, smooth=kind) for name, kind in kinds.items()]
    reply = engine.client.generate(prompt, max_tokens=12, probes=probes, score_prompt=True, **SAMPLING)
    rows = reference.rows([*prompt, *reply.token_ids[:-1]])["resid_post"][2]
    scores = rows @ weights.T + [0.5, 0]
    assert reply.scores is not None
    assert reply.prompt_scores is not None
    for name, kind in kinds.items():
        bound = 2e-3 * np.abs(scores).max()
        np.testing.assert_allclose(reply.prompt_scores[name], kind.apply(scores[: len(prompt)]), atol=bound)
        np.testing.assert_allclose(reply.scores[name], kind.apply(scores[len(prompt) - 1 :]), atol=bound)
