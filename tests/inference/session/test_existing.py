"""Requests whose ID has a capture already, with a real store: they fail, replace it, or are answered with it."""

from __future__ import annotations

import asyncio

import pytest

import residuum
from inference_svc.admission.sampling import sampling_digest
from inference_svc.engine.streams import Delta
from inference_svc.session.existing_capture import Stops, kept_sequences
from residuum.rpc.channels import open_aio_channel
from residuum.v1 import capture_pb2, inference_pb2, rule_pb2, store_pb2, store_pb2_grpc
from store_svc.server import Store
from store_svc.settings import StoreSettings
from tests.inference.service_support import (
    CAPTURE,
    DEADLINE,
    LAYERS,
    ask,
    failure_of,
    running_service,
    spec,
    texts_of,
    until,
)
from tests.inference.taps_support import select

NO_ROWS = capture_pb2.CaptureSpec(layers=LAYERS, positions=select((1000, None)))
"""A capture that is complete as soon as it is sealed: in these tests no worker sends rows."""
REPLACE, SKIP = capture_pb2.IF_EXISTS_REPLACE, capture_pb2.IF_EXISTS_SKIP


@pytest.fixture
def lease_seconds():
    """Long, so that a slow disk does not end a capture."""
    return 60


@pytest.fixture
async def endpoint(tmp_path, lease_seconds):
    settings = StoreSettings(
        listen="127.0.0.1:0", path=tmp_path / "store", lease_seconds=lease_seconds, ending_timeout_seconds=0.2
    )
    store = await asyncio.to_thread(Store, settings)
    yield f"127.0.0.1:{store.port}"
    await asyncio.to_thread(store.stop)


@pytest.fixture
async def service(endpoint):
    async with running_service(endpoint) as running:
        yield running


@pytest.fixture
async def store(endpoint):
    async with open_aio_channel(endpoint) as channel:
        yield store_pb2_grpc.StoreServiceStub(channel)


async def ended(store, capture_id="r"):
    request = store_pb2.GetCaptureRequest(capture_id=capture_id)
    request.wait.FromSeconds(int(DEADLINE))
    return (await store.GetCapture(request, timeout=2 * DEADLINE)).manifest


def again(if_exists, **sampling):
    asked = spec("r", NO_ROWS)
    asked.if_exists = if_exists
    return ask(asked, **sampling)


async def test_an_id_is_free_again_when_its_capture_is_deleted(service, store):
    await service.events(ask(spec("r", NO_ROWS)))
    await ended(store)
    assert (await failure_of(service.events(ask(spec("r", NO_ROWS))))).reason_name == "CAPTURE_EXISTS"
    await store.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="r"))
    await service.events(ask(spec("r", NO_ROWS)))
    assert (await ended(store)).state == capture_pb2.CAPTURE_STATE_COMPLETE


async def test_a_registered_request_replaces_a_capture(service, store):
    await service.events(ask(spec("r", NO_ROWS)))
    first = await ended(store)
    asked = spec("r", NO_ROWS)
    asked.if_exists = REPLACE
    await service.register(asked)
    started, *_ = await service.events(ask("r"))
    assert not started.started.skipped
    assert (await ended(store)).description.attempt != first.description.attempt


async def test_an_aborted_request_can_be_done_again(service, store):
    three_tokens = service.engine.script

    async def stuck(call):
        yield Delta("x", [1])
        await asyncio.Event().wait()

    service.engine.script = stuck
    stream = service.stub.Generate(ask(spec("r", NO_ROWS)))
    for _ in range(2):
        await stream.read()
    assert (await failure_of(service.events(again(SKIP)))).reason_name == "REQUEST_EXISTS", (
        "the first request is still running"
    )
    stream.cancel()
    assert (await ended(store)).state == capture_pb2.CAPTURE_STATE_ABORTED
    service.engine.script = three_tokens
    assert (await service.events(again(SKIP)))[-1].finished.usage.generated_tokens == 3
    assert (await ended(store)).state == capture_pb2.CAPTURE_STATE_COMPLETE


