"""Rules without an engine: what is refused, and what the service does when one fires."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tokenizers
import transformers

from inference_svc.admission.specs import SpecResolver
from inference_svc.engine.logprobs import TokenLogprobs
from inference_svc.engine.streams import Delta
from inference_svc.metrics import InferenceMetrics
from inference_svc.requests.plans import make_plan
from inference_svc.requests.registry import Running
from inference_svc.requests.replies import ReplyReader
from inference_svc.requests.tokenizer_thread import TokenizerThread
from inference_svc.resources.score_board import ScoreBoard, ScoreMemory
from inference_svc.resources.vector_activator import VectorHold
from inference_svc.session.scores.rules import SequenceRules
from inference_svc.session.sequences import GeneratedSequence
from inference_svc.session.steering_changes import SteeringChanges, _Change
from inference_svc.taps.plan import Kind
from inference_svc.taps.scores import open_board
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2, probe_pb2, rule_pb2, selection_pb2, steering_pb2
from residuum.wire.limits import MAX_RULES, MAX_STEERING_CHANGES, MAX_STEERING_CHANGES_BYTES
from residuum.wire.probes.rules import NEVER
from tests.inference.service_support import ADD_JOY, CAPTURE, FACTS, JOY, ask, failure_of, running_service, vector
from tests.inference.spec_support import resolve_spec

PROBING = replace(FACTS, probe_sites=(capture_pb2.SITE_RESID_POST,))
SIGMOID = probe_pb2.PROBE_ACTIVATION_SIGMOID
FLAG, ABORT, STEER = rule_pb2.RULE_ACTION_FLAG, rule_pb2.RULE_ACTION_ABORT, rule_pb2.RULE_ACTION_STEER
WOE = vector(4, 3, 2, 1)
ADD_WOE = steering_pb2.SteeringOperation(layers=ADD_JOY.layers, add=steering_pb2.Add(digest=WOE.digest, scale=1.0))


def probe(name="p", outputs=1, **fields):
    return probe_pb2.Probe(name=name, layer=1, outputs=[probe_pb2.ProbeOutput(digest=JOY.digest)] * outputs, **fields)


def rule(name="r", probe="p", **fields):
    return rule_pb2.Rule(name=name, probe=probe, **({} if "below" in fields else {"above": 0.5}) | fields)


def steer(name, operation=ADD_JOY, **fields):
    return rule(name, action=STEER, steering=steering_pb2.SteeringSpec(operations=[operation]), **fields)


def spec(*rules, probes=None, request_id="r", capture=None, **fields):
    return inference_pb2.RequestSpec(
        request_id=request_id,
        capture=capture,
        probes=probe_pb2.ProbeSpec(probes=probes or [probe()], rules=rules),
        **fields,
    )


BAD_STEERING = steering_pb2.SteeringSpec(
    operations=[steering_pb2.SteeringOperation(layers=ADD_JOY.layers, add=steering_pb2.Add(digest=b"short"))]
)


@pytest.mark.parametrize(
    ("rules", "field", "words"),
    [
        ([rule(name="")], "probes.rules[0].name", "1 to 64"),
        ([rule(), rule()], "probes.rules[1].name", "Two rules are named r"),
        (
            [rule(probe="q")],
            "probes.rules[0].probe",
            "the probe 'q', which the request does not have. Its probes are: p",
        ),
        ([rule(output=1)], "probes.rules[0]", "has 1 output; output 1 does not exist"),
        ([rule(above=math.nan)], "probes.rules[0]", "above is nan"),
        ([rule(above=1.2)], "probes.rules[0]", "can never fire"),
        ([rule(below=0.0)], "probes.rules[0]", "can never fire"),
        ([rule_pb2.Rule(name="r", probe="p")], "probes.rules[0]", "set above or below"),
        ([rule(action=9)], "probes.rules[0].action", "9"),
        ([rule(action=STEER)], "probes.rules[0].steering", "needs operations"),
        ([rule(action=STEER, steering=BAD_STEERING)], "probes.rules[0].steering.operations[0].add.digest", "32 bytes"),
        ([rule(steering=BAD_STEERING)], "probes.rules[0].steering", "must have none otherwise"),
        ([rule(str(number)) for number in range(10_000)], "probes.rules", f"10000 rules.*at most {MAX_RULES}"),
    ],
)
def test_an_invalid_rule_is_refused(rules, field, words):
    with pytest.raises(Failure, match=words) as caught:
        resolve_spec(spec(*rules, probes=[probe(activation=SIGMOID)]), PROBING)
    assert caught.value.reason == Reason.ERROR_REASON_INVALID_FIELD
    assert caught.value.metadata["field"] == field


def test_rules_need_probes():
    with pytest.raises(Failure, match="It has no probes"):
        resolve_spec(inference_pb2.RequestSpec(probes=probe_pb2.ProbeSpec(rules=[rule()])), PROBING)


def test_defaults_are_filled_in():
    resolved = resolve_spec(spec(rule("flag"), steer("steer")), PROBING)
    flag, steering = resolved.probes.rules
    assert (flag.action, flag.for_tokens, flag.HasField("steering")) == (FLAG, 1, False)
    assert list(steering.steering.operations[0].layers.list.layers) == [0, 1, 2]


def test_only_rules_that_steer_cost_the_prefix_cache():
    resolved = resolve_spec(spec(rule("a"), rule("b", action=ABORT)), PROBING)
    assert resolved.shared.cache_salt(3) is None
    assert not resolved.shared.may_change_steering
    steering = resolve_spec(spec(steer("a", ADD_WOE)), PROBING)
    assert steering.shared.digests == [JOY.digest, WOE.digest], "leased from the registration on"
    assert len({steering.shared.cache_salt(3) for _ in range(3)}) == 3
    plan = make_plan(Running("r", steering, was_registered=False), 0, 3, {JOY.digest: 0, WOE.digest: 1})
    assert plan.name, "the workers know it by a name"
    assert [item.kind for item in plan.operations] == [Kind.SCORE], "its operations come when the rule fires"


def test_steering_of_all_rules_must_fit_the_tables():
    lines = [
        steering_pb2.SteeringOperation(layers=ADD_JOY.layers, add=steering_pb2.Add(digest=JOY.digest, scale=number + 1))
        for number in range(256)
    ]
    many = steering_pb2.SteeringSpec(operations=lines)
    resolve_spec(spec(rule(action=STEER, steering=many)), PROBING)
    with pytest.raises(Failure, match="2 rules, the request needs 512 operations; there may be at most 256") as caught:
        resolve_spec(spec(*(rule(name, action=STEER, steering=many) for name in "ab")), PROBING)
    assert caught.value.metadata["field"] == "probes.rules"
    assert "programs" not in str(caught.value), "it names only the limit that is exceeded"
    own = steering_pb2.SteeringSpec(operations=lines[:1])
    with pytest.raises(Failure, match="its rule, the request needs 257 operations"):
        resolve_spec(spec(rule(action=STEER, steering=many), steering=own), PROBING)
    few = steering_pb2.SteeringSpec(operations=lines[:7])
    with pytest.raises(Failure, match=r"needs \d+ operations in tables"):
        resolve_spec(spec(*(rule(f"r{number}", action=STEER, steering=few) for number in range(MAX_RULES))), PROBING)


def scripted(board, *tokens, delay=None):
    """A script whose tokens have these scores: for each delta, the scores of its tokens."""
    memory = open_board(board._memory.path)

    async def script(call):
        region, position = call.plan.scores, 2  # the prompt has three tokens
        for number, scores in enumerate(tokens):
            if delay is not None:
                await delay(number)
            for score in scores:
                line = region.offset + (position - region.first_position) * region.columns
                memory[line : line + region.columns] = score
                position += 1
            ids = list(range(position - 2 - len(scores), position - 2))
            last = number == len(tokens) - 1
            yield Delta("".join(f"t{index}" for index in ids), ids, "length" if last else None)

    return script


@asynccontextmanager
async def serving(store=None, *scores, delay=None):
    async with running_service(store and store.endpoint) as service:
        service.engine.facts = PROBING
        service.parts.admission._facts = PROBING
        service.parts.admission._specs = SpecResolver(PROBING)
        service.engine.scores = ScoreBoard(ScoreMemory(1 << 16))
        service.engine.script = scripted(service.engine.scores, *scores, delay=delay)
        await service.put(JOY, WOE)
        yield service


def told(events):
    """The tokens, the text and the rule events of a generation."""
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert all(len(part.values) == len(delta.token_ids) for delta in deltas for part in delta.scores)
    return (
        [token for delta in deltas for token in delta.token_ids],
        "".join(delta.text for delta in deltas),
        [(event.rule, event.token, event.action) for delta in deltas for event in delta.rule_events],
    )


def fired(metrics, name, action):
    return metrics.registry.get_sample_value("residuum_inference_rules_fired_total", {"rule": name, "action": action})


async def test_a_flag_is_in_the_stream_the_seal_and_the_metrics(store):
    async with serving(store, [0.1], [0.9], [0.8], [0.95], [0.9]) as service:
        rules = [rule("once", above=0.7), rule("twice", above=0.7, for_tokens=2), rule("low", below=0.05)]
        events = await service.events(ask(spec(*rules, capture=CAPTURE), max_tokens=9))
        assert told(events) == (
            [0, 1, 2, 3, 4], "t0t1t2t3t4", [("once", 1, FLAG), ("twice", 2, FLAG)]
        )  # fmt: skip
        with_events = [event.delta for event in events if event.delta.rule_events]
        for delta in with_events:
            assert {event.token for event in delta.rule_events} <= {*delta.token_ids}, "in the message of the token"
        assert with_events[0].rule_events[0].score == pytest.approx(0.9)
        assert events[-1].finished.sequences[0].finish_reason == "length"
        assert fired(service.metrics, "once", "flag") == fired(service.metrics, "twice", "flag") == 1
        assert fired(service.metrics, "low", "flag") is None
        seal = await store.seal()
    assert [(event.rule, event.token) for event in seal.rule_events] == [("once", 1), ("twice", 2)]
    assert [list(scores.values) for scores in seal.sequences[0].scores.probes] == [
        pytest.approx([0.1, 0.9, 0.8, 0.95, 0.9])
    ]
    assert not seal.HasField("prompt_scores")
    assert [item.name for item in store.opened[0].probes.rules] == ["once", "twice", "low"]


async def test_an_abort_ends_the_reply_at_its_token(store):
    async with serving(store, [0.1], [0.9], [0.2]) as service:
        events = await service.events(ask(spec(rule("stop", action=ABORT), capture=CAPTURE), max_tokens=9))
        assert told(events) == ([0, 1], "t0t1", [("stop", 1, ABORT)])
        (end,) = events[-1].finished.sequences
        assert (end.finish_reason, end.stop_reason, end.generated_tokens) == ("rule", "stop", 2)
        assert service.engine.closed == ["r#0"]
        assert fired(service.metrics, "stop", "abort") == 1
        seal = await store.seal()
    assert seal.outcome == capture_pb2.CAPTURE_STATE_COMPLETE, "all rows of the tokens that the reply has"
    assert (list(seal.sequences[0].generated_token_ids), seal.sequences[0].finish_reason) == ([0, 1], "rule")
    assert [event.rule for event in seal.rule_events] == ["stop"]
    assert len(seal.sequences[0].scores.probes[0].values) == 2, "those of the tokens that the reply has"


async def test_nothing_after_the_token_is_passed_on_even_if_several_came_at_once():
    """A slow service gets several tokens in one output of the engine, with one text for all."""
    async with serving(None, [0.1], [0.2, 0.9, 0.99, 0.3], [0.2]) as service:
        rules = [rule("late", above=0.95), rule("stop", action=ABORT)]
        events = await service.events(ask(spec(*rules), max_tokens=9))
        assert told(events) == ([0, 1, 2], "t0t1t2", [("stop", 2, ABORT)])
        assert service.engine.closed == ["r#0"]


async def test_a_rule_at_the_last_token_of_a_reply_gives_the_finish_reason():
    async with serving(None, [0.1], [0.9]) as service:
        events = await service.events(ask(spec(rule("stop", action=ABORT)), max_tokens=2))
        assert told(events)[:2] == ([0, 1], "t0t1")
        assert events[-1].finished.sequences[0].finish_reason == "rule"


async def test_other_sequences_go_on():
    async with serving() as service:
        board = service.engine.scores
        scripts = {"r#0": scripted(board, [0.9], [0.9]), "r#1": scripted(board, [0.1], [0.2], [0.1])}

        async def script(call):
            async for delta in scripts[call.engine_id](call):
                yield delta

        service.engine.script = script
        events = await service.events(ask(spec(rule("stop", action=ABORT)), max_tokens=3, num_sequences=2))
        ends = events[-1].finished.sequences
        assert [(end.finish_reason, end.generated_tokens) for end in ends] == [("rule", 1), ("length", 3)]


async def test_a_rule_steers_one_sequence_from_the_position_that_it_says(store):
    async with serving(store) as service:
        board = service.engine.scores
        scripts = {"r#0": scripted(board, [0.9], [0.9], [0.1]), "r#1": scripted(board, [0.1], [0.2], [0.1])}

        async def script(call):
            async for delta in scripts[call.engine_id](call):
                yield delta

        service.engine.script, service.engine.positions["r#0"] = script, 7
        request = spec(
            steer("on", ADD_WOE),
            capture=CAPTURE,
            steering=steering_pb2.SteeringSpec(operations=[ADD_JOY]),
        )
        events = await service.events(ask(request, max_tokens=3, num_sequences=2))
        (change,) = service.engine.changes
        assert [service.engine.bank[item.row] for item in change["r#0"]] == [JOY.values, WOE.values]
        (event,) = [event for item in events for event in item.delta.rule_events]
        assert (event.sequence, event.token, event.first_position) == (0, 0, 7)
        seal = await store.seal()
    (change,) = seal.steering_changes
    assert (list(change.first_positions), change.rule) == ([7, NEVER], "on")
    assert [operation.add.digest for operation in change.steering.operations] == [JOY.digest, WOE.digest]


async def test_rules_that_steer_add_up_and_the_end_of_a_reply_changes_nothing(store):
    async with serving(store, [0.1], [0.6], [0.9], [0.3]) as service:
        rules = [steer("a", ADD_JOY), steer("b", ADD_WOE, above=0.8), steer("end", ADD_JOY, below=0.35, for_tokens=1)]
        rules[2] = steer("end", ADD_JOY, above=0.2, for_tokens=3)  # fires with the last token
        await service.events(ask(spec(*rules, capture=CAPTURE), max_tokens=9))
        assert [len(change["r#0"]) for change in service.engine.changes] == [1, 2]
        seal = await store.seal()
    assert [change.rule for change in seal.steering_changes] == ["a", "b"]
    assert [(event.rule, event.HasField("first_position")) for event in seal.rule_events] == [
        ("a", True),
        ("b", True),
        ("end", False),
    ]


async def test_a_rule_whose_steering_the_engine_does_not_apply_fails_the_request(store):
    async with serving(store, [0.9], [0.9]) as service:
        service.engine.change_error = Failure(Reason.ERROR_REASON_ENGINE_DEAD, "The engine has died.")
        failure = await failure_of(service.events(ask(spec(steer("on"), capture=CAPTURE), max_tokens=2)))
        assert failure.reason == Reason.ERROR_REASON_ENGINE_DEAD
        assert (await store.seal()).outcome == capture_pb2.CAPTURE_STATE_INCOMPLETE


async def test_the_vectors_of_rules_are_needed_from_the_start(store):
    async with serving(store, [0.9]) as service:
        other = vector(9, 9, 9, 9)
        operation = steering_pb2.SteeringOperation(layers=ADD_JOY.layers, add=steering_pb2.Add(digest=other.digest))
        answer = await service.register(spec(steer("on", operation)))
        assert list(answer.missing_digests) == [other.digest]
        failure = await failure_of(service.events(ask(spec(steer("on", operation), request_id="q"), max_tokens=2)))
        assert failure.reason == Reason.ERROR_REASON_MISSING_VECTORS


async def test_a_rule_that_needs_more_tokens_than_there_can_be_is_refused():
    async with serving(None, [0.9]) as service:
        failure = await failure_of(service.events(ask(spec(rule("r", for_tokens=5)), max_tokens=4)))
        assert (failure.metadata["field"], failure.reason_name) == ("probes.rules[0].for_tokens", "INVALID_FIELD")
        assert "r can never fire: its for_tokens is 5, and the request's max_tokens is 4." in str(failure)


@pytest.mark.parametrize(
    ("positions", "is_refused"),
    [
        (selection_pb2.PositionSelection(phases=[selection_pb2.PHASE_PROMPT]), True),
        (selection_pb2.PositionSelection(ranges=[selection_pb2.PositionRange(first=0, last=2)]), True),
        (selection_pb2.PositionSelection(ranges=[selection_pb2.PositionRange(first=-3, last=-1)]), True),
        (selection_pb2.PositionSelection(ranges=[selection_pb2.PositionRange(first=50, last=60)]), True),
        (selection_pb2.PositionSelection(ranges=[selection_pb2.PositionRange(first=0, last=3)]), False),
        (selection_pb2.PositionSelection(phases=[selection_pb2.PHASE_GENERATED]), False),
    ],
)
async def test_a_rule_whose_steering_never_applies_is_refused(positions, is_refused):
    operation = steering_pb2.SteeringOperation()
    operation.CopyFrom(ADD_JOY)
    operation.positions.CopyFrom(positions)
    async with serving(None, [0.9, 0.9]) as service:
        request = ask(spec(steer("on", operation)), ids=(5, 6, 7), max_tokens=2)
        if not is_refused:
            await service.events(request)
            return
        failure = await failure_of(service.events(request))
        assert (failure.metadata["field"], failure.reason_name) == ("probes.rules[0].steering", "INVALID_FIELD")
        assert "The steering of the rule on would never apply" in str(failure)


async def test_changes_of_all_rules_must_fit_the_manifest():
    async with serving(None, [0.9]) as service:
        rules = [steer(f"r{number}") for number in range(5)]
        failure = await failure_of(service.events(ask(spec(*rules), max_tokens=4, num_sequences=64)))
        assert "320 times (64 sequences)" in failure.message
        assert str(MAX_STEERING_CHANGES) in failure.message


async def test_a_token_waits_for_the_verdict_of_its_rule(store):
    """The event of a rule that steers comes with its token, after the engine has answered."""
    async with serving(store, [0.9], [0.1]) as service:
        service.engine.answers.clear()
        stream = service.stub.Generate(ask(spec(steer("on")), max_tokens=2))
        assert (await stream.read()).HasField("started")
        await service.engine.until(lambda: service.engine.changes)
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0.05)
        assert not reading.done()
        service.engine.answers.set()
        assert [event.rule for event in (await reading).delta.rule_events] == ["on"]
        stream.cancel()


async def test_log_probabilities_and_scores_end_with_the_reply():
    spec_ = resolve_spec(spec(rule("stop", action=ABORT)), PROBING).probes

    async def text_of(token_ids):
        return "".join(f"t{token}" for token in token_ids)

    rules = SequenceRules(0, spec_, None, text_of, InferenceMetrics().rules)
    logprobs = TokenLogprobs(np.arange(3.0), np.arange(6).reshape(3, 2), np.arange(6.0).reshape(3, 2))
    scores = (np.array([[0.1], [0.9], [0.9]], np.float32),)
    delta = await rules.judge(Delta("t4t5t6", [4, 5, 6], logprobs=logprobs, scores=scores))
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason) == ("t4t5", [4, 5], "rule", "stop")
    assert [len(part) for part in delta.logprobs] == [2, 2, 2]
    assert delta.scores[0].tolist() == scores[0][:2].tolist()


@pytest.fixture(scope="module")
def streaming_tokenizer():
    """A real tokenizer, whose `decode` cleans up spaces and which has a special token."""
    words = ["hello", " ,", " world", " !", " END", "<end>"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, "hello"))
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(["<end>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=True)
    assert fast.decode([0, 1, 2, 3], clean_up_tokenization_spaces=True) == "hello, world!"
    return fast


def streamed(tokenizer, token_ids, *, skip_special_tokens=True):
    """The text of tokens as vLLM streams it, token by token."""
    stream = tokenizers.decoders.DecodeStream(skip_special_tokens=skip_special_tokens)
    return [stream.step(tokenizer.backend_tokenizer, token_id) or "" for token_id in token_ids]


@pytest.mark.parametrize("skips", [True, False], ids=["without special tokens", "with special tokens"])
@pytest.mark.parametrize("held", [0, 3], ids=["all sent", "held back for a stop string"])
@pytest.mark.parametrize("together", [1, 3], ids=["one token at once", "three tokens at once"])
async def test_the_text_of_an_aborted_reply_is_that_of_its_tokens(streaming_tokenizer, skips, held, together):
    token_ids = [0, 1, 5, 2, 3, 4, 0]
    last = 4
    texts = streamed(streaming_tokenizer, token_ids, skip_special_tokens=skips)
    replies = ReplyReader(TokenizerThread(streaming_tokenizer))
    rules = SequenceRules(
        0,
        resolve_spec(spec(rule("stop", action=ABORT)), PROBING).probes,
        None,
        partial(replies.text, [], skip_special_tokens=skips),
        InferenceMetrics().rules,
        has_stop_strings=bool(held),
    )
    sent, told = 0, ""
    for first in range(0, len(token_ids), together):
        ids = token_ids[first : first + together]
        ready = max(len("".join(texts[: first + len(ids)])) - held, sent)
        text, sent = "".join(texts)[sent:ready], ready
        scores = np.array([[0.9 if first + at == last else 0.1] for at in range(len(ids))], np.float32)
        delta = await rules.judge(Delta(text, ids, scores=(scores,)))
        told += delta.text
        if delta.finish_reason:
            break
    assert told == "".join(texts[: last + 1])
    assert told == ("hello , world !" if skips else "hello ,<end> world !")


async def test_text_that_the_tokenizer_decodes_otherwise_than_it_was_sent_is_not_cut_anywhere():
    async def text_of(token_ids):
        return "".join("abcdef"[token] for token in token_ids).upper()

    rules = SequenceRules(
        0, resolve_spec(spec(rule("stop", action=ABORT)), PROBING).probes, None, text_of, InferenceMetrics().rules
    )
    low, high = np.float32([[0.1]]), np.float32([[0.9], [0.9]])
    await rules.judge(Delta("a longer text", [0], scores=(low,)))
    assert (await rules.judge(Delta("bc", [1, 2], scores=(high,)))).text == "B"


async def test_changes_by_rules_count_with_the_names_of_the_rules():
    """The store counts the whole message of each change."""
    name = "x" * 64
    positions = selection_pb2.PositionSelection(ranges=[selection_pb2.PositionRange(first=-9, last=-1)] * 64)
    long = steering_pb2.SteeringOperation(layers=ADD_JOY.layers, add=ADD_JOY.add, positions=positions)
    steering = steering_pb2.SteeringSpec(operations=[long] * 4)
    async with serving() as service:
        running = Running("r", resolve_spec(spec(steer(name)), PROBING), was_registered=False)
        changes = SteeringChanges(service.engine, running, 3, VectorHold(None), [GeneratedSequence()])
        size = steering_pb2.SteeringChange(steering=steering, first_positions=[5]).ByteSize()
        count = MAX_STEERING_CHANGES_BYTES // size
        assert 64 * count > size, "it does not fit with the names"
        changes._changes = [_Change(steering, [5], name)] * (count - 1)
        with pytest.raises(Failure, match="its manifest has room"):
            changes._check(steering, [0], name)
        changes._changes = [_Change(steering, [5])] * (count - 1)
        changes._check(steering, [0])


def test_callers_cannot_make_a_metric_grow_without_a_limit():
    metrics = InferenceMetrics()
    for number in range(2000):
        metrics.rules.add(f"rule{number}", "flag")
    metrics.rules.add("rule7", "flag")
    assert fired(metrics, "rule7", "flag") == 2
    assert fired(metrics, "(other)", "flag") == 1000
