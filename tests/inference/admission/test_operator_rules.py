"""The operator's rules: the file, the requests that they apply to, and opting out."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

import residuum
from inference_svc.admission.operator_rules import OperatorRules
from inference_svc.admission.rules_file import RulesFile, RulesFileError
from inference_svc.admission.steering import resolve_steering
from inference_svc.metrics import InferenceMetrics
from inference_svc.resources.vector_cache import OPERATOR, vector_name
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2, probe_pb2, rule_pb2, steering_pb2
from tests.inference.service_support import ADD_JOY, CAPTURE, FACTS, HIDDEN, JOY, ask, failure_of
from tests.inference.session.test_rules import PROBING, fired, probe, rule, serving, spec, told

ONE = residuum.Probe(np.arange(1, HIDDEN + 1), 0.5, layer=1, activation="sigmoid")


@pytest.fixture
def write(tmp_path):
    """Writes a file of rules, beside the probe `one.safetensors`."""
    ONE.save(tmp_path / "one.safetensors")

    def write(*rules):
        lines = [f"[[rule]]\n{text}" for text in rules]
        (tmp_path / "rules.toml").write_text("\n".join(lines))
        return tmp_path / "rules.toml"

    return write


def load_rules(path, facts):
    return RulesFile(path).for_model(facts)


BASIC = 'name = "toxic"\nprobe = "one.safetensors"\nabove = 0.7\n'


STEERING = BASIC + 'then = "steer"\n[[rule.steer]]\nadd = { vector = "joy.npy", scale = 2 }\nlayers = [1]\n'


def test_a_rule_that_steers(write, tmp_path):
    residuum.Probe(np.ones((1, HIDDEN)), layer=1).save(tmp_path / "one.safetensors")
    np.save(tmp_path / "joy.npy", np.arange(1, HIDDEN + 1))
    export = {"calm": np.ones(HIDDEN, np.float32)}
    save_file(export, tmp_path / "v.safetensors")
    more = '[[rule.steer]]\nablate = { vector = "v.safetensors:calm", scale = 1 }\nlayers = [0]\nsite = "resid_post"\n'
    rules = load_rules(write(STEERING + more + 'gate = { vector = "joy.npy", threshold = 0.5 }'), PROBING)
    (item,) = rules._rules
    joy, calm = residuum.Vector(np.arange(1, HIDDEN + 1)), residuum.Vector(export["calm"])
    own = [residuum.Add(joy, layer=1, scale=2), residuum.Ablate(calm, layer=0, gate=residuum.Gate(joy, threshold=0.5))]
    asked = residuum.Rule("p", above=1, then=own).to_proto().steering
    for expected in asked.operations:
        expected.ClearField("site")
    expected = resolve_steering(asked, PROBING)
    assert item.rule.action == rule_pb2.RULE_ACTION_STEER
    assert item.rule.steering == expected, "as if a request asked for the same"
    assert {vector.digest for vector in item.vectors} == {joy.digest, calm.digest, *digests_of_probe(item)}


def digests_of_probe(item):
    return [output.digest for output in item.probe.outputs]


async def test_a_rule_that_steers_changes_every_request(store, write, tmp_path):
    np.save(tmp_path / "joy.npy", np.arange(1, HIDDEN + 1))
    joy = residuum.Vector(np.arange(1, HIDDEN + 1)).digest
    async with serving(store, [0.1], [0.9], [2.0], [0.1]) as service:
        service.parts.admission.operator_rules = load_rules(write(STEERING), PROBING)
        plain = service.parts.admission.resolve(inference_pb2.RequestSpec())
        assert plain.shared.may_change_steering
        assert plain.shared.cache_salt(3) != plain.shared.cache_salt(3), "no KV is shared"
        assert joy in plain.shared.operator_digests
        own = spec(request_id="r", capture=CAPTURE)
        own.ClearField("probes")
        events = await service.events(ask(own, max_tokens=9))
        token_ids, _, seen = told(events)
        assert ("operator:toxic", 1, rule_pb2.RULE_ACTION_STEER) in seen
        assert len(token_ids) == 4
        await store.until(lambda: store.seals)
    (change,) = store.seals[0].steering_changes
    assert change.rule == "operator:toxic"
    assert change.steering.operations[0].add.digest == joy


async def test_callers_cannot_undo_the_steering_of_a_rule(write, tmp_path):
    np.save(tmp_path / "joy.npy", np.ones(HIDDEN))
    async with serving() as service:
        admission = service.parts.admission
        admission.operator_rules = load_rules(write(STEERING + "[[rule]]\n" + BASIC.replace("toxic", "flag")), PROBING)
        asked = inference_pb2.RequestSpec(steering=steering_pb2.SteeringSpec(updatable=True))
        with pytest.raises(Failure, match="operator:toxic may steer this request") as caught:
            admission.resolve(asked)
        assert caught.value.metadata["field"] == "steering.updatable"
        admission.operator_rules = load_rules(write(BASIC), PROBING)
        assert admission.resolve(asked).steering.updatable


def test_a_file_of_rules(write, tmp_path):
    smooth = residuum.Probe(
        np.ones((2, HIDDEN)), layer=0, activation="softmax", smooth=residuum.EMA(0.5), output_names=["a", "b"]
    )
    smooth.save(tmp_path / "two.safetensors")
    other = 'name = "two"\nprobe = "two.safetensors"\nbelow = 0.1\nthen = "abort"\nfor_tokens = 3\noutput = "b"\n'
    path = write(BASIC, other + 'tenants = ["alice", "bob"]\nmay_opt_out = ["bob"]')
    rules = load_rules(path, PROBING)
    assert list(rules.actions) == ["operator:toxic", "operator:two"]
    assert rules.names_for("alice") == rules.names_for("bob") == list(rules.actions)
    assert (rules.names_for(""), rules.outputs_for(""), rules.outputs_for("bob")) == (["operator:toxic"], 1, 3)
    first, second = rules._rules
    assert first.probe.outputs[0].bias == 0.5
    assert first.probe.outputs[0].digest == ONE.vectors[0].digest == first.vectors[0].digest
    assert (first.rule.action, first.rule.for_tokens) == (rule_pb2.RULE_ACTION_FLAG, 1)
    assert (second.rule.action, second.rule.for_tokens, second.rule.output) == (rule_pb2.RULE_ACTION_ABORT, 3, 1)
    assert second.probe.smoothing.ema == 0.5
    assert second.probe.activation == probe_pb2.PROBE_ACTIVATION_SOFTMAX


def test_a_rule_may_watch_an_mlp(write, tmp_path):
    layer = residuum.ProbeLayer(np.arange(6).reshape(2, 3), [0.5, 1], "gelu")
    mlp = residuum.Probe(
        np.eye(3, HIDDEN), layer=1, mlp=[layer], activation="sigmoid", name="one", output_names=["no", "yes"]
    )
    mlp.save(tmp_path / "one.safetensors")
    rules = load_rules(write(BASIC + 'output = "yes"'), PROBING)
    (item,) = rules._rules
    expected = mlp.to_proto()
    assert item.probe.mlp == expected.mlp
    assert item.probe.outputs == expected.outputs
    assert (item.rule.output, rules.outputs_for("")) == (1, 3)


def test_a_rule_may_watch_a_probe_of_several_places(write, tmp_path):
    rng = np.random.default_rng(3)
    several = residuum.Probe(rng.normal(size=(2, 2 * HIDDEN)), [1, 2], layer=[1, 0], name="one")
    several.save(tmp_path / "one.safetensors")
    rules = load_rules(write(BASIC), PROBING)
    (item,) = rules._rules
    expected = several.to_proto()
    assert item.probe.outputs == expected.outputs
    assert item.probe.further_places == expected.further_places
    assert [vector.digest for vector in item.vectors] == [vector.digest for vector in several.vectors]
    assert rules.outputs_for("") == 4
    residuum.Probe(np.ones((1, 2 * HIDDEN + 2)), layer=[1, 0], name="one").save(tmp_path / "one.safetensors")
    with pytest.raises(RulesFileError, match=f"reads rows of {HIDDEN + 1} elements, not {HIDDEN}"):
        load_rules(write(BASIC), PROBING)


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        (["name = 3"], "rule.0.name: Input should be a valid string"),
        ([], "has no rules. Each begins with"),
        ([BASIC + "what = 1"], "no field rule.0.what. Known here: name, probe, above"),
        ([BASIC.replace("one.saf", "x" * 300)], "the rule 'toxic': "),
        ([BASIC.replace("one.safetensors", ".")], "the rule 'toxic': .* holds no probe: "),
        ([BASIC + "[rule.steer]\nlayers = [1]"], r"write \[\[rule.steer\]\], not \[rule.steer\]"),
        ([BASIC, BASIC], "several rules are named toxic"),
        ([BASIC.replace("toxic", f"r{number}") for number in range(9)], "there are 9 rules. At most 8"),
        ([BASIC.replace("toxic", "a b")], "1 to 64 of the characters"),
        ([BASIC.replace("one.saf", "none.saf")], "the rule 'toxic': there is no file .*none.safetensors"),
        ([BASIC.replace("one.safetensors", "rules.toml")], "rules.toml holds no probe"),
        ([BASIC.replace("0.7", "1.2")], "can never fire"),
        ([BASIC + "below = 0.1"], "it needs either above or below"),
        ([BASIC + "output = 1"], "output 1 does not exist"),
        ([BASIC + 'output = "x"'], "the probe has no output 'x'"),
        ([BASIC + "for_tokens = 0"], "rule.0.for_tokens"),
        ([BASIC + 'then = "steer"'], "the rule 'toxic': it needs .*rule.steer"),
        ([STEERING.replace('"steer"', '"flag"')], "must have none otherwise"),
        ([STEERING.replace("add", "push")], "no SteeringOperation.*push"),
        ([STEERING.replace("add", "ablate").replace("joy", "zero").replace(", scale = 2", "")], "has the norm 0"),
        ([STEERING.replace("joy", "wide")], "has 9 elements, but the rows that it steers have 4"),
        ([STEERING.replace("joy", "none")], "the rule 'toxic': there is no file .*none.npy"),
        ([STEERING.replace('vector = "joy.npy"', "layer_vectors = 3")], "layer_vectors is 3; it must be a list"),
        ([STEERING.replace("vector", "digest")], "name the file"),
        ([STEERING.replace("[1]", "[9]")], "There is no layer 9"),
        ([STEERING + 'positions = { phases = ["PHASE_PROMPT"] }'], "it selects no position after the prompt"),
        ([STEERING + "positions = { ranges = [{ first = -1, last = -1 }] }"], "selects no position after the prompt"),
        (["name = "], "is not TOML"),
        ([BASIC.replace("one", "deep")], "There is no layer 7"),
        ([BASIC.replace("one", "wide")], "reads rows of 9 elements, not 4"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(write, tmp_path, rules, told):
    residuum.Probe(np.ones(HIDDEN), layer=7).save(tmp_path / "deep.safetensors")
    residuum.Probe(np.ones(9), layer=1).save(tmp_path / "wide.safetensors")
    for name, values in (("joy", np.ones(HIDDEN)), ("zero", np.zeros(HIDDEN)), ("wide", np.ones(9))):
        np.save(tmp_path / f"{name}.npy", values)
    with pytest.raises(RulesFileError, match=told):
        load_rules(write(*rules), PROBING)


def test_rules_need_a_server_with_probes(write, tmp_path):
    with pytest.raises(RulesFileError, match=r"has no probes.*--score-mib"):
        load_rules(write(BASIC), FACTS)
    for text, words in (
        ("[rule]\n" + BASIC, r"write \[\[rule\]\], not \[rule\]"),
        ('"a.b" = 1', r"no field a\.b\. Known here: rule$"),
    ):
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(RulesFileError, match=words):
            RulesFile(tmp_path / "bad.toml")
    with pytest.raises(RulesFileError, match=r"none\.toml cannot be read: No such file"):
        load_rules(tmp_path / "none.toml", PROBING)


async def test_they_apply_to_every_request_and_callers_see_only_their_events(store, write):
    path = write(BASIC, BASIC.replace("toxic", "stop") + 'for_tokens = 2\nthen = "abort"')
    async with serving(store, [0.1], [0.9], [2.0], [0.1]) as service:
        service.parts.admission.operator_rules = load_rules(path, PROBING)
        for number, own in enumerate([spec(request_id="r", capture=CAPTURE), spec(rule("own"), capture=CAPTURE)]):
            own.request_id = f"r{number}"
            if not number:
                own.ClearField("probes")
            events = await service.events(ask(own, max_tokens=9))
            token_ids, _, seen = told(events)
            assert token_ids == [0, 1, 2]
            own_events = [("own", 1, rule_pb2.RULE_ACTION_FLAG)] * number
            assert sorted(seen) == sorted(
                [
                    *own_events,
                    ("operator:toxic", 1, rule_pb2.RULE_ACTION_FLAG),
                    ("operator:stop", 2, rule_pb2.RULE_ACTION_ABORT),
                ]
            )
            deltas = [event.delta for event in events if event.HasField("delta")]
            assert all(len(delta.scores) == number for delta in deltas)
            assert events[-1].finished.sequences[0].finish_reason == "rule"
            assert events[-1].finished.sequences[0].stop_reason == "operator:stop"
        await store.until(lambda: len(store.seals) == 2)
    for number, (opened, seal) in enumerate(zip(store.opened, store.seals, strict=True)):
        assert [item.name for item in opened.probes.probes] == ["p"] * number
        assert len(seal.sequences[0].scores.probes) == number
        assert "operator:stop" in [event.rule for event in seal.rule_events]


async def test_a_server_names_the_rules_of_the_caller(write):
    async with serving() as service:
        service.parts.admission.operator_rules = load_rules(write(BASIC), PROBING)
        info = await service.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
        assert list(info.operator_rules) == ["operator:toxic"]
        assert (info.limits.max_probe_outputs, info.limits.max_rules) == (63, 32)
        failure = await failure_of(service.events(ask(spec(probes=[probe(outputs=64)]), max_tokens=2)))
        assert "yours may have 63" in failure.message


@pytest.mark.parametrize(
    ("opt_out", "tenant", "may"),
    [("true", "a", True), ("false", "a", False), ('["a"]', "a", True), ('["a"]', "b", False), ('[""]', "", True)],
)
async def test_opting_out(write, opt_out, tenant, may):
    async with serving() as service:
        admission = service.parts.admission
        admission.operator_rules = load_rules(write(BASIC + f"may_opt_out = {opt_out}"), PROBING)
        asked = inference_pb2.RequestSpec(probes=probe_pb2.ProbeSpec(without_operator_rules=True))
        if may:
            assert admission.resolve(asked, tenant).probes is None
            return
        with pytest.raises(Failure, match="may not opt out of the operator's rules operator:toxic") as caught:
            admission.resolve(asked, tenant)
        assert caught.value.reason == Reason.ERROR_REASON_PERMISSION_DENIED


async def test_their_vectors_are_there_for_every_tenant(write):
    async with serving() as service:
        admission = service.parts.admission
        admission.operator_rules = load_rules(write(BASIC), PROBING)
        for tenant in ("", "a"):
            resolved = admission.resolve(inference_pb2.RequestSpec(), tenant)
            admission.check_request(resolved, tenant, 3, inference_pb2.SamplingParameters(max_tokens=0))
            assert resolved.shared.digests == [ONE.vectors[0].digest]
            assert resolved.shared.vector_names(tenant) == [vector_name(OPERATOR, ONE.vectors[0].digest)]
            assert not service.cache.missing(resolved.shared.vector_names(tenant))
        assert service.cache.num_vectors == 3, "one of the operator's, for all tenants, and two that are there before"
        own = inference_pb2.RequestSpec(
            probes=probe_pb2.ProbeSpec(
                probes=[
                    probe_pb2.Probe(
                        name="own", layer=1, outputs=[probe_pb2.ProbeOutput(digest=resolved.shared.digests[0])]
                    )
                ]
            )
        )
        resolved = admission.resolve(own, "a")
        with pytest.raises(Failure, match="not on the server"):  # the tenant learns nothing of the operator's vectors
            admission.check_request(resolved, "a", 3, inference_pb2.SamplingParameters(max_tokens=2))
        answer = await service.register(inference_pb2.RequestSpec(request_id="q"))
        assert not answer.missing_digests


async def test_their_probes_count_with_the_steering_of_the_callers_rules(write):
    """Each rule that steers needs tables for all probes, too."""
    async with serving() as service:
        admission = service.parts.admission
        lines = [
            steering_pb2.SteeringOperation(layers=ADD_JOY.layers, add=steering_pb2.Add(digest=JOY.digest, scale=at + 1))
            for at in range(8)
        ]
        few = steering_pb2.SteeringSpec(operations=lines)

        def asking(count):
            return spec(*(rule(f"r{at}", action=rule_pb2.RULE_ACTION_STEER, steering=few) for at in range(count)))

        most = 0
        while most < 32:
            try:
                admission.resolve(asking(most + 1))
            except Failure:
                break
            most += 1
        assert 0 < most < 32
        wide = residuum.Probe(np.ones((63, HIDDEN)), layer=1)
        wide.save(write().with_name("one.safetensors"))
        admission.operator_rules = load_rules(write(BASIC), PROBING)
        with pytest.raises(Failure, match="With the steering of all its") as caught:
            admission.resolve(asking(most))
        assert caught.value.metadata["field"] == "probes.rules"


def test_a_file_leaves_an_output_to_callers(write, tmp_path):
    """A server whose limit is 0 counts as one without probes."""
    residuum.Probe(np.ones((64, HIDDEN)), layer=1).save(tmp_path / "one.safetensors")
    with pytest.raises(RulesFileError, match=r"64 outputs, .*; at most 63"):
        load_rules(write(BASIC), PROBING)


def test_without_a_file_nothing_changes():
    rules = OperatorRules()
    assert (rules.actions, rules.outputs_for("a")) == ({}, 0)
    metrics = InferenceMetrics()
    for number in range(1000):
        metrics.rules.add(f"r{number}", "flag")
    metrics.rules.know("operator:late", "abort")
    assert fired(metrics, "operator:late", "abort") == 0, "Prometheus sees no increase of what was not there"
    metrics.rules.add("operator:late", "abort")
    assert fired(metrics, "operator:late", "abort") == 1, "callers' names do not crowd it out"
