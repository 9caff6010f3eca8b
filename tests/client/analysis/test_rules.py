"""Rules and smoothing: what is sent, what is refused, and the events of replies."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

import residuum
from residuum.protocol.generation.events import ReplyBuilder
from residuum.v1 import capture_pb2, inference_pb2, probe_pb2, rule_pb2, steering_pb2
from residuum.values.captures.manifest_json import from_document
from tests.client.support.peer import HIDDEN

INVALID = residuum.InvalidRequest
JOY = residuum.Vector(np.full(HIDDEN, 2.0, np.float32))
POSITION = residuum.Probe(np.eye(HIDDEN)[3], layer=2, name="position")
"""Its scores of the peer's rows are their positions."""
SIGMOID = residuum.Probe(np.eye(HIDDEN)[3], layer=2, activation="sigmoid", name="sure")
TWO = residuum.Probe(np.eye(HIDDEN)[[0, 3]], layer=2, name="two")


class TestRule:
    def test_its_message(self):
        rule = residuum.Rule(TWO, above=0.5, for_tokens=3, then="abort", output=1, name="strict")
        assert rule.to_proto() == rule_pb2.Rule(
            name="strict", probe="two", output=1, above=0.5, for_tokens=3, action=rule_pb2.RULE_ACTION_ABORT
        )
        assert residuum.Rule("two", below=-1).to_proto() == rule_pb2.Rule(
            name="two", probe="two", below=-1, for_tokens=1, action=rule_pb2.RULE_ACTION_FLAG
        )

    @pytest.mark.parametrize("many", [False, True])
    def test_operations_make_it_steer(self, many):
        add = residuum.Add(JOY, layer=1, scale=2.0)
        rule = residuum.Rule(POSITION, above=1, then=[add] if many else add)
        assert rule.to_proto().action == rule_pb2.RULE_ACTION_STEER
        assert rule.to_proto().steering == steering_pb2.SteeringSpec(operations=[add.to_proto()])

    @pytest.mark.parametrize(
        ("fields", "told"),
        [
            ({}, "either above= or below="),
            ({"above": 0.5, "below": 0.5}, "either above= or below="),
            ({"above": math.nan}, "above must be a finite float32, not nan"),
            ({"below": 1e39}, "below must be a finite float32"),
            ({"above": 1.2}, "can never fire: scores of the probe 'sure' are from 0 to 1"),
            ({"below": 0}, "can never fire"),
            ({"above": 0.5, "for_tokens": 0}, "for_tokens must be at least 1, not 0"),
            ({"above": 0.5, "output": 1}, "has 1 output; output 1 does not exist"),
            ({"above": 0.5, "output": -1}, "output must be at least 0, not -1"),
            ({"above": 0.5, "then": "stop"}, "then must be 'flag', 'abort', or operations"),
            ({"above": 0.5, "then": []}, "then has no operations"),
            ({"above": 0.5, "name": "a b"}, "'a b' is not a valid name"),
            ({"above": 0.5, "then": residuum.Set(residuum.StoredRow("r", layer=1, position=0), layer=1)}, "StoredRow"),
        ],
    )
    def test_a_bad_rule_is_refused(self, fields, told):
        with pytest.raises(INVALID, match=told):
            residuum.Rule(SIGMOID, **fields)

    @pytest.mark.parametrize(
        "fields",
        [
            {"probe": 3},
            {"above": "high"},
            {"above": 0.5, "for_tokens": 1.5},
            {"above": 0.5, "for_tokens": True},
            {"above": 0.5, "then": JOY},
            {"above": 0.5, "name": 3},
        ],
    )
    def test_a_value_of_another_type_is_refused(self, fields):
        with pytest.raises(TypeError):
            residuum.Rule(**{"probe": SIGMOID, **fields})

    def test_when_it_fires(self):
        scores = [0.1, 0.9, 0.2, 0.8, 0.95]
        assert residuum.Rule(SIGMOID, above=0.5).fires_at(scores) == 1
        assert residuum.Rule(SIGMOID, above=0.5, for_tokens=2).fires_at(scores) == 4
        assert residuum.Rule(SIGMOID, below=0.05).fires_at(scores) is None
        assert residuum.Rule(TWO, above=0.5, output=1).fires_at(np.stack([np.zeros(5), scores], axis=1)) == 1


