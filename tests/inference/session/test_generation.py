"""Generate: its events, the calls of engine and store, and every kind of end."""

from __future__ import annotations

import asyncio
import gc
import math
import time
import weakref
from contextlib import aclosing

import grpc
import numpy as np
import pytest

from inference_svc.engine.logprobs import TokenLogprobs
from inference_svc.engine.streams import Delta
from inference_svc.requests.replies import NO_CHAT
from inference_svc.taps.plan import Measure
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2, steering_pb2
from residuum.wire.limits import MAX_MESSAGE_SPANS, MAX_SEAL_BYTES
from tests.inference.service_support import (
    ADD_JOY,
    CAPTURE,
    FACTS,
    JOY,
    LAYERS,
    ask,
    failure_of,
    running_service,
    spec,
    stuck_after,
    texts_of,
    three_tokens,
    until,
    vector,
)

ABORTED, COMPLETE, INCOMPLETE = (
    capture_pb2.CAPTURE_STATE_ABORTED,
    capture_pb2.CAPTURE_STATE_COMPLETE,
    capture_pb2.CAPTURE_STATE_INCOMPLETE,
)


async def test_events_come_in_order(service, store):
    request_id = (await service.register(spec("r", CAPTURE))).request_id
    events = await service.events(ask(request_id))
    handle = inference_pb2.CaptureHandle(capture_id="r", store_endpoint="store.example:1", store=store.endpoint)
    started, *deltas, finished = events
    assert started.started == inference_pb2.GenerationStarted(
        request_id="r", prompt_token_ids=[5, 6, 7], capture=handle
    )
    assert {item.delta.sequence for item in deltas} == {0}
    assert "".join(item.delta.text for item in deltas) == "t1t2t3"
    assert [token for item in deltas for token in item.delta.token_ids] == [1, 2, 3]
    assert finished.finished == inference_pb2.GenerationFinished(
        sequences=[
            inference_pb2.SequenceFinish(finish_reason="length", generated_tokens=3, token_texts=texts_of(1, 2, 3))
        ],
        usage=inference_pb2.Usage(prompt_tokens=3, generated_tokens=3),
        capture=handle,
    )


async def test_a_request_without_tokens_captures_its_prompt(service, store):
    """vLLM generates one token at least. Neither the caller nor the capture sees it."""

    async def script(call):
        assert call.sampling.max_tokens == 1
        yield Delta("t", [9], "stop", "", 9, prompt_logprobs=logprobs(2))

    service.engine.script = script
    started, prompt, finished = await service.events(ask(spec("r", CAPTURE), max_tokens=0, prompt_logprobs=1))
    assert started.HasField("started")
    assert prompt.delta == inference_pb2.TokenDelta(prompt_logprobs=logprobs(2).part(slice(None)))
    none = texts_of()
    assert finished.finished.sequences == [inference_pb2.SequenceFinish(finish_reason="length", token_texts=none)]
    assert finished.finished.usage == inference_pb2.Usage(prompt_tokens=3)
    seal = await store.seal()
    assert seal.outcome == COMPLETE
    assert seal.sequences == [capture_pb2.SequenceOutcome(finish_reason="length", token_texts=none)]
    assert seal.prompt_token_texts == texts_of(5, 6, 7)


async def test_a_request_without_tokens_sends_no_delta(service):
    async def script(call):
        yield Delta("t", [9], "length")

    service.engine.script = script
    started, finished = await service.events(ask(max_tokens=0))
    assert (started.HasField("started"), finished.HasField("finished")) == (True, True)


def logprobs(tokens, k=1):
    shape = tokens, k
    return TokenLogprobs(np.arange(tokens, dtype=np.float32), np.ones(shape, np.uint32), np.zeros(shape, np.float32))


async def test_long_log_probabilities_take_several_messages(service):
    """Merged deltas of a slow client, and those of long prompts, would not fit into one message."""
    count, k = 9000, 20

    async def script(call):
        yield Delta("text", [3] * count, "length", logprobs=logprobs(count, k), prompt_logprobs=logprobs(count, k))

    service.engine.script = script
    _, *events, _ = await service.events(ask(max_tokens=20))
    deltas = [event.delta for event in events]
    assert len(deltas) > 2
    assert max(delta.ByteSize() for delta in deltas) < 1 << 20
    assert "".join(delta.text for delta in deltas) == "text"
    assert [token for delta in deltas for token in delta.token_ids] == [3] * count
    assert all(len(delta.token_ids) == len(delta.logprobs.tokens) for delta in deltas)
    for field in ("logprobs", "prompt_logprobs"):
        found = [value for delta in deltas for value in getattr(delta, field).tokens]
        assert found == list(range(count))


