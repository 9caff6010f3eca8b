"""The first message to a caller waits while more requests arrive."""

from __future__ import annotations

import asyncio
import math

import pytest

from inference_svc.session import burst
from inference_svc.session.burst import Burst
from residuum.v1 import store_pb2_grpc
from tests.inference.service_support import (
    CAPTURE,
    DEADLINE,
    FakeEngine,
    FakeStore,
    ask,
    listening,
    running_service,
    spec,
    stuck_after,
)


class Clock:
    """Replaces the event loop's timer: a pause ends when the test says so."""

    def __init__(self, monkeypatch):
        self.timers = []
        self.now = 100.0
        monkeypatch.setattr(burst.asyncio, "get_running_loop", lambda: self)

    def time(self):
        return self.now

    def call_later(self, seconds, callback):
        assert seconds == burst._PAUSE
        self.timers.append(callback)

    def end_pause(self):
        self.now += burst._PAUSE
        (callback,) = self.timers
        self.timers.clear()
        callback()


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_a_burst_ends_with_a_pause_without_requests(clock):
    requests, ended = Burst(), []
    requests.call_after(lambda: ended.append(1))
    requests.call_after(lambda: ended.append(2))
    clock.end_pause()
    assert not ended, "one came during the pause"
    clock.end_pause()
    assert ended == [1, 2]
    assert not clock.timers


def test_a_lone_request_waits_for_one_pause_and_the_next_one_too(clock):
    requests, ended = Burst(), []
    for number in (1, 2):
        requests.call_after(lambda number=number: ended.append(number))
        clock.end_pause()
        assert ended[-1] == number


def test_requests_that_never_pause_wait_for_a_limited_time(clock):
    requests, ended = Burst(), []
    pauses = math.ceil(burst._MAX_SECONDS / burst._PAUSE)
    for number in range(pauses):
        assert not ended
        requests.call_after(lambda number=number: ended.append(number))
        requests.call_after(lambda number=number: ended.append(number))
        clock.end_pause()
    assert len(ended) == 2 * pauses


def test_a_busy_event_loop_makes_a_burst_no_longer(clock):
    requests, ended = Burst(), []
    requests.call_after(lambda: ended.append(1))
    requests.call_after(lambda: ended.append(2))
    clock.now += burst._MAX_SECONDS
    clock.end_pause()
    assert ended == [1, 2]


async def test_what_waits_after_a_request_goes_on_when_no_other_follows_and_after_all_others():
    requests, order = Burst(), []

    async def seal(name):
        await requests.wait_after_end()
        order.append(name)

    async def opening(goes_on):
        await goes_on.wait()
        order.append("opened")

    seals = [asyncio.create_task(seal(name)) for name in ("first seal", "second seal")]
    await asyncio.sleep(0)
    goes_on = asyncio.Event()
    requests.call_after(goes_on.set)
    await asyncio.gather(*seals, opening(goes_on))
    assert order == ["opened", "first seal", "second seal"]


async def test_an_end_alone_waits_for_one_pause(monkeypatch):
    pauses = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda *arguments: pauses.append(arguments[0]) or call_later(*arguments))
    await Burst().wait_after_end()
    assert pauses == [burst._PAUSE]


async def test_a_wait_that_is_cancelled_ends_no_other():
    requests = Burst()
    first, second = (asyncio.create_task(requests.wait_after_end()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert first.cancelled()


async def test_another_thread_waits_for_the_same_burst():
    requests, order = Burst(), []
    requests.call_after(lambda: order.append("opened"))
    here = asyncio.get_running_loop()
    await asyncio.to_thread(lambda: asyncio.run(requests.wait_on(here)))
    assert order == ["opened"]


@pytest.mark.parametrize("is_closed", [False, True])
def test_another_thread_does_not_wait_for_a_loop_that_has_ended(is_closed):
    loop = asyncio.new_event_loop()
    if is_closed:
        loop.close()
    asyncio.run(Burst().wait_on(loop))
    loop.close()


async def test_a_thread_that_has_ended_holds_up_no_others():
    """Its loop is closed when the burst ends."""
    requests, here = Burst(), asyncio.get_running_loop()
    end, requests._check = requests._check, lambda: None  # the burst ends when the test says so

    async def leave_early():
        task = asyncio.create_task(requests.wait_on(here))
        await asyncio.sleep(0)
        task.cancel()

    await asyncio.to_thread(lambda: asyncio.run(leave_early()))
    await asyncio.sleep(0)
    (of_the_thread,) = requests._after_ends
    other = asyncio.create_task(requests.wait_after_end())
    await asyncio.sleep(0)
    requests._ends_at = 0.0
    end()
    async with asyncio.timeout(DEADLINE):
        await other
    of_the_thread()


async def test_the_first_event_does_not_wait_for_a_burst_once_there_is_a_token(monkeypatch):
    monkeypatch.setattr(burst, "_PAUSE", 2 * DEADLINE)
    async with running_service() as service, asyncio.timeout(DEADLINE):
        events = await service.events(ask())
    started, *deltas, finished = events
    assert started.HasField("started")
    assert finished.HasField("finished")
    assert [token for event in deltas for token in event.delta.token_ids] == [1, 2, 3]


async def test_the_first_event_does_not_wait_for_the_first_token():
    engine = FakeEngine()
    engine.script = stuck_after()
    async with running_service(engine=engine) as service, asyncio.timeout(DEADLINE):
        event = await service.stub.Generate(ask()).read()
    assert event.HasField("started")


async def test_captures_are_opened_together_after_the_engine_has_got_all_requests(monkeypatch):
    monkeypatch.setattr(burst, "_PAUSE", 0.5)  # each request arrives in this time, however busy the machine is
    monkeypatch.setattr(burst, "_MAX_SECONDS", DEADLINE)
    store, engine = FakeStore(), FakeEngine()
    store.takes_early_rows = True
    asked = []  # how many requests the engine had at each call to the store

    async def note(request, context):
        asked.append(len(engine.calls))
        return await FakeStore.OpenCapture(store, request, context)

    store.OpenCapture = note
    add = store_pb2_grpc.add_StoreServiceServicer_to_server
    async with (
        listening(add, store) as endpoint,
        running_service(endpoint, engine) as service,
        asyncio.timeout(DEADLINE),
    ):
        await service.events(ask(spec(capture=CAPTURE)))  # the store answers that it takes early rows
        engine.script = stuck_after()
        streams = [service.stub.Generate(ask(spec(capture=CAPTURE))) for _ in range(5)]
        for stream in streams:
            assert (await stream.read()).HasField("started")
            stream.cancel()
    assert store.batches == [1, 5]
    assert asked == [0, *[6] * 5]


async def test_a_capture_is_sealed_after_the_captures_of_requests_that_follow_are_opened(monkeypatch):
    store, order = FakeStore(), []

    async def note_open(request, context):
        order.append("open")
        return await FakeStore.OpenCapture(store, request, context)

    async def note_seal(request, context):
        order.append("seal")
        return await FakeStore.SealCapture(store, request, context)

    store.OpenCapture, store.SealCapture = note_open, note_seal
    bursts = set()

    def note(self):
        bursts.add(self)

    monkeypatch.setattr(Burst, "_note", note)  # a burst ends when the test says so
    add = store_pb2_grpc.add_StoreServiceServicer_to_server
    async with listening(add, store) as endpoint, running_service(endpoint) as service, asyncio.timeout(DEADLINE):
        for _ in range(2):
            await service.events(ask(spec(capture=CAPTURE)))
        assert order == ["open", "open"]
        (ends,) = bursts
        ends._check()
        await store.until(lambda: len(store.seals) == 2)
