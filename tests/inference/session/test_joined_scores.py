"""The scores of all probes in one array, and in a message."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from inference_svc.engine.streams import Delta
from inference_svc.resources.score_board import ScoreBoard, ScoreMemory
from inference_svc.session.messages import messages
from inference_svc.session.scores.joined import JoinedScores, ScoreLayout
from residuum.v1 import rule_pb2

OUTPUTS = (1, 200, 3)
LAYOUT = ScoreLayout(OUTPUTS)


def joined(tokens):
    rows = np.random.default_rng(tokens).standard_normal((tokens, sum(OUTPUTS))).astype(np.float32)
    rows[:, 1], rows[:, -1] = np.nan, -np.inf
    return JoinedScores(rows, LAYOUT)


def test_each_probe_has_its_columns():
    scores = joined(2)
    assert [part.shape for part in scores] == [(2, count) for count in OUTPUTS]
    np.testing.assert_array_equal(np.concatenate([*scores], axis=1), scores.rows)
    np.testing.assert_array_equal(scores[-1], scores.rows[:, -3:])
    (second,) = scores[1:2]
    np.testing.assert_array_equal(second, scores.rows[:, 1:201])
    with pytest.raises(IndexError):
        scores[3]


def test_a_delta_gets_scores_and_keeps_the_rest():
    rest = {"finish_reason": "stop", "stop_reason": "a", "prompt_scores": (np.ones((1, 1)),), "rule_events": ("event",)}
    delta, scores = Delta("text", [5], **rest), joined(1)
    assert delta.with_scores(scores) == delta._replace(scores=scores)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_message_has_the_scores_of_each_probe(tokens):
    scores, event = joined(tokens), rule_pb2.RuleEvent(rule="r", token=4)
    (message,) = messages(1, Delta("text", [5] * tokens, scores=scores, rule_events=(event,)))
    (expected,) = messages(1, Delta("text", [5] * tokens, scores=tuple(scores), rule_events=(event,)))
    assert message.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
    for part, values in zip(message.delta.scores, scores, strict=True):
        np.testing.assert_array_equal(np.array(part.values, np.float32), values.ravel())
    assert (message.delta.text, list(message.delta.token_ids)) == ("text", [5] * tokens)
    assert (message.delta.sequence, list(message.delta.rule_events)) == (1, [event])


def test_scores_that_look_like_a_missing_one_at_an_odd_place_have_arrived():
    board = ScoreBoard(ScoreMemory(1 << 12), clock=iter(range(0, 1000, 6)).__next__)
    region = board.take(0, 2, 1)
    memory = board._memory.numbers[region.offset : region.offset + 2].view(np.uint32)
    mark = memory[:1].tobytes()
    memory[:] = np.frombuffer(b"\x01" + mark + b"\x01\x01\x01", np.uint32)
    assert asyncio.run(board.read(region, 0, 2)).tobytes() == memory.tobytes()