async def test_texts_that_are_too_long_for_the_last_message_are_left_out(service):
    """Their sequences capture nothing, so their number of tokens has no limit but those of the model."""
    count, sequences = 32_000, 40

    async def script(call):
        yield Delta("text", [99] * count, "length")

    service.engine.script = script
    _, *_, last = await service.events(ask(max_tokens=20, num_sequences=sequences))
    assert last.finished.usage.generated_tokens == count * sequences
    for sequence in last.finished.sequences:
        assert (sequence.finish_reason, sequence.generated_tokens) == ("length", count)
        assert not sequence.token_texts.lengths
        assert "too long for one message" in sequence.token_texts.unknown_detail


async def test_a_stop_token_is_named(service):
    async def script(call):
        yield Delta("", [0], "stop", "", 0)

    service.engine.script = script
    *_, finished = await service.events(ask(stop_token_ids=[0]))
    (end,) = finished.finished.sequences
    assert (end.HasField("stop_token_id"), end.stop_token_id) == (True, 0)


async def test_a_request_that_captures_nothing_has_no_handle(service, store):
    started, *_, finished = await service.events(ask())
    assert started.started.request_id
    assert not started.started.HasField("capture")
    assert not finished.finished.HasField("capture")
    assert not store.opened


async def test_the_capture_is_opened_with_the_whole_description(service, store):
    await service.put(JOY)
    await service.events(ask(spec("r", CAPTURE, [ADD_JOY]), num_sequences=2))
    (description,) = store.opened
    resolved = capture_pb2.CaptureDescription(
        capture_id="r",
        model=FACTS.name,
        hidden_size=FACTS.hidden_size,
        num_layers=FACTS.num_layers,
        dtype=FACTS.dtype,
        prompt_token_ids=[5, 6, 7],
        num_sequences=2,
        max_generated_tokens=16,
        layout=capture_pb2.ParallelLayout(tensor_parallel_size=2, pipeline_parallel_size=1),
        vllm_version=FACTS.vllm_version,
    )
    assert list(description.spec.layers.list.layers) == [0, 1, 2]
    assert list(description.steering.operations[0].layers.list.layers) == [0, 1, 2]
    assert description.request_time.seconds > 0
    assert description.attempt
    assert description.service_instance
    assert len(description.sampling_digest) == 32
    for field in ("spec", "steering", "request_time", "attempt", "service_instance", "sampling_digest"):
        description.ClearField(field)
    assert description == resolved


async def test_labels_and_the_prompts_text_are_in_the_description(service, store):
    labels = [capture_pb2.Label(name="split", text="train")]
    asked = capture_pb2.CaptureSpec(layers=LAYERS, labels=labels, keep_prompt=True)
    request_id = (await service.register(spec("r", asked))).request_id
    failure = await failure_of(service.events(ask(request_id)))
    assert failure.metadata["field"] == "capture.keep_prompt"
    await service.events(
        inference_pb2.GenerateRequest(request_id=request_id, text="so it is")
    )  # the registration was not used up
    (opened,) = store.opened
    assert opened.prompt_text == "so it is"
    assert list(opened.spec.labels) == labels


async def test_the_engine_gets_plan_salt_and_sampling(service):
    await service.put(JOY)
    await service.events(ask(spec("r", CAPTURE, [ADD_JOY]), max_tokens=9, seed=40))
    (call,) = service.engine.calls
    assert call.prompt == [5, 6, 7]
    assert (call.sampling.max_tokens, call.sampling.seed) == (9, 40)
    assert call.plan.prompt_tokens == 3
    assert call.plan.capture.capture_id == "r"
    (operation,) = call.plan.operations
    assert service.engine.bank[operation.row] == JOY.values
    assert call.cache_salt


async def test_a_plain_request_has_neither_plan_nor_salt(service):
    await service.events(ask())
    (call,) = service.engine.calls
    assert (call.plan, call.cache_salt) == (None, None)