async def test_a_complete_capture_answers_the_same_request_without_the_engine(service, endpoint):
    async def script(call):
        yield Delta("t7", [7])
        yield Delta("t8", [8], "length")

    service.engine.script = script
    sampling = {"num_sequences": 2, "stop": ["END"]}
    first = await service.events(again(SKIP, **sampling))
    assert len(service.engine.calls) == 2
    second = await service.events(again(SKIP, **sampling))  # immediately, when the seal may still be in transit
    assert len(service.engine.calls) == 2
    started, *deltas, finished = second
    assert started.started.skipped
    started.started.skipped = False
    assert started == first[0]
    assert [(item.delta.sequence, item.delta.text, item.delta.token_ids) for item in deltas] == [
        (0, "t7t8", [7, 8]),
        (1, "t7t8", [7, 8]),
    ]
    assert finished.finished.usage == first[-1].finished.usage
    assert [item.finish_reason for item in finished.finished.sequences] == ["length", "length"]
    assert [item.token_texts for item in finished.finished.sequences] == [texts_of(7, 8)] * 2
    assert finished.finished.capture == first[-1].finished.capture
    assert not service.parts.stores.of("r").num_open, "no capture is left to seal"
    async with running_service(endpoint) as another:  # of the same model, after a restart
        assert (await another.events(again(SKIP, **sampling)))[0].started.skipped
        assert not another.engine.calls


async def test_a_stop_string_is_left_out_of_a_skipped_reply(service):
    async def text(prompt_token_ids, token_ids):
        return " One, two. END and" if token_ids else ""

    async def script(call):
        yield Delta(" One, two. ", [1], "stop", "END")

    service.engine.replies.text, service.engine.script = text, script
    for _ in range(2):
        _, delta, finished = await service.events(again(SKIP, stop=["two words", "END", "and"]))
        assert delta.delta.text == " One, two. "
        assert finished.finished.sequences[0].stop_reason == "END"


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "reason"),
    [
        (["a", "\n", "b", "c", "\n"], ["\n"], "a\nbc", "\n"),  # min_tokens=3
        (["x", "abc."], ["abc", "b"], "xa", "b"),
        (["a", "END"], ["END", "ND"], "a", "END"),
        (["a", "\N{REPLACEMENT CHARACTER}", "é!"], ["é"], "a", "é"),  # the text of a part of a character is replaced
        (["a", "b", ""], ["b"], "ab", ""),  # another end: a token without text, and min_tokens=2
    ],
)
async def test_a_skipped_reply_ends_where_vllm_ended_it(pieces, stop, text, reason):
    async def text_of(prompt_token_ids, token_ids):
        whole = "".join(pieces[: len(token_ids)])
        return whole.replace("\N{REPLACEMENT CHARACTER}", "") if len(token_ids) == len(pieces) else whole

    ids = range(len(pieces))
    manifest = capture_pb2.CaptureManifest(
        sequences=[capture_pb2.SequenceOutcome(generated_token_ids=ids, finish_reason="stop")]
    )
    (kept,) = await kept_sequences(manifest, Stops(stop, [], None), text_of)
    assert (kept.text, kept.stop_reason, kept.token_ids) == (text, reason, [*ids])


async def test_a_stop_token_is_in_the_tokens_of_a_skipped_reply_but_not_in_its_text(service):
    async def text(prompt_token_ids, token_ids):
        return "".join(f" {token}" for token in token_ids)

    async def script(call):
        yield Delta(" 1", [1])
        yield Delta("", [9], "stop", stop_token_id=9)

    service.engine.replies.text, service.engine.script = text, script
    for _ in range(2):
        *_, finished = events = await service.events(again(SKIP, stop_token_ids=[9]))
        deltas = [item.delta for item in events[1:-1]]
        assert "".join(delta.text for delta in deltas) == " 1"
        assert [token_id for delta in deltas for token_id in delta.token_ids] == [1, 9]
        assert finished.finished.sequences[0].stop_token_id == 9
    assert events[0].started.skipped


