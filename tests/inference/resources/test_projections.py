"""The signs that workers keep: those of running requests, within the limits."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from inference_svc.resources.projections import Projections, projection_of
from inference_svc.taps.encodings.projections import Projection
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2
from residuum.wire.rows.encodings import ENCODINGS, FULL8, RP, RP8
from tests.inference.service_support import (
    FACTS,
    LAYERS,
    FakeEngine,
    ask,
    failure_of,
    running_service,
    spec,
    stuck_after,
    three_tokens,
)

WIDTH, SIZE = 16, 8
EACH = 4 * WIDTH * SIZE
SOON, LONG = 0.05, 20.0


def projecting(seed=0, encoding=RP, reduction=capture_pb2.REDUCTION_NONE):
    options = capture_pb2.EncodingOptions(dimensions=SIZE, seed=seed) if encoding in (RP, RP8) else None
    return capture_pb2.CaptureSpec(layers=LAYERS, encoding=encoding, encoding_options=options, reduction=reduction)


class Workers:
    """Replaces the engine: records the last list of projections to keep, and answers as scripted."""

    def __init__(self):
        self.kept = []
        self.ready = asyncio.Event()
        self.ready.set()
        self.error = None
        self.bad = {}

    async def keep(self, projections):
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        self.kept = list(projections)
        return [self.bad.get(item, self.ready.is_set()) for item in self.kept]


def made(workers, room=2, wait=LONG):
    return Projections(workers.keep, WIDTH, wait, max_bytes=room * EACH, least_bytes=0)


def numbered(seed):
    return Projection(seed, SIZE, False)


def test_which_captures_project():
    assert projection_of(None) is None
    assert projection_of(projecting(encoding=FULL8)) is None
    assert projection_of(projecting(3)) == Projection(3, SIZE, computed=False)
    assert projection_of(projecting(3, RP8, capture_pb2.REDUCTION_LAST)) == Projection(3, SIZE, computed=False)
    assert projection_of(projecting(3, RP8, capture_pb2.REDUCTION_MEAN)) == Projection(3, SIZE, computed=True)


async def test_signs_are_ready_in_the_context_and_signs_in_use_are_kept():
    workers = Workers()
    workers.ready.clear()
    projections = made(workers)
    async with AsyncExitStack() as stack:
        entering = asyncio.create_task(stack.enter_async_context(projections.held(numbered(1))))
        while not workers.kept:  # noqa: ASYNC110 - nothing else tells of it
            await asyncio.sleep(0)
        assert not entering.done()
        workers.ready.set()
        await asyncio.wait_for(entering, LONG)
        for seed in (2, 3, 4):  # one after the other: each replaces the idle one before
            async with projections.held(numbered(seed)):
                assert set(workers.kept) == {numbered(1), numbered(seed)}
    async with projections.held(numbered(4)):  # still kept: the workers are not called
        assert set(workers.kept) == {numbered(1), numbered(4)}


async def test_requests_without_room_wait_for_their_turn():
    workers = Workers()
    projections, order = made(workers), []

    async def run(seed, gate):
        async with projections.held(numbered(seed)):
            order.append(seed)
            await gate.wait()

    gates = {seed: asyncio.Event() for seed in range(5)}
    tasks = {}
    for seed in range(5):
        tasks[seed] = asyncio.create_task(run(seed, gates[seed]))
        while len(order) < min(seed + 1, 2):  # noqa: ASYNC110 - nothing else tells of it
            await asyncio.sleep(0)
    again = asyncio.create_task(run(1, gates[1]))  # needs no room
    while order.count(1) < 2:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    tasks[2].cancel()
    gates[0].set()
    await tasks[0]
    while 3 not in order:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    assert order == [0, 1, 1, 3]
    for gate in gates.values():
        gate.set()
    await asyncio.gather(*tasks.values(), again, return_exceptions=True)
    assert order == [0, 1, 1, 3, 4]
    assert len(workers.kept) <= 2


async def test_waiting_ends_with_a_failure_and_an_oversized_projection_runs_alone():
    workers = Workers()
    projections = made(workers, room=1, wait=SOON)
    large = Projection(9, 3 * SIZE, computed=False)
    async with projections.held(large):
        with pytest.raises(Failure, match="other random projections") as raised:
            async with projections.held(numbered(1)):
                pass
        assert raised.value.reason == Reason.ERROR_REASON_LIMIT_REACHED
        assert raised.value.metadata == {"limit": "projections"}
    async with projections.held(numbered(1)):
        assert workers.kept == [numbered(1)]


async def test_a_request_cancelled_at_its_timeout_releases_its_room():
    workers = Workers()
    projections = made(workers, room=1)

    async def hold(seed):
        async with projections.held(numbered(seed)):
            pass

    async with projections.held(numbered(1)):
        waiting = asyncio.create_task(hold(2))
        while not projections._turns:  # noqa: ASYNC110 - nothing else tells of it
            await asyncio.sleep(0)
        _, turn = projections._turns[0]
        turn.set_exception(projections._full())
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    for seed in (2, 3):  # a leak would keep one of them held for ever
        await asyncio.wait_for(hold(seed), LONG)
    assert workers.kept == [numbered(3)]


async def test_the_number_of_kept_projections_is_limited():
    workers = Workers()
    projections = Projections(workers.keep, WIDTH, LONG)
    for seed in range(300):
        async with projections.held(numbered(seed)):
            pass
    assert len(workers.kept) == 256
    assert workers.kept[-1] == numbered(299)


async def test_a_failure_of_the_engine_is_reported_and_frees_everything():
    workers = Workers()
    projections = made(workers)
    workers.error = Failure(Reason.ERROR_REASON_ENGINE_DEAD, "scripted")
    for _ in range(2):
        with pytest.raises(Failure, match="scripted"):
            async with projections.held(numbered(1)):
                pass
    workers.error = None
    async with projections.held(numbered(1)):
        assert workers.kept == [numbered(1)]


async def test_signs_that_cannot_be_made_fail_their_requests_and_are_retried():
    workers = Workers()
    projections = made(workers)
    workers.bad[numbered(1)] = "OutOfMemoryError"
    async with projections.held(numbered(2)):
        with pytest.raises(Failure, match=r"seed 1, 8 dimensions.*OutOfMemoryError.*fewer dimensions"):
            async with projections.held(numbered(1)):
                pass
        workers.bad.clear()
        async with projections.held(numbered(1)):
            assert set(workers.kept) == {numbered(1), numbered(2)}


async def test_an_error_that_workers_tell_the_task_of_another_projection_is_not_lost():
    class Once(Workers):
        """Says only once that signs cannot be made, as workers do."""

        async def keep(self, projections):
            answers = await super().keep(projections)
            self.bad.clear()
            asked.set()
            return answers

    workers, asked = Once(), asyncio.Event()
    workers.ready.clear()
    projections = made(workers)

    async def hold(projection):
        async with projections.held(projection):
            pass

    first = asyncio.create_task(hold(numbered(1)))
    await asked.wait()
    workers.bad[numbered(1)] = "OutOfMemoryError"
    second = asyncio.create_task(hold(numbered(2)))  # asks next
    with pytest.raises(Failure, match=r"seed 1, .*OutOfMemoryError"):
        await asyncio.wait_for(first, LONG)
    workers.ready.set()
    await asyncio.wait_for(second, LONG)


@pytest.fixture
def engine():
    engine = FakeEngine()
    engine.facts = replace(FACTS, hidden_size=WIDTH, encodings=tuple(ENCODINGS.values()))
    return engine


async def test_a_request_goes_to_the_engine_when_its_signs_are_ready(store, engine):
    async with running_service(store.endpoint, engine) as service:
        service.engine.signs_ready.clear()
        running = asyncio.create_task(service.events(ask(spec("r", projecting(7)))))
        await service.engine.until(lambda: len(service.engine.signs) >= 2)
        assert not service.engine.calls
        assert not store.opened
        service.engine.signs_ready.set()
        assert (await running)[-1].HasField("finished")
        assert service.engine.signs[0] == [numbered(7)]
        asked = len(service.engine.signs)
        await service.events(ask(spec("again", projecting(7))))
        await service.events(ask(spec("plain", projecting(encoding=FULL8))))
        assert len(service.engine.signs) == asked


async def test_a_request_that_waits_for_signs_can_be_aborted(store, engine):
    async with running_service(store.endpoint, engine) as service:
        service.engine.script = stuck_after()
        service.engine.signs_ready.clear()
        running = asyncio.create_task(service.events(ask(spec("r", projecting(7)))))
        await service.engine.until(lambda: service.engine.signs)
        await service.abort("r")
        assert (await failure_of(running)).reason == Reason.ERROR_REASON_ABORTED
        service.engine.signs_ready.set()
        service.engine.script = three_tokens
        assert (await service.events(ask(spec("other", projecting(7)))))[-1].HasField("finished")