async def test_a_complete_request_is_sealed_with_its_tokens(service, store):
    await service.events(ask(spec("r", CAPTURE)))
    seal = await store.seal()
    assert (seal.capture_id, seal.attempt, seal.outcome) == ("r", store.opened[0].attempt, COMPLETE)
    outcome = capture_pb2.SequenceOutcome(
        generated_token_ids=[1, 2, 3], finish_reason="length", token_texts=texts_of(1, 2, 3)
    )
    assert list(seal.sequences) == [outcome]
    assert seal.prompt_token_texts == texts_of(5, 6, 7)
    assert seal.message_spans == capture_pb2.MessageSpans(unknown_detail=NO_CHAT)


async def test_a_capture_is_sealed_even_if_its_tokens_cannot_be_described(service, store, monkeypatch):
    async def fail(*_arguments):
        raise RuntimeError("scripted")

    monkeypatch.setattr(service.engine.replies, "describe", fail)
    await service.events(ask(spec("r", CAPTURE)))
    seal = await store.seal()
    assert seal.outcome == COMPLETE
    assert "the log of the inference service says why" in seal.prompt_token_texts.unknown_detail
    assert seal.sequences[0].token_texts == texts_of(1, 2, 3)


@pytest.mark.parametrize(
    "spans",
    [
        [capture_pb2.MessageSpan(role="x" * MAX_SEAL_BYTES)],
        [capture_pb2.MessageSpan(role="user")] * (MAX_MESSAGE_SPANS + 1),
    ],
    ids=["too long", "too many"],
)
async def test_messages_that_do_not_fit_a_seal_are_left_out(service, store, monkeypatch, spans):
    async def describe(token_ids, chat, seal):
        seal.message_spans.spans.extend(spans)

    monkeypatch.setattr(service.engine.replies, "describe", describe)
    await service.events(ask(spec("r", CAPTURE)))
    seal = await store.seal()
    assert not seal.message_spans.spans
    assert "too many messages, or too long roles" in seal.message_spans.unknown_detail


async def test_texts_that_are_too_long_for_a_seal_are_left_out(service, store, monkeypatch):
    async def describe(token_ids, chat, seal):
        seal.prompt_token_texts.CopyFrom(
            capture_pb2.TokenTexts(text="x" * MAX_SEAL_BYTES, lengths=[MAX_SEAL_BYTES, 0, 0])
        )

    monkeypatch.setattr(service.engine.replies, "describe", describe)
    await service.events(ask(spec("r", CAPTURE)))
    seal = await store.seal()
    assert list(seal.sequences[0].generated_token_ids) == [1, 2, 3]
    for texts in (seal.prompt_token_texts, seal.sequences[0].token_texts):
        assert not texts.lengths
        assert "too long" in texts.unknown_detail


async def test_sequences_are_generated_separately(service, store):
    async def script(call):
        number = int(call.engine_id[-1])
        for token in range(number + 1):
            last = token == number
            yield Delta("x", [10 * number + token], "stop" if last else None, f"end{number}" if last else "")

    service.engine.script = script
    *_, finished = await service.events(ask(spec("r", CAPTURE), num_sequences=3, seed=7))
    assert [(item.finish_reason, item.stop_reason, item.generated_tokens) for item in finished.finished.sequences] == [
        ("stop", "end0", 1),
        ("stop", "end1", 2),
        ("stop", "end2", 3),
    ]
    assert finished.finished.usage == inference_pb2.Usage(prompt_tokens=3, generated_tokens=6)
    assert sorted((call.sampling.seed, call.plan.capture.sequence) for call in service.engine.calls) == [
        (7, 0),
        (8, 1),
        (9, 2),
    ]
    seal = await store.seal()
    assert [list(item.generated_token_ids) for item in seal.sequences] == [[0], [10, 11], [20, 21, 22]]


