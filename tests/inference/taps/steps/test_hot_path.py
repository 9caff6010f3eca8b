"""The cost of a step on the host: it must not grow with the layers, and must stay small for each request.

The code under test is the GPU's, with its tables in host memory. On a machine with a GPU, one more test makes CUDA
raise an error for every call that waits for the device.
"""

from __future__ import annotations

import sys
from collections import Counter
from unittest import mock

import pytest
import structlog
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.host.loop import Captures, DecodeLoop, Device, Steering
from inference_svc.taps.gpu.tap import Stages

FEW, MANY = 4, 64
LAYERS, MANY_LAYERS = 4, 400
WARMUP_STEPS = 20
"""After this many steps, every staging buffer has been used."""
KINDS = [
    pytest.param(Captures.ALL, Steering.NONE, id="captured"),
    pytest.param(Captures.REPLY, Steering.NONE, id="the reply captured"),
    pytest.param(Captures.NONE, Steering.SHARED, id="steered"),
    pytest.param(Captures.NONE, Steering.REQUEST, id="steered each by its own vector"),
    pytest.param(Captures.ALL, Steering.SHARED, id="captured and steered"),
    pytest.param(Captures.ALL, Steering.REQUEST, id="captured and steered each by its own vector"),
]


def decoding(requests=FEW, layers=LAYERS, *, captures=Captures.ALL, steering=Steering.NONE, device=Device.HOST):
    """A steady batch of requests."""
    loop = DecodeLoop(requests, layers, device=device, captures=captures, steering=steering)
    for _ in range(WARMUP_STEPS):
        loop.step()
    return loop


class Dispatched(TorchDispatchMode):
    """Counts calls that reach torch: every operation, and so every new tensor."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket] += 1
        return func(*args, **kwargs or {})


def dispatched(loop):
    with Dispatched() as seen:
        loop.step()
    return seen


class Traced:
    """Counts the executed lines of the service's own code, as a debugger would see them."""

    def __init__(self):
        self.lines = 0

    def __enter__(self):
        self._previous = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *exc):
        sys.settrace(self._previous)

    def _enter(self, frame, event, argument):
        return self._line if "inference_svc" in frame.f_code.co_filename else None

    def _line(self, frame, event, argument):
        self.lines += event == "line"
        return self._line


def lines(loop):
    with Traced() as traced:
        loop.step()
    return traced.lines


@pytest.mark.parametrize(("captures", "steering"), KINDS)
def test_no_python_runs_for_each_layer(captures, steering):
    few, many = (decoding(layers=layers, captures=captures, steering=steering) for layers in (LAYERS, MANY_LAYERS))
    assert 0 < lines(few) == lines(many)


@pytest.mark.parametrize(("captures", "steering"), KINDS)
def test_a_request_costs_a_few_lines_of_python(captures, steering):
    few, many = (decoding(requests, captures=captures, steering=steering) for requests in (FEW, MANY))
    assert lines(many) - lines(few) <= 40 * (MANY - FEW)


def test_requests_without_work_for_the_taps_cost_nothing():
    assert lines(decoding(0)) <= 20


@pytest.mark.parametrize(("captures", "steering"), KINDS)
def test_a_step_calls_the_driver_once_for_its_places_and_never_torch(captures, steering):
    loop = decoding(MANY, MANY_LAYERS, captures=captures, steering=steering)
    with mock.patch.object(Stages, "upload", autospec=True) as upload:
        seen = dispatched(loop)
    assert upload.call_count == (captures is not Captures.NONE), "the programs are on the device"
    assert not seen.calls


@pytest.mark.parametrize(("captures", "steering"), KINDS)
def test_full_blocks_add_no_torch_calls(captures, steering):
    loop = decoding(captures=captures, steering=steering)
    steps = [dispatched(loop).calls for _ in range(33)]
    # For each request one block of the prompt, and one or two for 33 generated tokens: the first one is shorter.
    assert 2 * FEW <= loop.sink.sent <= 3 * FEW if captures is not Captures.NONE else loop.sink.sent == 0
    assert not any(steps)


def test_nothing_is_logged(caplog):
    loop = decoding(captures=Captures.ALL, steering=Steering.REQUEST)
    with caplog.at_level(0), structlog.testing.capture_logs() as records:
        for _ in range(40):
            loop.step()
    assert not records
    assert not caplog.records


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA reports calls that wait for the device")
@pytest.mark.parametrize(("captures", "steering"), KINDS)
def test_no_step_waits_for_the_device(captures, steering):
    loop = decoding(captures=captures, steering=steering, device=Device.CUDA)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            loop.step()
    finally:
        torch.cuda.set_sync_debug_mode(previous)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
