"""How the front end stops with its engine, as vLLM stops it: on the event loop, or on another thread meanwhile."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from inference_svc.requests.registry import RequestRegistry
from inference_svc.session.capture_session import CaptureSession
from inference_svc.session.interruption import unless_interrupted
from inference_svc.tap_settings import TapSettings
from inference_svc.vllm_serve import front as front_module
from inference_svc.vllm_serve import plugin
from inference_svc.vllm_serve.delivery import Delivery
from inference_svc.vllm_serve.front import FrontEnd
from inference_svc.vllm_serve.requests.outputs import stopped_failure
from residuum.rpc.errors import Failure
from residuum.v1 import capture_pb2, store_pb2_grpc
from tests.inference.service_support import CAPTURE, FACTS, FakeStore, listening
from tests.inference.spec_support import spec_of


class Engine:
    """An engine whose `shutdown` waits for its requests, as vLLM's does with --shutdown-timeout."""

    errored = False

    def __init__(self, vllm_config):
        self.stopping = threading.Event()
        self.drained = threading.Event()

    async def generate(self, prompt, sampling_params, request_id):
        """Generate nothing."""
        yield

    def shutdown(self, timeout=None):
        self.stopping.set()
        self.drained.wait(timeout)


class Front(FrontEnd):
    """The front end's stop, without an engine to describe itself."""

    def __init__(self, delivery):
        self._delivery = delivery
        self._registry = RequestRegistry(0.0, 0)
        self._startup = SimpleNamespace(clean_up=lambda: None)
        self._loop = asyncio.get_running_loop()
        self.is_stopping = False
        self.closed = threading.Event()

    def close(self):
        super().close()
        self.closed.set()


@pytest.fixture
async def store():
    store = FakeStore()
    store.takes_early_rows = True
    return store


@pytest.fixture
async def llm(store, monkeypatch):
    async with listening(store_pb2_grpc.add_StoreServiceServicer_to_server, store) as endpoint:
        delivery = Delivery(TapSettings(store=endpoint))
        front = Front(delivery)
        monkeypatch.setattr(plugin, "_front_end_factory", lambda config: lambda *arguments: front)

        class Wrapped(Engine):
            __init__, generate, shutdown = Engine.__init__, Engine.generate, Engine.shutdown

        plugin._wrap(Wrapped)
        yield Wrapped(None)


async def run(llm, ends, *, can_be_aborted=False):
    """Run a request that captures, until `ends`."""
    front = getattr(llm, plugin._FRONT)
    running = front._registry.start_inline(spec_of("r", CAPTURE))
    try:
        async with CaptureSession(FACTS, running, [1], 1, lambda: front._delivery) as session:
            await session.opened()
            if can_be_aborted:
                await unless_interrupted(running.aborted, stopped_failure, ends.wait())
            await ends.wait()
            session.sequences[0].add([5], "stop")
    finally:
        front._registry.finish(running, has_begun=True)


async def test_requests_that_end_while_the_engine_stops_are_sealed(llm, store):
    ends = asyncio.Event()
    request = asyncio.create_task(run(llm, ends))
    await store.until(lambda: store.opened)
    stop = asyncio.create_task(asyncio.to_thread(llm.shutdown, timeout=30))
    await asyncio.to_thread(llm.stopping.wait, 30)
    llm.drained.set()  # the engine has given all tokens; the request still reads them
    await stop
    await asyncio.sleep(0.05)
    ends.set()
    await request
    assert await asyncio.to_thread(getattr(llm, plugin._FRONT).closed.wait, 30)
    assert [(seal.capture_id, seal.outcome) for seal in store.seals] == [("r", capture_pb2.CAPTURE_STATE_COMPLETE)]
    llm.shutdown()  # vLLM calls it again when the object is deleted


async def test_requests_that_vllm_cancels_after_its_engine_has_stopped_are_sealed(llm, store):
    request = asyncio.create_task(run(llm, asyncio.Event()))
    await store.until(lambda: store.opened)
    llm.drained.set()
    await asyncio.to_thread(llm.shutdown)
    request.cancel()
    assert await asyncio.to_thread(getattr(llm, plugin._FRONT).closed.wait, 30)
    assert [(seal.capture_id, seal.outcome) for seal in store.seals] == [("r", capture_pb2.CAPTURE_STATE_ABORTED)]


async def test_requests_of_an_engine_that_does_not_wait_for_them_are_aborted_and_sealed(llm, store, monkeypatch):
    monkeypatch.setattr(front_module, "_END_SECONDS", 0.1)
    request = asyncio.create_task(run(llm, asyncio.Event(), can_be_aborted=True))
    await store.until(lambda: store.opened)
    llm.drained.set()
    await asyncio.to_thread(llm.shutdown)
    with pytest.raises(Failure, match="The server stopped"):
        await request
    assert await asyncio.to_thread(getattr(llm, plugin._FRONT).closed.wait, 30)
    assert [(seal.capture_id, seal.outcome) for seal in store.seals] == [("r", capture_pb2.CAPTURE_STATE_ABORTED)]


async def test_a_request_that_does_not_end_is_waited_for_a_limited_time_and_logged(llm, store, monkeypatch, capsys):
    monkeypatch.setattr(front_module, "_END_SECONDS", 0.1)
    monkeypatch.setattr(front_module, "_ABORT_SECONDS", 0.1)
    request = asyncio.create_task(run(llm, asyncio.Event()))
    await store.until(lambda: store.opened)
    llm.drained.set()
    await asyncio.to_thread(llm.shutdown)
    assert await asyncio.to_thread(getattr(llm, plugin._FRONT).closed.wait, 30)
    assert "did not end before the server stopped" in "".join(capsys.readouterr())
    request.cancel()
    await asyncio.wait([request])
    assert not store.seals


async def test_on_the_event_loop_seals_leave_before_the_engine_stops(llm, store):
    ends = asyncio.Event()
    request = asyncio.create_task(run(llm, ends))
    await store.until(lambda: store.opened)
    ends.set()
    await request
    llm.drained.set()
    await store.until(lambda: store.seals)
    llm.shutdown()  # it keeps the event loop from running, so it must not wait for requests on it
    assert llm.stopping.is_set()
    assert getattr(llm, plugin._FRONT).closed.is_set()