@pytest.mark.parametrize("shape", [(4, 2), (4,), (2, 2, 4), ()])
def test_scores_without_the_output_of_the_rule_are_refused(shape):
    with pytest.raises(INVALID, match=r"Rule 'p' watches output 3, and the scores have the shape \("):
        residuum.Rule("p", above=0.5, output=3).fires_at(np.ones(shape))
    assert residuum.Rule("p", above=0.5, output=3).fires_at(np.ones((4, 4))) == 0


class TestOutputNames:
    NAMED = dataclasses.replace(TWO, output_names=["first", "last"])

    def test_a_rule_names_its_output(self):
        assert residuum.Rule(self.NAMED, above=0.5, output="last").to_proto().output == 1
        with pytest.raises(INVALID, match=r"no output 'middle'\. It has first, last"):
            residuum.Rule(self.NAMED, above=0.5, output="middle")
        with pytest.raises(INVALID, match=r"no output 'last'\. It has no names"):
            residuum.Rule(TWO, above=0.5, output="last")
        with pytest.raises(INVALID, match="known only with the probe"):
            residuum.Rule("two", above=0.5, output="last").fires_at([0.5])

    async def test_a_rule_with_the_name_of_its_probe(self, client, peer):
        rule = residuum.Rule("two", above=2.5, output="last")
        reply = await client.generate("a bb ccc", max_tokens=4, probes=self.NAMED, rules=rule)
        assert [event.token for event in reply.events] == [1]
        sent = peer.requests[-1].spec.probes
        assert (sent.rules[0].output, list(sent.probes[0].output_names)) == (1, ["first", "last"])

    @pytest.mark.parametrize(
        ("names", "told"),
        [(["a"], "1 names for 2 outputs"), (["a", "a"], "same name"), (["a", "b c"], "'b c' is not a name")],
    )
    def test_bad_names_are_refused(self, names, told):
        with pytest.raises(INVALID, match=told):
            dataclasses.replace(TWO, output_names=names)

    @pytest.mark.parametrize("names", ["ab", [1, 2], 3])
    def test_names_are_texts(self, names):
        with pytest.raises(TypeError, match="output_names must be a list of texts"):
            dataclasses.replace(TWO, output_names=names)

    def test_they_are_saved(self, tmp_path):
        self.NAMED.save(tmp_path / "p.safetensors")
        assert residuum.Probe.load(tmp_path / "p.safetensors") == self.NAMED


class TestSmoothing:
    def test_a_probe_is_sent_with_it(self):
        for smooth, message in (
            (residuum.EMA(0.5), probe_pb2.Smoothing(ema=0.5)),
            (residuum.RollingMax(8), probe_pb2.Smoothing(max=8)),
            (residuum.RollingMax(), probe_pb2.Smoothing(max=0)),
            (residuum.RollingMean(), probe_pb2.Smoothing(mean=0)),
        ):
            probe = dataclasses.replace(POSITION, smooth=smooth)
            assert probe.to_proto().smoothing == message
            assert probe.to_proto().smoothing.WhichOneof("method") == message.WhichOneof("method")
            assert probe != POSITION
        assert "smooth max:8" in repr(dataclasses.replace(POSITION, smooth=residuum.RollingMax(8)))
        assert not POSITION.to_proto().HasField("smoothing")

    def test_scores_are_smoothed_here_in_the_same_way(self):
        np.testing.assert_array_equal(residuum.EMA(0.5).apply([0, 1, 1]), [0, 0.5, 0.75])
        np.testing.assert_array_equal(residuum.RollingMax(2).apply([3, 1, 0]), [3, 3, 1])
        both = residuum.RollingMean().apply([[0.0, 2.0], [1.0, 4.0]])
        np.testing.assert_array_equal(both, [[0, 2], [0.5, 3]])
        assert both.dtype == np.float32

    @pytest.mark.parametrize("smooth", [residuum.EMA(0.5), residuum.RollingMax(2), residuum.RollingMean()])
    @pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
    def test_no_scores_are_smoothed_to_none(self, smooth, shape):
        found = smooth.apply(np.zeros(shape))
        assert (found.shape, found.dtype) == (shape, np.float32)

    @pytest.mark.parametrize(
        ("make", "told"),
        [
            (lambda: residuum.EMA(1), "above 0 and below 1, not 1"),
            (lambda: residuum.EMA(math.nan), "finite"),
            (lambda: residuum.RollingMax(0), "tokens must be at least 1, not 0"),
            (lambda: residuum.RollingMean(1025), "at most 1024 tokens, not 1025"),
            (lambda: residuum.RollingMean(1 << 40), "at most 1024"),
        ],
    )
    def test_a_number_out_of_range_is_refused(self, make, told):
        with pytest.raises(INVALID, match=told):
            make()

    @pytest.mark.parametrize(
        "make",
        [
            lambda: residuum.EMA("much"),
            lambda: residuum.RollingMax(2.5),
            lambda: dataclasses.replace(POSITION, smooth="ema:0.5"),
        ],
    )
    def test_a_value_of_another_type_is_refused(self, make):
        with pytest.raises(TypeError):
            make()


