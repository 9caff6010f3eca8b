import asyncio
import inspect
from collections import defaultdict

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from bench.service import staged_host
from bench.service.stages import STAGES, show, summary
from inference_svc.session.capture_session import CaptureSession
from inference_svc.session.request_runner import RequestRunner
from store_svc.server import Store
from store_svc.settings import StoreSettings
from tests.inference.service_support import CAPTURE, ask, running_service, spec


@pytest.fixture
def noted(monkeypatch):
    monkeypatch.setattr(staged_host, "stages", defaultdict(dict))
    monkeypatch.setattr(RequestRunner, "run", staged_host.noting_messages(RequestRunner.run))
    monkeypatch.setattr(CaptureSession, "opened", staged_host.noting_opening(CaptureSession.opened))
    return staged_host.stages


async def test_the_service_notes_its_stages_in_their_order(noted, tmp_path):
    store = await asyncio.to_thread(Store, StoreSettings(listen="127.0.0.1:0", path=tmp_path / "store"))
    try:
        async with running_service(f"127.0.0.1:{store.port}") as service:
            for request in (spec("captured", CAPTURE), spec("plain")):
                await service.events(ask(request))
    finally:
        await asyncio.to_thread(store.stop)
    own = [stage for stage in STAGES if stage in noted["captured"]]
    assert own == ["arrives", "opening", "opened", "accepted", "first message"]
    assert own == sorted(own, key=noted["captured"].__getitem__)
    assert list(noted["plain"]) == ["arrives", "accepted", "first message"]


async def test_the_engines_first_output_is_noted_under_the_requests_id(noted):
    async def generate(llm, prompt, sampling, request_id, *, lora_request=None):
        for output in "ab":
            await asyncio.sleep(0.01)
            yield output

    _, *names = inspect.signature(AsyncLLM.generate).parameters
    assert names[:3] == ["prompt", "sampling_params", "request_id"]
    outputs = staged_host.noting_outputs(generate)(None, "prompt", "sampling", "r-1@5fe6#0", lora_request=None)
    assert [output async for output in outputs] == ["a", "b"]
    assert noted["r-1"]["to the engine"] < noted["r-1"]["first output"]


def test_a_summary_has_the_quartiles_of_each_stage_of_a_way():
    of_client = {f"plain-0-{at}": {"starts": 10.0 + at, "client has the token": 10.05 + at} for at in range(3)}
    of_client["captures-0-0"] = {"starts": 0.0, "client has the token": 9.0}
    of_service = {f"plain-0-{at}": {"arrives": 10.0 + at + 0.001 * (at + 1)} for at in range(3)}
    found = summary("plain", of_client, of_service)
    assert found == {"arrives": [1.5, 2.0, 2.5], "client has the token": [50.0, 50.0, 50.0]}
    lines = list(show({"parameters": {"streams": 32}, "ways": {"plain": found, "captures": {}}}))
    assert "32 streams" in lines[0]
    assert "2.0 (1.5 to 2.5)" in lines[1]
