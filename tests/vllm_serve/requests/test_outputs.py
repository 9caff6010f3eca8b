"""Callers of a captured request get vLLM's outputs, and the tokens are known at any time."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from inference_svc.requests.registry import Running
from inference_svc.session.burst import Burst
from inference_svc.session.sequences import GeneratedSequence
from inference_svc.vllm_serve.requests.outputs import CallerOutputs, merge_streams
from residuum.rpc.errors import Failure
from tests.inference.spec_support import spec_of
from tests.session.faces import HeldBurst


def step(text, token_ids, finish_reason=None, *, logprob=None):
    logprobs = None if logprob is None else [{token: logprob} for token in token_ids]
    completion = CompletionOutput(0, text, token_ids, logprob, logprobs, finish_reason=finish_reason)
    return RequestOutput("cmpl-1", None, [9, 9], None, [completion], finish_reason is not None)


STEPS = (("a", [1], None), ("bc", [2, 3], None), ("d", [4], "length"))


def outputs_of(kind, count=1):
    sequences = [GeneratedSequence() for _ in range(count)]
    outputs = CallerOutputs(sequences, kind)
    given = []
    for at, _ in enumerate(STEPS):
        for index in range(count):
            output = outputs.add(index, step(*STEPS[at], logprob=-1.0))
            if output is not None:
                given.append(output)
    return sequences, given


def test_delta_outputs_are_the_steps():
    sequences, given = outputs_of(RequestOutputKind.DELTA)
    assert [output.outputs[0].text for output in given] == ["a", "bc", "d"]
    assert [output.finished for output in given] == [False, False, True]
    assert sequences[0].is_complete


def test_cumulative_outputs_are_not_changed_by_later_steps():
    _, given = outputs_of(RequestOutputKind.CUMULATIVE)
    assert [output.outputs[0].text for output in given] == ["a", "abc", "abcd"]
    assert [list(output.outputs[0].token_ids) for output in given] == [[1], [1, 2, 3], [1, 2, 3, 4]]
    assert [len(output.outputs[0].logprobs) for output in given] == [1, 3, 4]
    assert [output.finished for output in given] == [False, False, True]


def test_final_only_output_comes_once_at_the_end():
    _, (final,) = outputs_of(RequestOutputKind.FINAL_ONLY, count=3)
    assert final.finished
    assert [completion.index for completion in final.outputs] == [0, 1, 2]
    assert [completion.text for completion in final.outputs] == ["abcd"] * 3
    assert [completion.finish_reason for completion in final.outputs] == ["length"] * 3


def test_delta_outputs_of_several_sequences_finish_with_the_last():
    _, given = outputs_of(RequestOutputKind.DELTA, count=2)
    assert [output.finished for output in given] == [False] * 5 + [True]
    assert [output.outputs[0].index for output in given] == [0, 1] * 3


def test_tokens_are_known_before_the_end():
    sequences = [GeneratedSequence(), GeneratedSequence()]
    outputs = CallerOutputs(sequences, RequestOutputKind.FINAL_ONLY)
    assert outputs.add(0, step("a", [1])) is None
    assert outputs.add(1, step("x", [7, 8], "stop")) is None
    outcomes = [sequence.outcome() for sequence in sequences]
    assert [list(outcome.generated_token_ids) for outcome in outcomes] == [[1], [7, 8]]
    assert [outcome.finish_reason for outcome in outcomes] == ["abort", "stop"]
    assert [sequence.is_complete for sequence in sequences] == [False, True]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_sequence_that_vllm_ended_with_an_error_is_not_complete(reason):
    sequence = GeneratedSequence()
    output = CallerOutputs([sequence], RequestOutputKind.DELTA).add(0, step("a", [1], reason))
    assert output.finished
    assert not sequence.is_complete
    assert sequence.outcome().finish_reason == reason


async def counting(until, closed, error=None):
    try:
        for number in range(until):
            await asyncio.sleep(0)
            yield number
        if error:
            raise error
    finally:
        closed.append(until)


async def everything(stream):
    async with aclosing(stream) as items:
        return [item async for item in items]


async def at_once():
    pass


def request():
    return Running("r", spec_of("r"), was_registered=False)


def merged(*streams, ready=at_once, running=None, **options):
    return merge_streams(running or request(), streams, Burst(), ready, **options)


async def test_several_generators_are_merged():
    closed = []
    seen = await everything(merged(counting(2, closed), counting(4, closed), counting(0, closed)))
    assert sorted(seen) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert sorted(closed) == [0, 2, 4]


@pytest.mark.parametrize("when", ["before", "at the start", "while the caller reads slowly"])
async def test_an_abort_ends_generators_that_give_nothing_any_more(when):
    closed, silent = [], asyncio.Event()
    running = request()

    async def stuck():
        try:
            yield 0
            yield 1
            await silent.wait()
        finally:
            closed.append("stuck")

    if when == "before":
        running.abort()

    async def read():
        async with aclosing(merged(stuck(), stuck(), running=running)) as items:
            async for _ in items:
                if when == "while the caller reads slowly":
                    await asyncio.sleep(0.05)
                running.abort()

    with pytest.raises(Failure, match="The server stopped"):
        await read()
    assert closed == ["stuck", "stuck"] or when == "before"
    assert running.on_abort is None


async def test_an_error_of_one_generator_closes_all():
    closed = []
    with pytest.raises(ValueError, match="broken"):
        await everything(merged(counting(1000, closed), counting(1, closed, ValueError("broken"))))
    assert sorted(closed) == [1, 1000]


async def test_closing_the_merged_stream_closes_all_generators():
    closed = []
    async with aclosing(merged(counting(1000, closed), counting(2000, closed))) as both:
        await anext(both)
    assert sorted(closed) == [1000, 2000]


async def test_unread_outputs_stay_in_vllm_which_merges_them():
    made = []

    async def steps():
        while True:
            made.append(None)
            yield len(made)
            await asyncio.sleep(0)

    async with aclosing(merged(steps(), steps())) as both:
        await anext(both)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(made) <= 6
        for _ in range(20):
            await anext(both)


async def test_the_capture_is_opened_after_the_burst_or_with_the_first_item():
    events, is_free = [], asyncio.Event()

    async def ready():
        events.append("ready")

    async def slow():
        await is_free.wait()
        yield 1

    for free_first in (True, False):
        events.clear()
        is_free.clear()
        burst = HeldBurst()
        async with aclosing(merge_streams(request(), [slow()], burst, ready)) as steps:
            reading = asyncio.ensure_future(anext(steps))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not events
            if free_first:
                is_free.set()
            else:
                burst.end()
            for _ in range(5):
                await asyncio.sleep(0)
            assert events == ["ready"]
            assert reading.done() == free_first
            is_free.set()
            assert await reading == (0, 1)


async def test_rules_judge_tokens_that_nobody_reads_yet():
    """The generators judge the tokens, so a slow reader or a slow store must not hold them up."""
    judged, is_open = [], asyncio.Event()

    async def judging():
        for number in range(50):
            judged.append(number)
            yield number

    async with aclosing(merged(judging(), ready=is_open.wait, reads_ahead=True)) as steps:
        reading = asyncio.ensure_future(anext(steps))
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(judged) == 50
        assert not reading.done()
        is_open.set()
        assert await reading == (0, 0)
        assert [item async for _, item in steps] == list(range(1, 50))
