"""The service's work for each token: constant from the first to the 4,000th, without waits."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import tracemalloc
from contextlib import aclosing
from pathlib import Path

import pytest
import structlog

import inference_svc
import residuum.rpc
from inference_svc.admission.admission import Admission
from inference_svc.engine.engine import Engine
from inference_svc.engine.sampling import sampling_params
from residuum.protocol.generation.events import ReplyBuilder
from residuum.v1 import inference_pb2
from tests.inference.engine.test_engine import FakeLLM, completion
from tests.inference.service_support import FACTS, ask, spec
from tests.inference.session.test_steering_service import generating, read_all

LONG = 4000


@pytest.fixture(autouse=True)
def _room_for_long_replies(service):
    service.engine.facts = dataclasses.replace(FACTS, max_model_len=2 * LONG)
    service.parts.runner._admission = Admission(service.engine.facts, service.cache, service.parts.saes)


async def test_a_client_that_keeps_up_has_a_message_for_each_step(service):
    async with generating(service, spec("r")) as (stream, hand):
        for _ in range(3):
            hand.token()
            assert list((await stream.read()).delta.token_ids) == [1]


async def test_unread_deltas_of_a_sequence_are_merged_into_one_message(service):
    async with generating(service, spec("r"), num_sequences=2) as (stream, hand):
        await service.engine.until(lambda: len(service.engine.calls) == 2)
        for last in (False, False, True):
            hand.token("r#0", last=last)
        hand.token("r#1")
        deltas = [(await stream.read()).delta for _ in range(2)]
        assert {delta.sequence: (delta.text, list(delta.token_ids)) for delta in deltas} == {
            0: ("xxx", [1, 1, 1]),
            1: ("x", [1]),
        }
        hand.token("r#1", last=True)
        *_, end = await read_all(stream)
    assert [item.generated_tokens for item in end.finished.sequences] == [3, 2]
    assert [item.finish_reason for item in end.finished.sequences] == ["stop", "stop"]


async def test_a_token_late_in_a_long_reply_costs_as_much_as_an_early_one(service):
    peaks = {}
    async with generating(service, spec("r"), max_tokens=LONG + 1) as (stream, hand):
        tracemalloc.start()
        try:
            for number in range(LONG):
                if number % 1000 == 100:  # limits for one hundred tokens, with a rare peak allowed once in a thousand
                    tracemalloc.reset_peak()
                    before = tracemalloc.get_traced_memory()[0]
                hand.token()
                assert len((await stream.read()).delta.text) == 1
                if number % 1000 == 199:
                    peaks[number] = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
    early, late = peaks[199], peaks[LONG - 801]
    # Decoding the reply again, or joining its text, would touch 3,000 characters and more for each token.
    assert late < early + 2500, peaks


def test_the_client_joins_a_long_reply_once():
    builder = ReplyBuilder()
    builder.add(inference_pb2.GenerateResponse(started=inference_pb2.GenerationStarted(request_id="r")))
    event = inference_pb2.GenerateResponse(delta=inference_pb2.TokenDelta(text="0123456789", token_ids=[7]))
    costs = []
    tracemalloc.start()
    try:
        for _ in range(LONG):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            builder.add(event)
            costs.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    # A list grows by an eighth from time to time, which explains single peaks. No allocation is as long as the text.
    assert sorted(costs)[int(LONG * 0.97)] < 2000
    builder.add(
        inference_pb2.GenerateResponse(
            finished=inference_pb2.GenerationFinished(sequences=[inference_pb2.SequenceFinish(finish_reason="length")])
        )
    )
    assert builder.reply().text == "0123456789" * LONG


async def test_log_lines_do_not_grow_with_the_reply(service, caplog):
    caplog.set_level(logging.INFO)
    lines = {}
    for tokens in (2, 300):
        caplog.clear()
        with structlog.testing.capture_logs() as logged:
            async with generating(service, spec(f"r{tokens}"), max_tokens=tokens) as (stream, hand):
                for number in range(tokens):
                    hand.token(f"r{tokens}#0", last=number == tokens - 1)
                    await stream.read()
                await read_all(stream)
        lines[tokens] = len([line for line in logged if line["log_level"] != "debug"]) + len(caplog.records)
    assert lines[2] == lines[300] > 0


class OwnCode:
    """Counts the work of the service's own code while the context lasts: entered functions and generators, including
    each resumption after a wait, and tasks."""

    _FOLDERS = tuple(str(Path(module.__file__).parent) for module in (inference_svc, residuum.rpc))

    def __init__(self):
        self.steps = 0
        self.tasks = []

    def __enter__(self):
        self._loop = asyncio.get_running_loop()
        self._factory = self._loop.get_task_factory()
        self._loop.set_task_factory(self._task)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_exception):
        sys.setprofile(None)
        self._loop.set_task_factory(self._factory)

    def _note(self, frame, event, _argument):
        self.steps += event == "call" and frame.f_code.co_filename.startswith(self._FOLDERS)

    def _task(self, loop, coroutine, **options):
        code = getattr(coroutine, "cr_code", None)
        if code is not None and code.co_filename.startswith(self._FOLDERS):
            self.tasks.append(code.co_name)
        return asyncio.Task(coroutine, loop=loop, **options)


async def test_a_plain_request_has_one_task_and_few_steps(service):
    """The cost of each of many concurrent requests before their first token."""
    await service.events(ask(spec("first")))
    with OwnCode() as own:
        for number in range(10):
            await service.events(ask(spec(f"r{number}"), max_tokens=3))
    assert own.tasks == ["_generate"] * 10
    assert own.steps / 10 < 180  # including three tokens


async def test_a_token_takes_few_steps(service):
    steps = {}
    for tokens in (10, 110):
        async with generating(service, spec(f"r{tokens}"), max_tokens=tokens) as (stream, hand):
            with OwnCode() as own:
                for _ in range(tokens - 1):
                    hand.token(f"r{tokens}#0")
                    await stream.read()
            steps[tokens] = own.steps
            assert not own.tasks
    assert (steps[110] - steps[10]) / 100 < 17.5


async def test_the_engine_has_a_request_before_anybody_reads_its_first_event(service):
    stream = service.stub.Generate(ask(max_tokens=3))
    try:
        await service.engine.until(lambda: len(service.engine.calls) == 1)
    finally:
        stream.cancel()


class CountingTokenizer:
    """Counts its calls after it was made ready."""

    def __init__(self):
        self.asked = []

    def __getattribute__(self, name):
        if not name.startswith("__") and name != "asked":
            self.asked.append(name)
        return object.__getattribute__(self, name)

    def encode(self, text):
        return list(range(len(text)))

    def get_vocab(self):
        return {"a": 0}


@pytest.mark.parametrize("prompt", [{"text": "abc"}, {"token_ids": inference_pb2.TokenIds(ids=[0, 1, 2])}])
async def test_a_request_only_encodes_its_prompt_with_the_tokenizer(prompt):
    """No request or token copies the tokenizer or reads its special tokens; only the prompt's text is encoded."""
    tokenizer = CountingTokenizer()
    llm = FakeLLM()
    llm.outputs = [completion("a", [1])] * 100
    engine = Engine(llm, tokenizer, FACTS)
    tokenizer.asked.clear()
    ids = await engine.tokenize(inference_pb2.GenerateRequest(**prompt))
    assert ids == [0, 1, 2]
    sampling = sampling_params(inference_pb2.SamplingParameters(), 0)
    async with aclosing(engine.generate("r#0", ids, sampling, None, None)) as deltas:
        assert len([delta async for delta in deltas]) == 100
    assert tokenizer.asked == (["encode"] if "text" in prompt else [])