@pytest.mark.parametrize("asked", [{}, {"stop_token_ids": [9]}], ids=["own", "named"])
@pytest.mark.parametrize(("last", "reported"), [(9, None), (8, 8)], ids=["first", "further"])
async def test_a_skipped_reply_ends_before_each_eos_token_of_the_model(asked, last, reported):
    """vLLM reports a further one, as `generation_config.json` names them, but not the first."""

    async def text_of(prompt_token_ids, token_ids):
        return "".join(f" {token}" for token in token_ids)

    sequence = capture_pb2.SequenceOutcome(generated_token_ids=[1, last], finish_reason="stop")
    stops = Stops(["unused"], asked.get("stop_token_ids", []), 9)
    (kept,) = await kept_sequences(capture_pb2.CaptureManifest(sequences=[sequence]), stops, text_of)
    assert (kept.text, kept.stop_reason, kept.stop_token_id) == (" 1", "", reported)


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (Stops([" 9"], [], None), " 1"),
        (Stops([" 9"], [], None, are_shown=True), " 1 9"),
        (Stops([" 9"], [], None, min_tokens=2), " 1 9"),
        (Stops([], [9], None), " 1"),
        (Stops([], [], 9), " 1"),
        (Stops([], [], 8), " 1 9"),
    ],
    ids=["string", "shown", "min_tokens", "token", "eos", "none"],
)
async def test_a_skipped_reply_that_a_rule_ended_has_no_stop_of_vllm_in_its_text(stops, text):
    """The rule fires at the token at which vLLM stops."""

    async def text_of(prompt_token_ids, token_ids):
        return "".join(f" {token}" for token in token_ids)

    event = rule_pb2.RuleEvent(rule="end", token=1, action=rule_pb2.RULE_ACTION_ABORT)
    sequence = capture_pb2.SequenceOutcome(generated_token_ids=[1, 9], finish_reason="rule")
    manifest = capture_pb2.CaptureManifest(sequences=[sequence], rule_events=[event])
    (kept,) = await kept_sequences(manifest, stops, text_of)
    assert (kept.text, kept.finish_reason, kept.stop_reason, kept.stop_token_id) == (text, "rule", "end", None)


async def test_a_prompt_without_a_reply_is_skipped(service):
    first = await service.events(again(SKIP, max_tokens=0))
    started, finished = await service.events(again(SKIP, max_tokens=0))
    assert started.started.skipped
    assert finished == first[-1]
    assert finished.finished.sequences[0].finish_reason == "length"


@pytest.mark.parametrize("asked", [{"logprobs": 0}, {"prompt_logprobs": 2}])
async def test_a_capture_cannot_answer_with_logprobs(service, store, asked):
    failure = await failure_of(service.events(again(SKIP, **asked)))
    assert (failure.reason_name, failure.metadata) == ("INVALID_FIELD", {"field": "if_exists"})
    assert not service.engine.calls
    assert (await service.events(again(REPLACE, **asked)))[-1].finished.usage.generated_tokens == 3
    await ended(store)
    assert (await service.events(again(SKIP)))[0].started.skipped, "logprobs are not part of the request's identity"


async def test_a_request_is_the_same_if_another_limit_leaves_the_same_prompt(service, store):
    await service.events(ask(spec("r", NO_ROWS), truncate_prompt=5))
    await ended(store)
    for limit in ({"truncate_prompt": 9}, {}):
        assert (await service.events(again(SKIP, **limit)))[0].started.skipped


@pytest.mark.parametrize(
    ("changed", "told"),
    [({"max_tokens": 9}, "sampling"), ({"ids": [5, 6]}, "prompt"), ({"num_sequences": 2}, "number of sequences")],
)
async def test_a_capture_of_another_request_is_not_its_answer(service, store, changed, told):
    await service.events(ask(spec("r", NO_ROWS)))
    first = await ended(store)
    failure = await failure_of(service.events(again(SKIP, **changed)))
    assert failure.reason_name == "CAPTURE_EXISTS"
    assert f"its {told} differs" in failure.message
    assert await ended(store) == first


async def test_defaults_and_their_values_are_the_same_sampling():
    explicit = inference_pb2.SamplingParameters(
        max_tokens=16, temperature=0, top_p=1, top_k=0, num_sequences=1, min_tokens=0, min_p=0, presence_penalty=0,
        frequency_penalty=0, repetition_penalty=1, logprobs=3, prompt_logprobs=0,
    )  # fmt: skip
    plain = sampling_digest(inference_pb2.SamplingParameters())
    assert plain == sampling_digest(explicit)
    explicit.seed = 0
    assert plain != sampling_digest(explicit)