async def test_abort_stops_every_sequence_and_seals_as_aborted(service, store):
    service.engine.script = stuck_after(Delta("x", [1]))
    stream = service.stub.Generate(ask(spec("r", CAPTURE), num_sequences=2))
    for _ in range(3):  # the start, and one token of each sequence
        await stream.read()
    await service.abort("r")
    failure = await failure_of(stream.read())
    assert (failure.reason_name, failure.metadata) == ("ABORTED", {"request_id": "r"})
    assert failure.code == grpc.StatusCode.CANCELLED
    assert sorted(service.engine.closed) == ["r#0", "r#1"]
    seal = await store.seal()
    assert seal.outcome == ABORTED
    assert [(list(item.generated_token_ids), item.finish_reason) for item in seal.sequences] == [([1], "abort")] * 2
    assert [item.token_texts for item in seal.sequences] == [texts_of(1)] * 2
    assert seal.prompt_token_texts == texts_of(5, 6, 7)


async def test_a_client_that_drops_the_stream_stops_the_engine(service, store):
    service.engine.script = stuck_after(Delta("x", [1]))
    stream = service.stub.Generate(ask(spec("r", CAPTURE)))
    await stream.read()
    await stream.read()
    stream.cancel()
    await service.engine.until(lambda: service.engine.closed == ["r#0"])
    seal = await store.seal()
    assert (seal.outcome, list(seal.sequences[0].generated_token_ids)) == (ABORTED, [1])
    assert service.registry.running == ()


async def test_a_client_that_disconnects_without_reading_stops_the_engine(service, store):
    """The service waits for the client to read, not for the engine."""

    async def flood(call):
        for _ in range(10_000):
            yield Delta("x" * 50_000, [1])
            await asyncio.sleep(0)

    service.engine.script = flood
    stream = service.stub.Generate(ask(spec("r", CAPTURE)))
    await service.engine.until(lambda: service.engine.calls)
    stream.cancel()
    await service.engine.until(lambda: service.engine.closed == ["r#0"])
    assert (await store.seal()).outcome == ABORTED


async def test_the_engine_gets_a_request_before_the_caller_gets_its_first_event():
    """With many requests at once, their first events would otherwise delay each other's first tokens."""
    async with running_service() as service, aclosing(service.parts.runner.run(ask())) as events:
        assert (await anext(events)).HasField("started")
        assert len(service.engine.calls) == 1


async def test_a_client_that_leaves_with_the_last_event_has_a_complete_capture(service, store):
    """All tokens were generated: the capture does not depend on whether the client waits for the call's status."""
    run = service.parts.runner.run(ask(spec("r", CAPTURE)))
    async for event in run:
        if event.HasField("finished"):
            break
    await run.aclose()
    assert (await store.seal()).outcome == COMPLETE


async def test_a_failure_of_one_sequence_ends_the_request_as_incomplete(service, store):
    async def script(call):
        if call.engine_id.endswith("#1"):
            raise RuntimeError("CUDA took a walk")
        yield Delta("x", [1])
        await asyncio.Event().wait()

    service.engine.script = script
    failure = await failure_of(service.events(ask(spec("r", CAPTURE), num_sequences=2)))
    assert failure.reason_name == "INTERNAL"
    assert "CUDA" not in failure.message
    seal = await store.seal()
    assert seal.outcome == INCOMPLETE
    assert seal.incomplete_reason == capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED
    assert seal.incomplete_detail == "The engine failed; see its log."
    assert sorted(service.engine.closed) == ["r#0", "r#1"]


async def test_a_dead_engine_is_reported_and_recorded(service, store):
    async def script(call):
        yield Delta("x", [1])
        raise Failure(Reason.ERROR_REASON_ENGINE_DEAD, "dead")

    service.engine.script = script
    failure = await failure_of(service.events(ask(spec("r", CAPTURE))))
    assert failure.reason_name == "ENGINE_DEAD"
    seal = await store.seal()
    assert (seal.outcome, seal.incomplete_reason) == (INCOMPLETE, capture_pb2.INCOMPLETE_REASON_ENGINE_DIED)
    assert list(seal.sequences[0].generated_token_ids) == [1]


@pytest.mark.parametrize("capture", [None, CAPTURE])
async def test_a_failed_request_leaves_no_garbage(service, capture):
    """Garbage collections stop the whole process; see `freeze_heap`."""
    errors = []

    async def script(call):
        yield Delta("x", [1])
        errors.append(Failure(Reason.ERROR_REASON_INTERNAL, "scripted"))
        raise errors[0]

    async def run():
        try:
            async for _ in service.parts.runner.run(ask(spec("r", capture))):
                pass
        except Failure:
            return
        raise AssertionError("the request did not fail")

    service.engine.script = script
    gc.collect()
    gc.disable()
    try:
        await run()
        failed = weakref.ref(errors.pop())
        await asyncio.sleep(0)  # the end of its tasks
        assert failed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_early", [False, True])