class TestRequests:
    async def test_events_come_with_their_tokens_and_with_the_reply(self, client, peer):
        rules = [
            residuum.Rule(POSITION, above=3.5, for_tokens=2, then="abort", name="end"),
            residuum.Rule(POSITION, above=2.5),
            residuum.Rule(POSITION, above=3.5, then=residuum.Add(JOY, layer=1), name="joyful"),
        ]
        deltas = await client.stream("a bb ccc", max_tokens=9, rules=rules)
        assert [[event.rule for event in delta.events] for delta in deltas] == [[], ["position"], ["joyful"], ["end"]]
        assert deltas[1].events == (residuum.RuleEvent("position", 1, 3.0, "flag"),)
        assert deltas[2].events == (residuum.RuleEvent("joyful", 2, 4.0, "steer", first_position=102),)
        assert list(deltas[0].scores) == ["position"], "the probe of a rule is one of the request"
        assert JOY.digest in peer.vectors, "sent before the request starts"
        reply = await client.generate("a bb ccc", max_tokens=9, n=2, rules=rules[:1])
        assert [(event.sequence, event.action) for event in reply.events] == [(0, "abort"), (1, "abort")]
        assert (reply.finish_reason, reply.stop_reason, len(reply.token_ids)) == ("rule", "end", 4)

    async def test_a_registration_and_many_prompts_take_rules(self, client):
        rule = residuum.Rule("position", above=0.5)
        registration = await client.register(probes=POSITION, rules=rule)
        reply = await client.generate("a bb", max_tokens=2, registration=registration)
        assert [event.token for event in reply.events] == [0]
        with pytest.raises(INVALID, match=r"already has its .*rules"):
            await client.generate("a", registration=await client.register(), rules=rule)
        replies = await client.generate_many(["a", "a bb"], probes=POSITION, rules=rule, max_tokens=2, progress=False)
        assert [[event.token for event in reply.events] for reply in replies] == [[1], [0]]

    @pytest.mark.parametrize(
        ("rules", "told"),
        [
            ([residuum.Rule("other", above=1)], "the probe 'other', which the request lacks. Its probes are: position"),
            ([residuum.Rule(POSITION, above=1)] * 2, "Several rules have the name 'position'"),
            ([residuum.Rule("position", above=1, output=1)], "output 1 does not exist"),
            ([residuum.Rule(dataclasses.replace(POSITION, layer=1), above=1)], "another probe has that name"),
        ],
    )  # fmt: skip
    async def test_rules_that_do_not_fit_their_probes_are_refused(self, client, peer, rules, told):
        with pytest.raises(INVALID, match=told):
            await client.generate("a", probes=POSITION, rules=rules)
        assert peer.calls == []

    async def test_opting_out_of_the_operators_rules_is_sent(self, client, peer):
        await client.generate("a", max_tokens=1, without_operator_rules=True)
        sent = peer.requests[-1].spec.probes
        assert (sent.without_operator_rules, len(sent.probes)) == (True, 0)
        await client.generate_many(["a"], max_tokens=1, without_operator_rules=True, progress=False)
        assert peer.requests[-1].spec.probes.without_operator_rules
        registration = await client.register(without_operator_rules=True)
        assert peer.requests[-1].spec.probes.without_operator_rules
        with pytest.raises(INVALID, match=r"without_operator_rules\. Pass them only to register"):
            await client.generate("a", registration=registration, without_operator_rules=True)
        await client.generate("a", max_tokens=1)
        assert not peer.requests[-1].spec.HasField("probes")

    async def test_a_list_of_other_things_is_refused(self, client):
        with pytest.raises(TypeError, match=r"rules= takes a list of residuum\.Rule"):
            await client.generate("a", probes=POSITION, rules=POSITION)


