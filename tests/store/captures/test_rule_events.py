"""Events of rules arrive with the seal and are stored in the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest

from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, probe_pb2, rule_pb2
from residuum.wire.limits import MAX_RULE_EVENTS_BYTES
from tests.store.support import COMPLETE, OPEN, Client, describe, failing_with, make_chunk, serving

INVALID = Reason.ERROR_REASON_INVALID_FIELD


def event(token: int = 1, sequence: int = 0, rule: str = "r") -> rule_pb2.RuleEvent:
    return rule_pb2.RuleEvent(rule=rule, token=token, sequence=sequence, score=0.75, action=rule_pb2.RULE_ACTION_ABORT)


@pytest.mark.parametrize("rows", ["all there", "some missing"])
def test_rules_and_their_events_survive_a_restart(tmp_path: Path, rows: str) -> None:
    description = describe(layers=[0], prompt=3)
    description.probes.rules.add(name="r", probe="p", above=0.5)
    description.probes.probes.add(name="p", outputs=[probe_pb2.ProbeOutput(digest=b"d" * 32)])
    events = [event(), event(rule="another")]
    with serving(tmp_path / "store") as (_, client):
        client.open(description)
        if rows == "all there":
            client.append([make_chunk([0], range(4))])
        scores = probe_pb2.KeptScores(probes=[probe_pb2.ProbeScores(values=[0.25] * 3)])
        outcome = capture_pb2.SequenceOutcome(generated_token_ids=[1, 2], finish_reason="rule")
        outcome.scores.probes.add(values=[0.5, 0.75])
        client.seal(sequences=[outcome], rule_events=events, prompt_scores=scores)
    with serving(tmp_path / "store") as (_, client):
        manifest = client.get()
        assert manifest.state == (COMPLETE if rows == "all there" else OPEN)
        assert list(manifest.rule_events) == events
        assert manifest.description.probes == description.probes
        assert list(manifest.sequences[0].scores.probes[0].values) == [0.5, 0.75]
        assert manifest.prompt_scores == scores
        again = client.seal(sequences=[outcome], rule_events=events, prompt_scores=scores)
        assert again.state == manifest.state, "a repeated seal succeeds"


def kept(*counts: int) -> probe_pb2.KeptScores:
    return probe_pb2.KeptScores(probes=[probe_pb2.ProbeScores(values=[0.5] * count) for count in counts])


@pytest.mark.parametrize(
    ("of_sequence", "of_prompt", "field"),
    [
        (kept(2), kept(), "sequences.scores"),
        (kept(2, 3), kept(), "sequences.scores"),
        (kept(2, 4), kept(3, 5), "prompt_scores"),
        (kept(2, 4, 2), kept(), "sequences.scores"),
    ],
)
def test_scores_are_those_of_the_tokens(
    client: Client, of_sequence: probe_pb2.KeptScores, of_prompt: probe_pb2.KeptScores, field: str
) -> None:
    description = describe(prompt=3)
    for name, outputs in (("one", 1), ("two", 2)):
        description.probes.probes.add(name=name, outputs=[probe_pb2.ProbeOutput(digest=b"d" * 32)] * outputs)
    client.open(description)
    outcome = capture_pb2.SequenceOutcome(generated_token_ids=[1, 2], finish_reason="stop", scores=of_sequence)
    with failing_with(INVALID) as caught:
        client.seal(sequences=[outcome], prompt_scores=of_prompt)
    assert caught[0].metadata == {"field": field}


def test_another_seal_with_other_events_is_refused(client: Client) -> None:
    client.open()
    client.seal(rule_events=[event(4)])
    with failing_with(Reason.ERROR_REASON_CAPTURE_ENDED):
        client.seal(rule_events=[event(5)])


def test_events_are_of_the_sequences_of_the_capture(client: Client) -> None:
    client.open(describe(sequences=2))
    with failing_with(INVALID) as caught:
        client.seal(generated=[1, 1], rule_events=[event(0, 1), event(0, 2)])
    assert caught[0].metadata == {"field": "rule_events"}


def test_the_total_size_of_events_is_limited(client: Client) -> None:
    client.open()
    half = event(rule="x" * (MAX_RULE_EVENTS_BYTES // 2))
    with failing_with(INVALID) as caught:
        client.seal(rule_events=[half, half])
    assert caught[0].metadata == {"field": "rule_events"}