async def test_a_request_whose_capture_is_refused_leaves_no_garbage(service, store, monkeypatch, is_early):
    ended, finish = [], service.registry.finish

    def note(running, *, has_begun):
        ended.append(weakref.ref(running))
        finish(running, has_begun=has_begun)

    monkeypatch.setattr(service.registry, "finish", note)
    store.takes_early_rows = is_early
    await service.events(ask(spec("before", CAPTURE)))  # then the service knows whether rows may come early
    store.refuse = Reason.ERROR_REASON_CAPTURE_EXISTS
    gc.collect()
    gc.disable()
    try:
        assert (await failure_of(service.events(ask(spec("r", CAPTURE))))).reason_name == "CAPTURE_EXISTS"
        await until(lambda: ended[1]() is None)
    finally:
        gc.enable()


async def test_sealing_is_retried_until_the_store_answers(service, store):
    store.failing_seals = 2
    await service.events(ask(spec("r", CAPTURE)))
    assert (await store.seal()).outcome == COMPLETE


async def test_an_id_of_a_request_without_a_capture_is_free_when_it_has_ended(service):
    for _ in range(2):
        assert (await service.events(ask(spec("r"))))[-1].HasField("finished")


async def test_the_id_of_a_running_request_is_refused(service):
    service.engine.script = stuck_after(Delta("x", [1]))
    stream = service.stub.Generate(ask(spec("r")))
    await stream.read()
    failure = await failure_of(service.events(ask(spec("r"))))
    assert failure.reason_name == "REQUEST_EXISTS"
    assert (await stream.read()).delta.text == "x"
    stream.cancel()


async def test_an_unknown_registration_is_refused(service):
    failure = await failure_of(service.events(ask("nobody")))
    assert (failure.reason_name, failure.metadata) == ("UNKNOWN_REQUEST", {"request_id": "nobody"})
    assert failure.code == grpc.StatusCode.NOT_FOUND


async def test_a_lapsed_registration_is_refused(service, monkeypatch):
    await service.register(spec("r"))
    later = time.monotonic() + service.registry.time_to_live + 1
    monkeypatch.setattr(service.registry, "_clock", lambda: later)
    failure = await failure_of(service.events(ask("r")))
    assert (failure.reason_name, failure.metadata) == ("UNKNOWN_REQUEST", {"request_id": "r"})


async def test_missing_vectors_leave_the_registration_usable(service):
    registered = await service.register(spec("r", CAPTURE, [ADD_JOY]))
    assert list(registered.missing_digests) == [JOY.digest]
    failure = await failure_of(service.events(ask("r")))
    assert (failure.reason_name, failure.metadata) == ("MISSING_VECTORS", {"digests": JOY.digest.hex()})
    assert failure.code == grpc.StatusCode.FAILED_PRECONDITION
    await service.put(JOY)
    assert (await service.events(ask("r")))[-1].HasField("finished")


@pytest.mark.parametrize("kind", ["ablate", "cap"])
async def test_the_zero_vector_has_no_direction(service, kind):
    zero = vector(0, 0, 0, 0)
    await service.put(zero)
    operation = steering_pb2.SteeringOperation(layers=LAYERS)
    getattr(operation, kind).digest = zero.digest
    if kind == "cap":
        operation.cap.max = 1.0
    failure = await failure_of(service.events(ask(spec("r", None, [operation]))))
    assert (failure.reason_name, failure.metadata) == ("BAD_VALUES", {"digest": zero.digest.hex()})


