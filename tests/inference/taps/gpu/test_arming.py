"""What the GPU's tap writes into its tables for the layout of a step, in host memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from bench.host.loop import TorchWithoutCuda
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.gpu import tap as gpu_tap
from inference_svc.taps.gpu.tables import MAX_BANK_ROWS, TablesFullError
from inference_svc.taps.plan import Kind
from inference_svc.taps.points import TapPoints
from inference_svc.taps.steps.layout import NOWHERE, StepLayout
from inference_svc.taps.steps.programs import Program, Step

CPU = torch.device("cpu")
ROWS = 3


def steady(*vectors):
    """The layout of a batch whose requests each add another vector, without places."""
    programs = [
        Program.make((), before_steering=False, steps=[Step(Kind.ADD, row, (0,), 1.0, 0, 0)]) for row in vectors
    ]
    lines = [(row, row, NOWHERE, 0) for row in range(len(vectors))]
    return StepLayout(programs, np.array(lines, dtype=np.int64), moves=False)


def vectors(tap):
    """Return the vector that each row adds, as the kernels would find it; None for a row without a program."""
    tables = tap._tables
    found = []
    for program, *_ in tables.rows.tolist():
        lines = tap._programs.lines
        found.append(None if program < 0 else int(lines[program, 1, 4]) & (MAX_BANK_ROWS - 1))
    return found


@pytest.fixture
def make_tap(monkeypatch):
    def make(spare=0):
        monkeypatch.setattr(gpu_tap, "_SPARE_PROGRAMS", spare)
        with mock.patch.object(gpu_tap, "torch", TorchWithoutCuda()):
            return gpu_tap.CudaTap(VectorBank(16, 4, CPU), None, TapPoints(0, 1), ROWS, ROWS)

    return make


@pytest.mark.parametrize("spare", [0, 16], ids=["programs of one batch fit", "those of all batches fit"])
def test_batches_take_turns(make_tap, spare):
    tap = make_tap(spare)
    batches = {(1, 2, 3): steady(1, 2, 3), (4, 5): steady(4, 5), (6, 7, 1): steady(6, 7, 1)}
    for _ in range(3):
        for wanted, layout in batches.items():
            tap.arm(layout)
            assert vectors(tap) == [*wanted, *[None] * (ROWS - len(wanted))]


def test_the_programs_of_batches_that_take_turns_are_looked_up_once(make_tap):
    tap = make_tap(spare=16)
    first, second = steady(1, 2, 3), steady(4, 5)
    with mock.patch.object(tap._programs, "place", wraps=tap._programs.place) as place:
        for _ in range(5):
            tap.arm(first)
            tap.arm(second)
    assert place.call_count == 2


def test_programs_keep_their_vectors_when_the_tables_start_anew(make_tap):
    tap = make_tap(spare=16)
    first = steady(1, 2, 3)
    tap.arm(first)
    tap.arm(steady(4, 5))
    place, fails = tap._programs._place, iter([True])

    def place_at_second(programs):
        if next(fails, False):
            raise TablesFullError  # as if the room was fragmented
        return place(programs)

    with mock.patch.object(tap._programs, "_place", place_at_second):
        tap.arm(steady(7, 8, 9))
    tap.arm(first)
    assert vectors(tap) == [1, 2, 3]


def test_the_layouts_that_were_used_last_are_kept(make_tap):
    tap = make_tap(spare=64)
    layouts = [steady(number % 16) for number in range(20)]
    for number, layout in enumerate(layouts):
        tap.arm(layout)
        assert vectors(tap)[0] == number % 16
        tap.arm(layouts[0])
    assert list(tap._armed) == [id(layout.lines) for layout in [*layouts[-7:], layouts[0]]]


def test_on_a_device_the_driver_uploads_the_rows_on_the_current_stream(make_tap, monkeypatch):
    tap, calls = make_tap(), []

    def queue_upload(target, source, nbytes, stream):
        calls.append((nbytes, stream))
        ctypes.memmove(target, source, nbytes)

    monkeypatch.setattr(tap._stages, "_is_on_host", False)
    monkeypatch.setattr(gpu_tap.driver, "queue_upload", queue_upload)
    monkeypatch.setattr(gpu_tap.driver, "_current_handle", None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    for wanted in ((1, 2, 3), (4, 5)):
        tap.arm(steady(*wanted))
        assert vectors(tap) == [*wanted, *[None] * (ROWS - len(wanted))]
    assert calls == [(48, 7), (48, 7)]
