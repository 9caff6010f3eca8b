"""Scores that are stored with a capture: what is kept, what is left out, and what a skipped request repeats."""

from __future__ import annotations

import numpy as np
import pytest

from inference_svc.engine.streams import Delta
from inference_svc.requests.registry import Running
from inference_svc.session.capture_session import CaptureSession
from inference_svc.session.existing_capture import Stops, kept_sequences, replay
from inference_svc.session.scores.kept import KeptScores
from residuum.v1 import capture_pb2, probe_pb2, rule_pb2, store_pb2
from residuum.wire.limits import MAX_KEPT_SCORES, MAX_SEAL_BYTES
from tests.inference.service_support import CAPTURE, FACTS
from tests.inference.spec_support import spec_of


def delta(count, first=0.0, **fields):
    """Tokens with the scores of two probes, of one and of two outputs."""
    one = np.arange(count, dtype=np.float32)[:, None] + first
    return Delta("", list(range(count)), scores=(one, np.concatenate([one, -one], axis=1)), **fields)


def sealed(kept, sequences=2):
    seal = store_pb2.SealCaptureRequest(sequences=[capture_pb2.SequenceOutcome() for _ in range(sequences)])
    kept.put_into(seal)
    return seal


def test_scores_of_all_sequences_and_of_the_prompt_are_kept():
    kept = KeptScores(2, 2)
    prompt = (np.ones((3, 1), np.float32), np.ones((3, 2), np.float32))
    kept.add(0, delta(2, prompt_scores=prompt))
    kept.add(1, delta(1, 7.0))
    kept.add(0, Delta("", (), "stop"))
    kept.add(0, delta(1, 5.0))
    seal = sealed(kept)
    assert [list(probe.values) for probe in seal.sequences[0].scores.probes] == [[0, 1, 5], [0, 0, 1, -1, 5, -5]]
    assert [list(probe.values) for probe in seal.sequences[1].scores.probes] == [[7], [7, -7]]
    assert [len(probe.values) for probe in seal.prompt_scores.probes] == [3, 6]


def test_a_sequence_without_tokens_has_scores_of_none():
    seal = sealed(KeptScores(2, 1), 1)
    assert [list(probe.values) for probe in seal.sequences[0].scores.probes] == [[], []]
    assert not seal.HasField("prompt_scores")


@pytest.mark.parametrize("surplus", [0, 1])
def test_too_many_scores_are_left_out(surplus):
    kept = KeptScores(2, 2)
    kept.add(0, delta(MAX_KEPT_SCORES // 3))
    kept.add(1, delta(surplus))
    seal = sealed(kept)
    (first, second) = seal.sequences
    if not surplus:
        assert len(first.scores.probes[0].values) == MAX_KEPT_SCORES // 3
        return
    for scores in (first.scores, second.scores, seal.prompt_scores):
        assert not scores.probes
        assert "more scores than the 131072" in scores.unknown_detail


async def test_a_skipped_request_repeats_scores_and_events():
    event = rule_pb2.RuleEvent(rule="stop", sequence=1, token=1, action=rule_pb2.RULE_ACTION_ABORT)
    scores = probe_pb2.KeptScores(probes=[probe_pb2.ProbeScores(values=[0.5, 0.75])])
    manifest = capture_pb2.CaptureManifest(
        description=capture_pb2.CaptureDescription(capture_id="r", prompt_token_ids=[1, 2]),
        sequences=[
            capture_pb2.SequenceOutcome(generated_token_ids=[3, 4], finish_reason=reason, scores=scores)
            for reason in ("length", "rule")
        ],
        rule_events=[event],
        prompt_scores=scores,
    )

    async def text_of(prompt, reply):
        return "text"

    kept, counted = await kept_sequences(manifest, Stops([], [], None), text_of), []
    events = [event async for event in replay(manifest, kept, None, counted.append)]
    assert counted == [len(item.token_ids) for item in kept]
    assert events[1].delta.prompt_scores == scores.probes
    assert [item.delta.scores for item in events[2:4]] == [scores.probes] * 2
    assert [list(item.delta.rule_events) for item in events[2:4]] == [[], [event]]
    ends = events[-1].finished.sequences
    assert [(end.finish_reason, end.stop_reason) for end in ends] == [("length", ""), ("rule", "stop")]


@pytest.mark.parametrize("has_probes", [True, False])
async def test_a_seal_that_is_too_long_loses_its_scores_before_its_texts(has_probes):
    count, text = 1 << 16, "x" * (MAX_SEAL_BYTES - (100 << 10))
    probes = probe_pb2.ProbeSpec(probes=[probe_pb2.Probe(name="p", outputs=[probe_pb2.ProbeOutput()])])
    spec = spec_of("r", CAPTURE, probes=probes) if has_probes else spec_of("r", CAPTURE)

    async def describe(seal):
        seal.prompt_token_texts.text = text if has_probes else text + text

    running = Running("r", spec, was_registered=False)
    session = CaptureSession(FACTS, running, [1], 1, lambda: None, describe_prompt=describe)
    seal = store_pb2.SealCaptureRequest(sequences=[capture_pb2.SequenceOutcome()])
    if has_probes:
        seal.sequences[0].scores.probes.add(values=[1.0] * count)
    await session._complete(seal)
    assert seal.ByteSize() <= MAX_SEAL_BYTES
    if has_probes:
        assert "no room for its scores" in seal.sequences[0].scores.unknown_detail
        assert seal.prompt_token_texts.text == text
    else:
        assert "too long" in seal.prompt_token_texts.unknown_detail
        assert not seal.sequences[0].HasField("scores")
        assert not seal.HasField("prompt_scores")