async def test_the_vector_of_a_gate_is_asked_for_and_loaded_like_any_other(service):
    gate_vector = vector(4, 3, 2, 1)
    operation = steering_pb2.SteeringOperation(layers=LAYERS, add=ADD_JOY.add)
    operation.gate.CopyFrom(steering_pb2.Gate(digest=gate_vector.digest, threshold=2.0, bias=0.5, below=True))
    await service.put(JOY)
    failure = await failure_of(service.events(ask(spec("r", None, [operation]))))
    assert (failure.reason_name, failure.metadata) == ("MISSING_VECTORS", {"digests": gate_vector.digest.hex()})
    await service.put(gate_vector)
    assert (await service.events(ask(spec("r", None, [operation]))))[-1].HasField("finished")
    (sent,) = service.engine.calls[-1].plan.operations
    assert service.engine.bank[sent.row] == JOY.values
    assert service.engine.bank[sent.gate.row] == gate_vector.values
    assert sent.gate[1:] == (1.5, -math.inf, Measure.PROJECTION)


async def test_the_vector_of_a_gate_must_have_a_direction(service):
    zero = vector(0, 0, 0, 0)
    await service.put(JOY, zero)
    operation = steering_pb2.SteeringOperation(layers=LAYERS, add=ADD_JOY.add)
    operation.gate.digest = zero.digest
    failure = await failure_of(service.events(ask(spec("r", None, [operation]))))
    assert (failure.reason_name, failure.metadata) == ("BAD_VALUES", {"digest": zero.digest.hex()})


async def test_the_zero_vector_can_be_added(service):
    zero = vector(0, 0, 0, 0)
    await service.put(zero)
    operation = steering_pb2.SteeringOperation(layers=LAYERS, add=steering_pb2.Add(digest=zero.digest, scale=1.0))
    assert (await service.events(ask(spec("r", None, [operation]))))[-1].HasField("finished")


BAD_REQUESTS = {
    "empty prompt": (ask("r", ids=()), "EMPTY_PROMPT"),
    "long prompt": (ask("r", ids=[1] * 60, max_tokens=5), "PROMPT_TOO_LONG"),
    "temperature": (ask("r", temperature=3.0), "INVALID_FIELD"),
}


@pytest.mark.parametrize(("request_", "reason"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
async def test_a_bad_request_leaves_the_registration_usable(service, request_, reason):
    await service.register(spec("r"))
    failure = await failure_of(service.events(request_))
    assert failure.reason_name == reason
    assert (await service.events(ask("r")))[-1].HasField("finished")


async def test_a_store_that_refuses_leaves_the_registration_usable(service, store):
    await service.register(spec("r", CAPTURE))
    store.refuse = Reason.ERROR_REASON_CAPTURE_EXISTS
    assert (await failure_of(service.events(ask("r")))).reason_name == "CAPTURE_EXISTS"
    assert not service.engine.calls
    store.refuse = None
    assert (await service.events(ask("r")))[-1].HasField("finished")


async def test_a_client_that_leaves_while_the_capture_is_opened_leaves_none_open(service, store):
    """The store may have opened the capture, so the service seals it."""
    store.gate.clear()
    stream = service.stub.Generate(ask(spec("r", CAPTURE), num_sequences=2))
    await store.until(lambda: store.opened)
    stream.cancel()
    seal = await store.seal()
    assert (seal.capture_id, seal.outcome, len(seal.sequences)) == ("r", ABORTED, 2)
    assert service.registry.running == ()
    assert not service.engine.calls


async def test_requests_run_concurrently(service):
    """One request never ends. Another one runs to its end at the same time."""
    never = stuck_after()
    service.engine.script = lambda call: never(call) if call.engine_id == "stuck#0" else three_tokens(call)
    stuck = service.stub.Generate(ask(spec("stuck")))
    await stuck.read()
    assert (await service.events(ask(spec("quick"))))[-1].HasField("finished")
    assert [running.request_id for running in service.registry.running] == ["stuck"]
    stuck.cancel()


async def test_the_number_of_requests_is_limited(store):
    async with running_service(store.endpoint, max_requests=2) as service:
        service.engine.script = stuck_after()
        calls = [service.stub.Generate(ask()) for _ in range(2)]
        for call in calls:
            assert (await call.read()).HasField("started")
        failure = await failure_of(service.events(ask()))
        assert (failure.reason, failure.metadata) == (Reason.ERROR_REASON_LIMIT_REACHED, {"limit": "max_requests"})
        calls[0].cancel()
        while service.places.num_taken > 1:  # noqa: ASYNC110 - nothing else tells of it
            await asyncio.sleep(0)
        service.engine.script = three_tokens
        assert (await service.events(ask()))[-1].HasField("finished")
        calls[1].cancel()