@pytest.mark.parametrize(
    "changed",
    [
        {"max_tokens": 0}, {"stop_token_ids": [3]}, {"min_p": 0.1}, {"presence_penalty": 1}, {"frequency_penalty": 1},
        {"repetition_penalty": 1.5}, {"logit_bias": [{"token_id": 3, "bias": 1}]}, {"bad_words": ["a"]},
        {"json_schema": "{}"}, {"regex": "{}"},
    ],
)  # fmt: skip
def test_parameters_that_decide_tokens_are_part_of_the_sampling_digest(changed):
    same = sampling_digest(inference_pb2.SamplingParameters())
    assert sampling_digest(inference_pb2.SamplingParameters(**changed)) != same


@pytest.mark.parametrize("asked", [spec("r"), spec("", CAPTURE)])
async def test_if_exists_needs_an_id_and_a_capture(service, asked):
    asked.if_exists = SKIP
    failure = await failure_of(service.events(ask(asked)))
    assert (failure.reason_name, failure.metadata) == ("INVALID_FIELD", {"field": "if_exists"})


async def test_an_unknown_if_exists_is_refused(service):
    asked = spec("r", CAPTURE)
    asked.if_exists = 77
    assert (await failure_of(service.register(asked))).metadata == {"field": "if_exists"}


@pytest.mark.parametrize("lease_seconds", [3])
async def test_a_service_with_a_long_request_keeps_its_lease_and_one_that_is_gone_does_not(service, store, endpoint):
    go_on = asyncio.Event()

    async def slow(call):
        yield Delta("x", [1])
        await go_on.wait()
        yield Delta("y", [2], "length")

    async with running_service(endpoint) as dead:
        for item, name in ((service, "r"), (dead, "s")):
            item.engine.script = slow
            item.stream = item.stub.Generate(ask(spec(name, NO_ROWS)))
            await item.stream.read()
        keeper = dead.parts.stores.of("s")
        keeper._renewing.cancel()  # the state after a kill: an unsealed capture and no renewals
        gone = await ended(store, "s")
        assert gone.incomplete_reason == capture_pb2.INCOMPLETE_REASON_SERVICE_GONE
        go_on.set()
        while await service.stream.read():
            pass
        assert (await ended(store)).state == capture_pb2.CAPTURE_STATE_COMPLETE


async def test_a_killed_batch_can_be_run_again_with_the_same_ids(service, store, endpoint):
    """The first run is stopped while some of its requests generate. The second run generates only the missing ones."""
    three_tokens, running = service.engine.script, asyncio.Event()

    async def some_are_stuck(call):
        if sum(call.prompt) % 3 == 0:
            running.set()
            await asyncio.Event().wait()
        async for delta in three_tokens(call):
            yield delta

    prompts = [[5, 6, 7, at] for at in range(40)]
    batch = {
        "capture": residuum.Capture(layers="all", positions=residuum.Positions.of([(1000, None)])),
        "request_ids": [f"job-{at}" for at in range(40)],
        "if_exists": "skip",
        "progress": False,
    }
    service.engine.script = some_are_stuck
    async with residuum.AsyncClient(service.endpoint, store=endpoint) as client:
        job = asyncio.create_task(client.generate_many(prompts, max_concurrency=20, **batch))
        await running.wait()
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        await until(lambda: not service.registry.running)
        service.engine.script = three_tokens
        before = len(service.engine.calls)
        complete = {item.capture_id async for item in client.captures(states="complete")}
        replies = await client.generate_many(prompts, **batch)
        assert [reply.token_ids for reply in replies] == [(1, 2, 3)] * 40
        assert [reply.text for reply in replies] == ["t1t2t3"] * 40
        skipped = {reply.request_id for reply in replies if reply.skipped}
        assert skipped >= complete
        assert len(service.engine.calls) - before == 40 - len(skipped)
        for name in batch["request_ids"]:
            assert (await ended(store, name)).state == capture_pb2.CAPTURE_STATE_COMPLETE
        assert all(reply.skipped for reply in await client.generate_many(prompts, **batch))
