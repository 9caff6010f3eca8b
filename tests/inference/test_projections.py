"""Signs of random projections: made before a request goes to the engine, beside its steps, and kept within bounds."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack

import numpy as np
import pytest
import torch

from inference_svc.projections import Projection, Projections, projection_of
from inference_svc.taps.encodings import signs as signs_module
from inference_svc.taps.encodings.signs import SignCache, Signs
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2
from residuum.wire.encodings import FULL8, RP, RP8
from residuum.wire.projection import projection_signs
from tests.inference.service_support import LAYERS, ask, failure_of, running_service, spec, stuck_after, three_tokens
from tests.inference.taps_support import CPU
from tests.inference.test_encoding_sink import Engine, RequestPlan, capture, encoding_of

WIDTH, SIZE = 16, 8
EACH = 4 * WIDTH * SIZE
SOON, LONG = 0.05, 20.0


def projecting(seed=0, encoding=RP, reduction=capture_pb2.REDUCTION_NONE):
    options = capture_pb2.EncodingOptions(dimensions=SIZE, seed=seed) if encoding in (RP, RP8) else None
    return capture_pb2.CaptureSpec(layers=LAYERS, encoding=encoding, encoding_options=options, reduction=reduction)


class Workers:
    """Stands in for the engine: what it was told to keep last, and what it says of it."""

    def __init__(self):
        self.kept = []
        self.ready = asyncio.Event()
        self.ready.set()
        self.error = None

    async def keep(self, projections):
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        self.kept = list(projections)
        return [self.ready.is_set()] * len(self.kept)


def made(workers, room=2, wait=LONG):
    return Projections(workers.keep, WIDTH, wait, max_bytes=room * EACH)


def numbered(seed):
    return Projection(seed, SIZE, False)


def test_which_captures_project():
    assert projection_of(None) is None
    assert projection_of(projecting(encoding=FULL8)) is None
    assert projection_of(projecting(3)) == Projection(3, SIZE, computed=False)
    assert projection_of(projecting(3, RP8, capture_pb2.REDUCTION_LAST)) == Projection(3, SIZE, computed=False)
    assert projection_of(projecting(3, RP8, capture_pb2.REDUCTION_MEAN)) == Projection(3, SIZE, computed=True)


async def test_the_signs_are_there_when_the_context_begins_and_those_of_running_requests_stay():
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
        for seed in (2, 3, 4):  # one after the other: each takes the place of the idle one before
            async with projections.held(numbered(seed)):
                assert set(workers.kept) == {numbered(1), numbered(seed)}
    async with projections.held(numbered(4)):  # kept while there was room: nothing is asked for
        assert set(workers.kept) == {numbered(1), numbered(4)}


async def test_requests_beyond_the_room_take_their_turns():
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
    again = asyncio.create_task(run(1, gates[1]))  # takes no room
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


async def test_waiting_ends_with_a_failure_and_one_that_is_larger_than_all_room_goes_alone():
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


async def test_a_failure_of_the_engine_is_told_and_leaves_no_trace():
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


async def test_a_request_goes_to_the_engine_when_its_signs_are_there(store):
    async with running_service(store.endpoint) as service:
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


async def test_a_request_that_waits_for_signs_can_be_aborted(store):
    async with running_service(store.endpoint) as service:
        service.engine.script = stuck_after()
        service.engine.signs_ready.clear()
        running = asyncio.create_task(service.events(ask(spec("r", projecting(7)))))
        await service.engine.until(lambda: service.engine.signs)
        await service.abort("r")
        assert (await failure_of(running)).reason == Reason.ERROR_REASON_ABORTED
        service.engine.signs_ready.set()
        service.engine.script = three_tokens
        assert (await service.events(ask(spec("other", projecting(7)))))[-1].HasField("finished")


@pytest.fixture
def makers(monkeypatch):
    """The names of the threads that make signs, one for each matrix."""
    names = []

    def watched(*arguments):
        names.append(threading.current_thread().name)
        return projection_signs(*arguments)

    monkeypatch.setattr(signs_module, "projection_signs", watched)
    return names


def wait_for(cache_keep):
    """Ask again until all is there, as the service does."""
    while not all(cache_keep()):
        threading.Event().wait(0.001)


@pytest.mark.parametrize("reduction", [capture_pb2.REDUCTION_NONE, capture_pb2.REDUCTION_MEAN])
@pytest.mark.parametrize("name", ["rp", "rp8"])
def test_no_step_makes_signs(makers, name, reduction):
    engine = Engine()
    encoding = encoding_of(name)
    plan = RequestPlan(20, capture(encoding, reduction))
    wanted = [(encoding.seed, encoding.dimensions, plan.capture.is_computed)]
    wait_for(lambda: engine.worker.sink.keep_signs(wanted))
    assert makers == ["residuum-signs"]
    engine.run(plan, 40)
    assert makers == ["residuum-signs"]
    assert engine.stored()


def test_signs_stay_until_the_last_block_of_their_request_has_left(makers):
    """The service lets them go when the request has ended; the worker hears of that end a step later."""
    engine = Engine()
    encoding = encoding_of("rp")
    plan = RequestPlan(20, capture(encoding))
    wait_for(lambda: engine.worker.sink.keep_signs([(encoding.seed, encoding.dimensions, False)]))
    engine.compute(("a", 0, 20), admitted=[("a", plan)])
    engine.compute(("a", 20, 1))
    engine.worker.sink._signs._max_bytes = 0
    wait_for(lambda: engine.worker.sink.keep_signs([(99, encoding.dimensions, False)]))
    assert engine.worker.sink._signs.nbytes == 4 * 24 * encoding.dimensions
    engine.compute(finished=["a"])
    assert makers == ["residuum-signs"] * 2
    assert max(position for _, _, position in engine.stored()) == 20


def test_what_is_kept_does_not_go_for_others():
    cache = SignCache(WIDTH, CPU, max_bytes=2 * EACH)
    kept = [Signs(seed, SIZE, torch.float32) for seed in range(3)]
    wait_for(lambda: cache.keep(kept))
    held = [cache.get(*key) for key in kept]
    np.testing.assert_array_equal(held[1].numpy(), projection_signs(1, WIDTH, SIZE))
    for seed in range(10, 20):
        cache.get(seed, SIZE, torch.float32)
    assert all(cache.get(*key) is matrix for key, matrix in zip(kept, held, strict=True))
    assert cache.nbytes == 5 * EACH
    assert cache.keep([]) == []
    assert cache.nbytes == 2 * EACH


def test_signs_that_nobody_wants_any_more_are_not_made(makers, monkeypatch):
    began, go_on = threading.Event(), threading.Event()

    def slow(*arguments):
        began.set()
        assert go_on.wait(LONG)
        makers.append(arguments[0])
        return projection_signs(*arguments)

    monkeypatch.setattr(signs_module, "projection_signs", slow)
    cache = SignCache(WIDTH, CPU)
    keys = [Signs(seed, SIZE, torch.float32) for seed in range(100)]
    assert cache.keep(keys) == [False] * 100
    assert began.wait(LONG)
    cache.keep(keys[-1:])
    go_on.set()
    wait_for(lambda: cache.keep(keys[-1:]))
    assert makers == [0, 99]


def test_a_matrix_that_cannot_be_made_is_told_and_tried_again(monkeypatch):
    def fail(*arguments):
        raise MemoryError("scripted")

    cache = SignCache(WIDTH, CPU)
    keys = [Signs(1, SIZE, torch.float32)]
    with monkeypatch.context() as patch:
        patch.setattr(signs_module, "projection_signs", fail)
        with pytest.raises(MemoryError, match="scripted"):
            wait_for(lambda: cache.keep(keys))
    wait_for(lambda: cache.keep(keys))
    assert cache.nbytes == EACH
