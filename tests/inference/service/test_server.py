"""The start of the service: what stops it, and that nothing of it is left then."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest

import residuum
from inference_svc import server
from inference_svc.engine.streams import Delta
from inference_svc.server import InferenceServer
from inference_svc.settings import InferenceSettings
from residuum.rpc.channels import open_aio_channel
from residuum.v1 import capture_pb2, inference_pb2_grpc, store_pb2_grpc
from tests.inference.service_support import CAPTURE, DEADLINE, FACTS, FakeEngine, FakeStore, ask, listening, spec, until

RULE = '[[rule]]\nname = "toxic"\nprobe = "one.safetensors"\nabove = 0.7\n'


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a service with a file of rules, and return the engines that it started."""
    engines = []

    async def started(settings, folder):
        engine = FakeEngine()
        engine.facts = replace(FACTS, probe_sites=(capture_pb2.SITE_RESID_POST,), encodings=())
        engine.was_shut_down = False
        engine.shutdown = lambda: setattr(engine, "was_shut_down", True)
        engines.append(engine)
        return engine

    monkeypatch.setattr(server.Engine, "start", started)

    def run(rules):
        path = None
        if rules is not None:
            path = tmp_path / "rules.toml"
            path.write_text(rules)
        settings = InferenceSettings(model="tiny", listen="127.0.0.1:0", rules_file=path)

        async def serve():
            async with asyncio.timeout(DEADLINE):
                await InferenceServer(settings, str(tmp_path)).run()

        asyncio.run(serve())

    run.engines = engines
    return run


def test_a_bad_file_of_rules_stops_the_service_before_the_model_is_loaded(start):
    with pytest.raises(SystemExit, match=r"rules: .* no field rule\.0\.for_token\. Known here: .*for_tokens"):
        start(RULE + "for_token = 3\n")
    with pytest.raises(SystemExit, match=r"the rule 'toxic': there is no file .*one\.safetensors"):
        start(RULE)
    assert not start.engines


def test_a_port_file_that_cannot_be_written_stops_the_service_before_the_model_is_loaded(start, tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUUM_PORT_FILE", str(tmp_path / "missing/port"))
    with pytest.raises(SystemExit, match=r"port-file: it cannot be written: .*missing/port"):
        start(None)
    assert not start.engines


def test_the_service_has_the_rules_of_the_file_of_its_settings_or_none(start, tmp_path, monkeypatch):
    residuum.Probe(np.ones(FACTS.hidden_size), layer=1).save(tmp_path / "one.safetensors")
    assembled = []
    assemble = InferenceServer._assemble

    def note(self, engine, access):
        assembled.append(assemble(self, engine, access).admission.operator_rules.actions)
        raise SystemExit("that is enough")

    monkeypatch.setattr(InferenceServer, "_assemble", note)
    for rules in (RULE, None):
        with pytest.raises(SystemExit, match="enough"):
            start(rules)
    assert assembled == [{"operator:toxic": "flag"}, {}]


def test_rules_that_do_not_fit_the_model_stop_the_service_and_its_engine(start, tmp_path):
    residuum.Probe(np.ones(FACTS.hidden_size), layer=77).save(tmp_path / "one.safetensors")
    with pytest.raises(SystemExit, match=r"rules: .*the rule 'toxic': There is no layer 77"):
        start(RULE)
    (engine,) = start.engines
    assert engine.was_shut_down, "its processes would keep that of the service alive"


@pytest.fixture
async def serving(tmp_path, monkeypatch):
    """Start a service on a fake engine and a fake store. Yields the engine, the store, a stub, and how to stop it."""
    engine, store, port_file = FakeEngine(), FakeStore(), tmp_path / "port"
    engine.is_dead, engine.shutdown, engine.drain = False, lambda: None, AsyncMock(return_value=True)
    monkeypatch.setattr(server.Engine, "start", AsyncMock(return_value=engine))
    monkeypatch.setattr(server, "self_test_replicas", AsyncMock())
    monkeypatch.setattr(server, "_CALL_SECONDS", 0.2)
    shippers = SimpleNamespace(start=AsyncMock(), stop=AsyncMock(), status=list)
    monkeypatch.setattr(server.ShipperSupervisor, "from_settings", lambda *_: shippers)
    async with listening(store_pb2_grpc.add_StoreServiceServicer_to_server, store) as endpoint:
        settings = InferenceSettings(
            model="tiny", listen="127.0.0.1:0", port_file=str(port_file), grace_seconds=1, store=[endpoint]
        )
        service = InferenceServer(settings, str(tmp_path))
        running = asyncio.create_task(service.run())
        await until(lambda: service.engine is not None)

        async def stop():
            service._stopping.set()
            await asyncio.wait_for(running, DEADLINE)

        async with open_aio_channel(f"127.0.0.1:{port_file.read_text().strip()}") as channel:
            yield engine, store, inference_pb2_grpc.InferenceServiceStub(channel), stop


async def test_a_request_whose_prompt_is_being_read_may_finish_within_the_grace(serving):
    engine, _, stub, stop = serving
    reads, may_go_on = asyncio.Event(), asyncio.Event()

    async def tokenize(request):
        reads.set()
        await may_go_on.wait()
        return [5, 6, 7]

    engine.tokenize = tokenize
    call = stub.Generate(ask())
    await reads.wait()
    stopping = asyncio.create_task(stop())
    await asyncio.sleep(0.5)  # longer than gRPC waits for calls
    may_go_on.set()
    assert [event async for event in call][-1].HasField("finished")
    await stopping


async def test_the_captures_of_callers_that_do_not_read_are_sealed_before_the_service_ends(serving):
    engine, store, stub, stop = serving

    async def endless(call):
        try:
            while True:
                await asyncio.sleep(0)
                yield Delta(text="x" * 20_000, token_ids=[1])
        finally:
            await asyncio.sleep(0.2)  # the engine takes a while to stop a request

    engine.script = endless
    calls = [stub.Generate(ask(spec("", CAPTURE), max_tokens=60)) for _ in range(8)]
    for call in calls:
        await call.read()
    await asyncio.sleep(0.5)  # until the service cannot send more
    await stop()
    assert [seal.outcome for seal in store.seals] == [capture_pb2.CAPTURE_STATE_ABORTED] * len(calls)
