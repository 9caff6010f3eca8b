"""The front end in vLLM's API server seals captures with the right outcome, and a failed worker removes its folder."""

from __future__ import annotations

import tempfile

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from inference_svc.requests.registry import RequestRegistry
from inference_svc.session.capture_session import CaptureSession
from inference_svc.tap_settings import TapSettings
from inference_svc.taps.vllm.worker import SETTINGS_VARIABLE
from inference_svc.vllm_serve.requests.outputs import CallerOutputs
from inference_svc.vllm_serve.worker import ServedWorker
from residuum.v1 import capture_pb2
from tests.inference.service_support import FACTS
from tests.inference.spec_support import spec_of

CAPTURE = capture_pb2.CaptureSpec()


def a_step(token, finish_reason=None):
    completion = CompletionOutput(0, "x", [token], None, None, finish_reason=finish_reason)
    return RequestOutput("cmpl-1", None, [9, 9], None, [completion], finish_reason is not None)


class Store:
    def __init__(self):
        self.seals = []

    def takes_early_rows(self, capture_id, *, is_new_id, if_exists):
        return False

    async def open(self, description, *, is_new_id, if_exists, on_queued):
        pass

    def seal(self, request, complete):
        self.seals.append(request)


async def seal_of(steps, error):
    """Let a request fail after some steps; return the seal that the store gets."""
    store = Store()
    running = RequestRegistry(0.0, 0).start_inline(spec_of("r", CAPTURE))
    session = CaptureSession(FACTS, running, [9, 9], 1, lambda: store)
    outputs = CallerOutputs(session.sequences, RequestOutputKind.DELTA)

    async def run():
        async with session:
            for step in steps:
                outputs.add(0, step)
            raise error

    with pytest.raises(RuntimeError, match="scripted"):
        await run()
    (seal,) = store.seals
    return seal


async def test_a_failure_after_the_last_token_leaves_the_capture_complete():
    seal = await seal_of([a_step(1), a_step(2, "stop")], RuntimeError("scripted"))
    assert seal.outcome == capture_pb2.CAPTURE_STATE_COMPLETE
    assert (seal.incomplete_reason, seal.incomplete_detail) == (capture_pb2.INCOMPLETE_REASON_UNSPECIFIED, "")
    assert list(seal.sequences[0].generated_token_ids) == [1, 2]


async def test_a_failure_before_the_last_token_makes_the_capture_incomplete():
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
    worker._tap_settings, worker._num_stages = TapSettings(), 1
    with pytest.raises(OSError, match="scripted"):
        worker.load_model()
    assert not list(tmp_path.iterdir())
