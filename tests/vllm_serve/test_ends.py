"""How the front end inside vLLM's API server ends captures, and what a worker of it leaves behind."""

from __future__ import annotations

import tempfile
from types import SimpleNamespace

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from inference_svc.engine.tap_settings import TapSettings
from inference_svc.requests.registry import RequestRegistry
from inference_svc.requests.specs import ResolvedSpec
from inference_svc.taps.vllm.worker import SETTINGS_VARIABLE
from inference_svc.vllm_serve.front import FrontEnd
from inference_svc.vllm_serve.outputs import Sequences
from inference_svc.vllm_serve.worker import ServedWorker
from residuum.v1 import capture_pb2

CAPTURE = capture_pb2.CaptureSpec()


def a_step(token, finish_reason=None):
    completion = CompletionOutput(0, "x", [token], None, None, finish_reason=finish_reason)
    return RequestOutput("cmpl-1", None, [9, 9], None, [completion], finish_reason is not None)


async def seal_of(steps, error):
    """Let a request end by an error after some steps; return what the store is told."""
    seals = []
    front = object.__new__(FrontEnd)
    front._delivery = SimpleNamespace(seal=seals.append)
    front._engine = SimpleNamespace(is_dead=False)
    running = RequestRegistry(0.0, 0).start_inline(ResolvedSpec("r", CAPTURE, None))
    sequences = Sequences(1, RequestOutputKind.DELTA)
    for step in steps:
        sequences.add(0, step)
    with pytest.raises(RuntimeError, match="scripted"):
        async with front._sealed(running, sequences):
            raise error
    (seal,) = seals
    return seal


async def test_what_fails_when_all_was_generated_is_not_in_the_capture():
    seal = await seal_of([a_step(1), a_step(2, "stop")], RuntimeError("scripted"))
    assert seal.outcome == capture_pb2.CAPTURE_STATE_COMPLETE
    assert (seal.incomplete_reason, seal.incomplete_detail) == (capture_pb2.INCOMPLETE_REASON_UNSPECIFIED, "")
    assert list(seal.sequences[0].generated_token_ids) == [1, 2]


async def test_what_fails_before_that_is():
    seal = await seal_of([a_step(1)], RuntimeError("scripted"))
    assert seal.outcome == capture_pb2.CAPTURE_STATE_INCOMPLETE
    assert seal.incomplete_reason == capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED


def test_a_worker_that_cannot_load_its_model_leaves_no_folder(tmp_path, monkeypatch):
    class Broken:
        def load_model(self):
            assert list(tmp_path.iterdir())
            raise OSError("scripted")

    monkeypatch.setenv(SETTINGS_VARIABLE, "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    worker = object.__new__(type("Worker", (ServedWorker, Broken), {}))
    worker._tap_settings = TapSettings()
    with pytest.raises(OSError, match="scripted"):
        worker.load_model()
    assert not list(tmp_path.iterdir())
