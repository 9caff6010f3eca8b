"""The start of the service: what stops it, and that nothing of it is left then."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

import residuum
from inference_svc import server
from inference_svc.server import InferenceServer
from inference_svc.settings import InferenceSettings
from residuum.v1 import capture_pb2
from tests.inference.service_support import DEADLINE, FACTS, FakeEngine

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