def test_a_manifest_tells_what_fired():
    proto = capture_pb2.CaptureManifest(
        description=capture_pb2.CaptureDescription(num_sequences=1),
        rule_events=[rule_pb2.RuleEvent(rule="a", token=3, score=0.5, action=rule_pb2.RULE_ACTION_ABORT)],
        steering_changes=[steering_pb2.SteeringChange(rule="b", first_positions=[7])],
    )
    manifest = residuum.Manifest.from_proto(proto)
    assert manifest.rule_events == (residuum.RuleEvent("a", 3, 0.5, "abort"),)
    assert manifest.steering_changes[0].rule == "b"


def test_a_manifest_has_the_scores_of_each_sequence():
    probes = probe_pb2.ProbeSpec(probes=[POSITION.to_proto(), dataclasses.replace(TWO, name="both").to_proto()])
    sequence = capture_pb2.SequenceOutcome(generated_token_ids=[4, 5])
    for values in ([0.5, 0.75], [1, 2, 3, 4]):
        sequence.scores.probes.add(values=values)
    proto = capture_pb2.CaptureManifest(
        description=capture_pb2.CaptureDescription(num_sequences=2, probes=probes), sequences=[sequence, sequence]
    )
    proto.sequences[1].scores.Clear()
    manifest = residuum.Manifest.from_proto(proto)
    scores = manifest.scores()
    np.testing.assert_array_equal(scores["position"], [0.5, 0.75])
    np.testing.assert_array_equal(scores["both"], [[1, 2], [3, 4]])
    assert (manifest.scores(1), manifest.prompt_scores) == (None, None)
    assert from_document(manifest.to_dict()) == proto
    with pytest.raises(KeyError):
        manifest.scores(2)


def test_a_skipped_reply_repeats_the_scores_of_its_capture():
    builder = ReplyBuilder([POSITION])
    builder.add(inference_pb2.GenerateResponse(started=inference_pb2.GenerationStarted(request_id="r", skipped=True)))
    delta = inference_pb2.TokenDelta(token_ids=[1, 2], scores=[probe_pb2.ProbeScores(values=[0.5, 0.75])])
    builder.add(inference_pb2.GenerateResponse(delta=delta))
    end = inference_pb2.SequenceFinish(finish_reason="length", generated_tokens=2)
    builder.add(inference_pb2.GenerateResponse(finished=inference_pb2.GenerationFinished(sequences=[end])))
    np.testing.assert_array_equal(builder.reply().scores["position"], [0.5, 0.75])


@pytest.mark.parametrize("generated", [0, 2])
def test_the_scores_of_rows_with_and_without_generated_tokens(generated):
    """With max_tokens=0, the score of the prompt's last position is that of the prompt, not of the first token."""
    probes = probe_pb2.ProbeSpec(probes=[POSITION.to_proto()], score_prompt=True)
    sequence = capture_pb2.SequenceOutcome(generated_token_ids=range(generated))
    sequence.scores.probes.add(values=[2.0, 3.0][:generated])
    proto = capture_pb2.CaptureManifest(
        description=capture_pb2.CaptureDescription(num_sequences=1, probes=probes, prompt_token_ids=[5, 6, 7]),
        sequences=[sequence],
    )
    proto.prompt_scores.probes.add(values=[0.0, 1.0, 2.0])
    count = max(3 + generated - 1, 3)
    block = SimpleNamespace(positions=np.arange(count))
    manifest = residuum.Manifest.from_proto(proto)
    acts = residuum.Activations(manifest, {"resid_post": ()}, {(0, "resid_post"): block})
    np.testing.assert_array_equal(acts.scores["position"], np.arange(count))
