"""Captures that are opened or sealed at about the same time share calls, and none depends on another."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import AsyncMock

import grpc
import pytest
from structlog.contextvars import get_contextvars
from structlog.testing import capture_logs

from inference_svc.captures import keeper as keeper_module
from inference_svc.captures import opening as opening_module
from inference_svc.captures import sealing as sealing_module
from inference_svc.captures.batches import Batches, together
from inference_svc.captures.keeper import CaptureKeeper
from inference_svc.captures.opening import Opening
from inference_svc.captures.store_link import NoAnswerError
from inference_svc.captures.stores import Stores
from residuum.rpc import tracing
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, rule_pb2, store_pb2, store_pb2_grpc
from residuum.wire.limits import MAX_CAPTURES_PER_OPEN, MAX_MESSAGE_BYTES, MAX_RULE_EVENTS_BYTES, MAX_SEAL_BYTES
from residuum.wire.placement import StoreAddress
from store_svc.checks import check_seal
from svc_common.logs import bind_request
from tests import ports
from tests.inference.service_support import DEADLINE, FakeStore, listening, until

UNREACHABLE = Reason.ERROR_REASON_STORE_UNREACHABLE
OLDER = "the store is older: it opens and seals captures one by one"
NEWER = 9999
"""A reason that only a newer store knows."""
ADD = store_pb2_grpc.add_StoreServiceServicer_to_server


class PickyStore(FakeStore):
    """Refuses captures and seals whose IDs are in `refused`, or in `reasons` with a reason."""

    def __init__(self):
        super().__init__()
        self.refused = set()
        self.reasons = {}

    async def OpenCapture(self, request, context):
        answer = await super().OpenCapture(request, context)
        if request.description.capture_id in self.reasons:
            raise Failure(self.reasons[request.description.capture_id], "scripted")
        if request.description.capture_id in self.refused:
            raise Failure(Reason.ERROR_REASON_CAPTURE_EXISTS, "scripted")
        return answer

    async def SealCapture(self, request, context):
        if request.capture_id in self.reasons:
            raise Failure(self.reasons[request.capture_id], "scripted")
        if request.capture_id in self.refused:
            raise Failure(Reason.ERROR_REASON_UNKNOWN_CAPTURE, "scripted")
        return await super().SealCapture(request, context)


@pytest.fixture
async def store():
    return PickyStore()


@pytest.fixture
async def keeper(store):
    async with listening(ADD, store) as endpoint:
        keeper = CaptureKeeper(StoreAddress("a", endpoint))
        yield keeper
        await keeper.close(DEADLINE)


def start(keeper, *names, on_queued=lambda: None):
    """Begin to open captures."""
    descriptions = [capture_pb2.CaptureDescription(capture_id=name) for name in names]
    return [asyncio.create_task(keeper.open(item, on_queued=on_queued)) for item in descriptions]


def seal(keeper, *names):
    for name in names:
        keeper.seal(store_pb2.SealCaptureRequest(capture_id=name))


def opened(store):
    return [description.capture_id for description in store.opened]


async def outcomes(tasks):
    """Return None for each capture that is open, and the reasons of the others."""
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return [result.reason if isinstance(result, Failure) else result for result in results]


async def test_the_lease_belongs_to_no_request(keeper, store, monkeypatch):
    """Its renewals go on after the request that took it, and so must not be in its trace, nor its ID in their logs."""
    answer = store_pb2.OpenCaptureResponse()
    answer.lease.FromNanoseconds(10_000_000)
    monkeypatch.setattr(store, "OpenCapture", AsyncMock(return_value=answer))
    fields = []

    async def renew(*_arguments):
        fields.append(get_contextvars())
        return store_pb2.RenewLeaseResponse()

    monkeypatch.setattr(keeper_module, "_renew", renew)
    bind_request("first")
    await keeper.open(capture_pb2.CaptureDescription(capture_id="first", service_instance="s"))
    await until(lambda: fields)
    assert fields[0] == {}


async def test_opens_of_one_turn_share_a_call(keeper, store):
    assert await outcomes(start(keeper, *"abcdefgh")) == [None] * 8
    assert store.batches == [8]
    assert keeper.num_open == 8


async def test_opens_that_come_before_the_first_answer_share_the_next_call(keeper, store):
    store.gate.clear()
    tasks = start(keeper, "a")
    await store.until(lambda: opened(store) == ["a"])  # a capture alone was sent at once
    tasks += start(keeper, "b")
    await asyncio.sleep(0)
    tasks += start(keeper, "c", "d")
    await asyncio.sleep(0.05)
    assert store.batches == [1]
    store.gate.set()
    assert await outcomes(tasks) == [None] * 4
    assert store.batches == [1, 3]


async def test_a_refused_capture_does_not_affect_the_others(keeper, store):
    store.refused.add("b")
    assert await outcomes(start(keeper, *"abc")) == [None, Reason.ERROR_REASON_CAPTURE_EXISTS, None]
    assert keeper.num_open == 2
    assert not keeper.is_avoided


async def test_opens_that_may_skip_a_capture_go_alone_because_the_store_may_wait_for_rows(keeper, store):
    skip = capture_pb2.IF_EXISTS_SKIP
    store.reasons["b"] = Reason.ERROR_REASON_LIMIT_REACHED  # too many calls wait
    descriptions = [capture_pb2.CaptureDescription(capture_id=name) for name in "abc"]
    tasks = [asyncio.create_task(keeper.open(item, skip)) for item in descriptions] + start(keeper, "d", "e")
    assert await outcomes(tasks) == [None, Reason.ERROR_REASON_LIMIT_REACHED, None, None, None]
    assert store.batches == [2]
    assert sorted(opened(store)) == [*"abcde"]


async def test_a_caller_that_leaves_does_not_affect_the_others_and_its_capture_is_sealed_after_the_open(keeper, store):
    store.gate.clear()
    tasks = start(keeper, *"abc")
    await store.until(lambda: opened(store) == ["a"])
    tasks[1].cancel()
    seal(keeper, "b")
    await asyncio.sleep(0.05)
    assert not store.seals, "the seal must not overtake the open"
    store.gate.set()
    assert await outcomes([tasks[0], tasks[2]]) == [None, None]
    await store.until(lambda: [item.capture_id for item in store.seals] == ["b"])
    assert opened(store) == ["a", "b", "c"]


async def test_a_capture_that_the_store_refused_is_not_sealed(keeper, store, capsys):
    store.refused.add("b")
    store.gate.clear()
    tasks = start(keeper, *"abc")
    await store.until(lambda: opened(store) == ["a"])
    tasks[1].cancel()
    seal(keeper, "b", "c")
    store.gate.set()
    assert await outcomes([tasks[0], tasks[2]]) == [None, None]
    await until(lambda: not keeper.num_seals)
    assert [item.capture_id for item in store.seals] == ["c"]
    assert "not sealed" not in "".join(capsys.readouterr())


async def test_the_capture_of_a_caller_that_leaves_before_the_call_is_neither_opened_nor_sealed(keeper, store):
    store.gate.clear()
    tasks = start(keeper, "a")
    await store.until(lambda: opened(store) == ["a"])
    tasks += start(keeper, "b", "c")
    await asyncio.sleep(0)
    tasks[1].cancel()
    seal(keeper, "b")
    await asyncio.sleep(0)
    store.gate.set()
    assert await outcomes([tasks[0], tasks[2]]) == [None, None]
    await until(lambda: not keeper.num_seals)
    assert (opened(store), store.seals) == (["a", "c"], [])
    assert keeper.num_open == 2


async def test_an_older_store_gets_single_calls(keeper, store):
    store.is_older = True
    store.refused.add("b")
    with capture_logs() as lines:
        for _ in range(2):
            assert await outcomes(start(keeper, *"abc")) == [None, Reason.ERROR_REASON_CAPTURE_EXISTS, None]
        seal(keeper, "a", "c")
        await until(lambda: not keeper.num_seals)
    assert [line["event"] for line in lines] == [OLDER]
    assert sorted(opened(store)) == sorted("abc" * 2)
    assert sorted(item.capture_id for item in store.seals) == ["a", "c"]


async def test_a_seal_that_finds_an_older_store_logs_it(keeper, store):
    store.is_older = True
    with capture_logs() as lines:
        seal(keeper, "a", "c")
        await until(lambda: not keeper.num_seals)
        assert await outcomes(start(keeper, "b")) == [None]
    assert [line["event"] for line in lines] == [OLDER]
    assert not store.batches


async def test_a_store_that_is_down_fails_each_open_and_is_found_when_it_is_back(store):
    port = ports.reserve()
    keeper = CaptureKeeper(StoreAddress("a", f"127.0.0.1:{port}"))
    assert await outcomes(start(keeper, *"abc")) == [UNREACHABLE] * 3
    assert (keeper.num_open, keeper.answered, keeper.is_avoided) == (0, False, True)
    async with listening(ADD, store, port=port):
        assert await outcomes(start(keeper, *"abc")) == [None] * 3
        assert keeper.answered
        await keeper.close(DEADLINE)


async def test_an_open_that_waits_for_a_call_without_an_answer_has_its_own_timeout(keeper, store, monkeypatch):
    store.gate.clear()
    first = start(keeper, "a")
    await store.until(lambda: opened(store) == ["a"])
    monkeypatch.setattr(opening_module, "OPEN_SECONDS", 0.2)
    (second,) = start(keeper, "b")
    with pytest.raises(NoAnswerError, match="does not answer"):
        await second
    assert not first[0].done()
    seal(keeper, "b")
    store.gate.set()
    assert await outcomes(first) == [None]
    await until(lambda: not keeper.num_seals)
    assert (opened(store), store.seals) == (["a"], []), "it was never sent"


class BreakingStore(FakeStore):
    """Queues the first capture of its first call, and breaks."""

    async def OpenCaptures(self, request, context):
        if not self.batches:
            self.batches.append(len(request.opens))
            yield store_pb2.OpenCapturesResponse(queued=[0])
            await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")
        async for response in super().OpenCaptures(request, context):
            yield response


async def test_a_queued_open_of_a_call_that_breaks_is_not_repeated_but_the_others_are():
    store = BreakingStore()
    queued = []
    async with listening(ADD, store) as endpoint:
        keeper = CaptureKeeper(StoreAddress("a", endpoint))
        tasks = start(keeper, "a", on_queued=lambda: queued.append("a")) + start(keeper, "b", "c")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], NoAnswerError)
        assert results[1:] == [None, None]
        assert (queued, opened(store), store.batches) == (["a"], ["b", "c"], [3, 2])
        await keeper.close(DEADLINE)


class EarlyRowsStore(FakeStore):
    """Takes rows before the open of their capture, and says so before it opens any."""

    def __init__(self):
        super().__init__()
        self.takes_early_rows = True

    async def OpenCaptures(self, request, context):
        yield store_pb2.OpenCapturesResponse(takes_early_rows=self.takes_early_rows)
        async for response in super().OpenCaptures(request, context):
            yield response


async def test_a_store_says_whether_it_takes_rows_before_the_open():
    async with listening(ADD, EarlyRowsStore()) as endpoint:
        keeper = CaptureKeeper(StoreAddress("a", endpoint))
        assert not keeper.takes_early_rows(capture_pb2.IF_EXISTS_FAIL), "it has not said so yet"
        await asyncio.gather(*start(keeper, "a"))
        assert keeper.takes_early_rows(capture_pb2.IF_EXISTS_UNSPECIFIED)
        assert keeper.takes_early_rows(capture_pb2.IF_EXISTS_FAIL)
        assert not keeper.takes_early_rows(capture_pb2.IF_EXISTS_REPLACE), "a capture that may exist is opened first"
        assert not keeper.takes_early_rows(capture_pb2.IF_EXISTS_SKIP)
        await keeper.close(DEADLINE)


@pytest.mark.parametrize("fixed", [False, True])
async def test_rows_do_not_come_before_the_open_if_another_store_may_hold_the_capture(fixed):
    async with listening(ADD, EarlyRowsStore()) as a, listening(ADD, EarlyRowsStore()) as b:
        stores = Stores([StoreAddress("a", a), StoreAddress("b", b)], fixed=fixed)
        for keeper in stores.keepers.values():
            await asyncio.gather(*start(keeper, "first"))

        def takes(*, is_new_id):
            return stores.takes_early_rows("c", is_new_id=is_new_id, if_exists=capture_pb2.IF_EXISTS_FAIL)

        assert takes(is_new_id=True)
        assert takes(is_new_id=False) == fixed
        await stores.close(DEADLINE)


async def test_rows_wait_again_if_the_store_fails_or_becomes_older(monkeypatch):
    store = EarlyRowsStore()
    monkeypatch.setattr(opening_module, "OPEN_SECONDS", 0.3)
    async with listening(ADD, store) as endpoint:
        keeper = CaptureKeeper(StoreAddress("a", endpoint))

        async def takes_early_rows_after(name):
            await asyncio.gather(*start(keeper, name), return_exceptions=True)
            return keeper.takes_early_rows(capture_pb2.IF_EXISTS_FAIL)

        assert await takes_early_rows_after("a")
        store.gate.clear()
        assert not await takes_early_rows_after("no answer")
        store.gate.set()
        assert await takes_early_rows_after("c")
        store.takes_early_rows = False
        assert not await takes_early_rows_after("d")
        store.takes_early_rows = True
        assert await takes_early_rows_after("e")
        store.is_older = True
        assert not await takes_early_rows_after("f")
        await keeper.close(DEADLINE)


async def test_the_seal_of_a_capture_whose_open_has_just_begun_comes_after_the_open():
    store = FakeStore()
    async with listening(ADD, store) as endpoint:
        keeper = CaptureKeeper(StoreAddress("a", endpoint))
        store.gate.clear()
        start(keeper, "a")
        keeper.seal(store_pb2.SealCaptureRequest(capture_id="a"))
        await store.until(lambda: store.opened)
        await asyncio.sleep(0.05)
        assert not store.seals
        store.gate.set()
        await store.seal()
        await keeper.close(DEADLINE)


async def test_a_refused_capture_is_not_sealed_if_the_answer_comes_while_the_seal_is_completed():
    store = FakeStore()
    store.refuse = Reason.ERROR_REASON_STORE_FULL
    async with listening(ADD, store) as endpoint:
        keeper = CaptureKeeper(StoreAddress("a", endpoint))
        (opening,) = start(keeper, "a")

        async def complete(seal):
            await asyncio.wait([opening])

        keeper.seal(store_pb2.SealCaptureRequest(capture_id="a"), complete)  # before the open has begun
        assert await outcomes([opening]) == [Reason.ERROR_REASON_STORE_FULL]
        await until(lambda: not keeper.num_seals)
        assert not store.seals
        await keeper.close(DEADLINE)


async def test_a_capture_whose_open_is_never_sent_is_not_sealed_however_long_the_seal_takes_to_complete():
    store = FakeStore()
    async with listening(ADD, store) as endpoint:
        keeper = CaptureKeeper(StoreAddress("a", endpoint))
        store.gate.clear()
        (first,) = start(keeper, "a")
        await store.until(lambda: store.opened)
        (left,) = start(keeper, "b")  # it waits for the call before
        await asyncio.sleep(0)
        left.cancel()
        with suppress(asyncio.CancelledError):
            await left
        is_complete = asyncio.Event()

        async def complete(seal):
            await is_complete.wait()

        keeper.seal(store_pb2.SealCaptureRequest(capture_id="b"), complete)
        await asyncio.sleep(0)
        store.gate.set()
        await first
        await asyncio.sleep(0.05)
        is_complete.set()
        await until(lambda: keeper.num_seals == 0)
        assert opened(store) == ["a"]
        assert not store.seals
        await keeper.close(DEADLINE)


class DyingStore(FakeStore):
    """Queues the first capture of its first call, dies, and comes back only to seal."""

    async def OpenCaptures(self, request, context):
        self.batches.append(len(request.opens))
        if len(self.batches) == 1:
            yield store_pb2.OpenCapturesResponse(queued=[0])
        await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")


async def test_captures_that_a_call_may_have_opened_are_sealed_although_nothing_answers_the_second_call():
    """A call may take several transactions, and a store may die between them. So it may have replaced `b`."""
    store = DyingStore()
    async with listening(ADD, store) as endpoint:
        keeper = CaptureKeeper(StoreAddress("a", endpoint))
        tasks = start(keeper, "a")
        replaced = capture_pb2.CaptureDescription(capture_id="b")
        tasks.append(asyncio.create_task(keeper.open(replaced, capture_pb2.IF_EXISTS_REPLACE)))
        results = await asyncio.gather(*tasks, *start(keeper, "c"), return_exceptions=True)
        assert [type(result) for result in results] == [NoAnswerError] * 3
        assert {result.reason for result in results} == {UNREACHABLE}
        assert (store.batches, keeper.num_open, keeper.is_avoided) == ([3, 2], 3, True)
        assert [type(result) for result in await asyncio.gather(*start(keeper, "d"), return_exceptions=True)] == [
            Failure
        ], "no call about it had begun"
        seal(keeper, *"abc")
        await store.until(lambda: sorted(item.capture_id for item in store.seals) == ["a", "b", "c"])
        await keeper.close(DEADLINE)


class SilentStore(FakeStore):
    """Ends calls that open captures after the first result."""

    async def OpenCaptures(self, request, context):
        async for response in super().OpenCaptures(request, context):
            del response.results[1:]
            yield response


async def test_an_open_without_a_result_fails_and_its_capture_is_sealed():
    store = SilentStore()
    async with listening(ADD, store) as endpoint:
        keeper = CaptureKeeper(StoreAddress("a", endpoint))
        tasks = start(keeper, "a", "b")
        await asyncio.sleep(0)
        seal(keeper, "b")  # before its open ends
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), NoAnswerError]
        assert keeper.is_avoided
        await store.until(lambda: [item.capture_id for item in store.seals] == ["b"])
        await keeper.close(DEADLINE)


class LateStore(SilentStore):
    """Opens a capture some time after its call has ended without an answer: at its third seal."""

    def __init__(self):
        super().__init__()
        self.asked = []

    async def SealCapture(self, request, context):
        self.asked.append(request.capture_id)
        if self.asked.count(request.capture_id) < 3:
            raise Failure(Reason.ERROR_REASON_UNKNOWN_CAPTURE, "scripted")
        return await super().SealCapture(request, context)


async def test_a_capture_that_comes_after_its_open_had_no_answer_is_sealed():
    """A store that stood still carries out the calls of that time in any order. Nothing else would end the capture."""
    store = LateStore()
    async with listening(ADD, store) as endpoint:
        keeper = CaptureKeeper(StoreAddress("a", endpoint))
        results = await asyncio.gather(*start(keeper, "a", "b"), return_exceptions=True)
        assert [type(result) for result in results] == [type(None), NoAnswerError]
        seal(keeper, "a", "b")
        await until(lambda: not keeper.num_seals)
        assert [item.capture_id for item in store.seals] == ["b"]
        assert store.asked.count("a") == 1, "it was open, so it has been deleted"
        assert not keeper._unanswered
        await keeper.close(DEADLINE)


def large_seal(num_bytes):
    """Return a seal with tokens, and with so many events of rules that it has more than this many bytes."""
    event = rule_pb2.RuleEvent(rule="x" * 1000)
    return store_pb2.SealCaptureRequest(
        capture_id="a",
        attempt=7,
        sequences=[capture_pb2.SequenceOutcome(generated_token_ids=[1, 2], finish_reason="stop")],
        outcome=capture_pb2.CAPTURE_STATE_COMPLETE,
        rule_events=[event] * (num_bytes // 1000 + 1),
    )


@pytest.mark.parametrize("size", [MAX_RULE_EVENTS_BYTES, MAX_SEAL_BYTES, MAX_MESSAGE_BYTES])
async def test_a_capture_whose_seal_is_too_large_ends_incomplete_at_once(keeper, store, monkeypatch, size):
    description = capture_pb2.CaptureDescription(num_sequences=1, prompt_token_ids=[1])
    take = store.SealCapture

    async def check_first(request, context):
        check_seal(request, description)
        return await take(request, context)

    monkeypatch.setattr(store, "SealCapture", check_first)
    with capture_logs() as lines:
        keeper.seal(large_seal(size))
        await until(lambda: not keeper.num_seals)
    (taken,) = store.seals
    assert (taken.attempt, taken.outcome) == (7, capture_pb2.CAPTURE_STATE_INCOMPLETE)
    assert (taken.sequences[0].generated_token_ids, taken.sequences[0].finish_reason) == ([1, 2], "stop")
    assert "The seal of the capture could not be stored: " in taken.incomplete_detail
    assert "bytes" in taken.incomplete_detail
    events = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert events == ["the seal cannot be stored; the capture ends INCOMPLETE"]


async def test_the_seal_of_a_capture_that_never_comes_is_given_up(keeper, store, monkeypatch):
    monkeypatch.setattr(sealing_module, "_LONGEST_DELAY_SECONDS", 0.01)
    store.reasons["a"] = Reason.ERROR_REASON_NOT_SERVING
    assert await outcomes(start(keeper, "a")) == [UNREACHABLE]
    store.reasons["a"] = Reason.ERROR_REASON_UNKNOWN_CAPTURE
    with capture_logs() as lines:
        seal(keeper, "a")
        await until(lambda: not keeper.num_seals)
    assert [line["event"] for line in lines] == ["capture not sealed yet; the service retries", "capture not sealed"]


async def test_opens_whose_call_is_cancelled_fail(keeper, store):
    store.gate.clear()
    tasks = start(keeper, "a", "b")
    await store.until(lambda: opened(store) == ["a"])
    answers = [opening.answer for opening in keeper._opening.values()]
    (call,) = keeper._openings._batches._tasks
    call.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [NoAnswerError] * 2
    assert [answer.done() for answer in answers] == [True] * 2, "seals wait for the answers"
    store.gate.set()


async def test_seals_share_calls_and_only_a_failed_one_is_repeated(keeper, store):
    store.refused.add("b")
    with capture_logs() as lines:
        store.failing_seals = 1  # the first one of the call: the store is full
        seal(keeper, *"abc")
        await until(lambda: not keeper.num_seals)
    assert [item.capture_id for item in store.seals] == ["c", "a"]
    assert [(line["event"], line["request_id"]) for line in lines] == [
        ("capture not sealed yet; the service retries", "a"), ("capture not sealed", "b"),
    ]  # fmt: skip


class BusyStore(FakeStore):
    """Refuses the first call that seals captures."""

    is_busy = True

    async def SealCaptures(self, request, context):
        if self.is_busy:
            self.is_busy = False
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
        return await super().SealCaptures(request, context)


async def test_seals_that_a_busy_store_refuses_are_repeated():
    """If a store already serves as many calls as it may, gRPC itself refuses one, without a reason of the contract."""
    store = BusyStore()
    async with listening(ADD, store) as endpoint:
        keeper = CaptureKeeper(StoreAddress("a", endpoint))
        seal(keeper, *"ab")
        await until(lambda: not keeper.num_seals)
        assert sorted(item.capture_id for item in store.seals) == ["a", "b"]
        await keeper.close(DEADLINE)


@pytest.mark.parametrize("reason", [NEWER, Reason.ERROR_REASON_NOT_SERVING])
async def test_a_seal_that_is_refused_for_an_unknown_reason_or_by_a_stopping_store_is_repeated(keeper, store, reason):
    store.reasons["b"] = reason
    with capture_logs() as lines:
        seal(keeper, *"abc")
        await until(lambda: lines)
    assert (keeper.num_seals, keeper.answered, keeper.is_avoided) == (1, False, True)
    assert [(line["event"], line["request_id"]) for line in lines] == [
        ("capture not sealed yet; the service retries", "b")
    ]
    assert "scripted" in lines[0]["cause"]
    store.reasons.clear()
    await until(lambda: not keeper.num_seals)
    assert sorted(item.capture_id for item in store.seals) == ["a", "b", "c"]


async def test_an_open_that_a_stopping_store_refuses_may_have_been_made(keeper, store):
    store.reasons["b"] = Reason.ERROR_REASON_NOT_SERVING
    results = await asyncio.gather(*start(keeper, *"abc"), return_exceptions=True)
    assert [type(result) for result in results] == [type(None), NoAnswerError, type(None)]
    assert (keeper.num_open, keeper.answered, keeper.is_avoided) == (3, False, True)


@pytest.mark.parametrize("full", "ac")
async def test_a_store_that_is_full_for_one_capture_is_avoided_whatever_the_order_of_results(keeper, store, full):
    store.reasons[full] = Reason.ERROR_REASON_STORE_FULL
    await outcomes(start(keeper, *"abc"))
    assert (keeper.answered, keeper.is_avoided) == (True, True)
    store.reasons.clear()
    assert await outcomes(start(keeper, "d")) == [None]
    assert not keeper.is_avoided


@pytest.mark.parametrize("full", "ac")
async def test_a_store_that_is_full_for_one_seal_is_avoided_whatever_the_order_of_results(keeper, store, full):
    store.reasons = dict.fromkeys("abc", Reason.ERROR_REASON_INTERNAL) | {full: Reason.ERROR_REASON_STORE_FULL}
    with capture_logs() as lines:
        seal(keeper, *"abc")
        await until(lambda: lines)
    assert (keeper.answered, keeper.is_avoided) == (True, True)
    store.reasons.clear()
    await until(lambda: not keeper.num_seals)


DESCRIPTION = capture_pb2.CaptureDescription(capture_id="a")


def test_a_call_is_the_message_of_its_items():
    opens = [
        store_pb2.OpenCaptureRequest(description=description, if_exists=if_exists)
        for description in (
            DESCRIPTION,
            capture_pb2.CaptureDescription(capture_id="b" * 200, prompt_token_ids=range(300)),
        )
        for if_exists in (capture_pb2.IF_EXISTS_FAIL, capture_pb2.IF_EXISTS_REPLACE)
    ]
    items = [SimpleNamespace(data=item.SerializeToString()) for item in opens]
    data = together(store_pb2.OpenCapturesRequest.OPENS_FIELD_NUMBER, items)
    assert store_pb2.OpenCapturesRequest.FromString(data) == store_pb2.OpenCapturesRequest(opens=opens)


async def test_an_opening_is_the_message_of_its_parts():
    for if_exists in (capture_pb2.IF_EXISTS_UNSPECIFIED, capture_pb2.IF_EXISTS_SKIP):
        opening = Opening.of(DESCRIPTION, if_exists, lambda: None)
        wanted = store_pb2.OpenCaptureRequest(description=DESCRIPTION, if_exists=if_exists)
        assert store_pb2.OpenCaptureRequest.FromString(opening.data) == wanted
        assert opening.may_wait == (if_exists == capture_pb2.IF_EXISTS_SKIP)


class Sent:
    """Items of `Batches`, and the calls that send them."""

    def __init__(self):
        self.calls = []
        self.releases = []
        self.batches = Batches(self._send)

    async def _send(self, items, release):
        self.calls.append(len(items))
        self.releases.append(release)
        await asyncio.Event().wait()

    def add(self, *sizes):
        for size in sizes:
            self.batches.add(SimpleNamespace(data=bytes(size)))


async def turns():
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_call_has_no_more_items_than_a_message_holds():
    sent = Sent()
    large = MAX_MESSAGE_BYTES // 2
    sent.add(*[1] * (MAX_CAPTURES_PER_OPEN + 1), large, large, 2 * MAX_MESSAGE_BYTES, 1)
    for number in range(5):
        await turns()
        assert len(sent.calls) == number + 1
        sent.releases[-1]()
    assert sent.calls == [MAX_CAPTURES_PER_OPEN, 2, 1, 1, 1]


async def test_an_item_with_a_trace_goes_alone(monkeypatch):
    sent = Sent()
    monkeypatch.setattr(tracing, "current_context", object)
    sent.add(1, 1)
    await turns()
    assert sent.calls == [1, 1]
