"""Copies from the device to the host, as far as they can be tested without a GPU."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.taps.gpu import host_copies
from inference_svc.taps.gpu.driver import CopyFailedError
from inference_svc.taps.gpu.host_copies import HostCopies, Lines, divided, queue_lines
from tests.inference.taps.gpu.copies_without_gpu import without_gpu

GUARD = 24


@given(
    units=st.integers(1, 5),
    positions=st.integers(1, 7),
    gap=st.integers(0, 3),
    width=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    piece=st.integers(1, 200),
)
def test_rows_arrive_without_their_gaps_and_nothing_else_changes(units, positions, gap, width, dtype, piece):
    capacity = positions + gap
    pool = torch.arange(3 + units * capacity * width).to(dtype)[3:].view(units, capacity, width)
    rows = pool[:, :positions]
    memory = np.full(rows.numel() * rows.itemsize + 2 * GUARD, 0xEE, dtype=np.uint8)
    with without_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "PIECE_BYTES", piece)
        HostCopies().copy(rows, memory.ctypes.data + GUARD)
    assert bytes(memory[GUARD:-GUARD]) == bytes(rows.contiguous().view(torch.uint8).numpy())
    assert (memory[:GUARD] == 0xEE).all()
    assert (memory[-GUARD:] == 0xEE).all()


@given(width=st.integers(1, 300), gap=st.integers(0, 40), height=st.integers(1, 40), piece=st.integers(1, 400))
def test_pieces_are_small_and_follow_each_other(width, gap, height, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "PIECE_BYTES", piece)
        pieces = list(divided(Lines(1 << 20, width + gap, 7, width, height)))
    assert all(0 < one.nbytes <= piece for one in pieces)
    assert all(one.target + one.nbytes == two.target for one, two in pairwise(pieces))
    assert (pieces[0].target, sum(one.nbytes for one in pieces)) == (7, width * height)


@pytest.mark.parametrize("shape", [(3, 0, 8), (0, 3, 8)], ids=str)
def test_no_rows_are_no_copies(shape):
    HostCopies().copy(torch.zeros(shape), 7)


def test_lines_without_gaps_are_one_copy():
    assert list(divided(Lines(4096, 32, 7, 32, 36))) == [Lines(4096, 32 * 36, 7, 32 * 36, 1)]
    assert [piece.pitch for piece in divided(Lines(0, 3 << 30, 0, 3 << 30, 1))] == [host_copies.PIECE_BYTES] * 48
    assert list(divided(Lines(4096, 32, 7, 31, 36))) == [Lines(4096, 32, 7, 31, 36)]


@pytest.fixture
def log(monkeypatch):
    """What is queued, recorded and waited for. Copies go to the stream `current.stream`."""
    log, current = [], SimpleNamespace(stream=SimpleNamespace(cuda_stream=5))

    class Event:
        def __init__(self, *, blocking):
            assert blocking

        def record(self, on):
            log.append(f"record on {on.cuda_stream}")

        def synchronize(self):
            log.append("wait")

    cuda = SimpleNamespace(Event=Event, current_stream=lambda: current.stream)
    monkeypatch.setattr(host_copies, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(host_copies, "queue_lines", lambda lines, on: log.append((lines.nbytes, on)))
    monkeypatch.setattr(host_copies, "PIECE_BYTES", 100)
    return SimpleNamespace(calls=log, current=current)


def test_no_more_than_a_piece_is_queued_at_a_time(log):
    """The model's own copies wait behind all that is queued."""
    copies = HostCopies()
    for size in (250, 30, 20, 1):
        copies.copy(torch.zeros(1, size, dtype=torch.uint8), 0)
    assert log.calls == [
        (100, 5), "record on 5", "wait",
        (100, 5), "record on 5", "wait",
        (50, 5), (30, 5), (20, 5), "record on 5", "wait",
        (1, 5),
    ]  # fmt: skip


def test_only_so_many_copies_are_queued_at_a_time(log, monkeypatch):
    monkeypatch.setattr(host_copies, "MOST_COPIES", 2)
    copies = HostCopies()
    for _ in range(3):
        copies.copy_lines(Lines(0, 1, 0, 1, 1))
    assert log.calls == [(1, 5), (1, 5), "record on 5", "wait", (1, 5)]


def test_copies_of_one_stream_are_done_before_those_of_another_are_queued(log):
    copies = HostCopies()
    copies.copy_lines(Lines(0, 1, 0, 1, 1))
    log.current.stream = SimpleNamespace(cuda_stream=6)
    copies.copy_lines(Lines(0, 1, 0, 1, 1))
    copies.wait()
    copies.wait()
    assert log.calls == [(1, 5), "record on 5", "wait", (1, 6), "record on 6", "wait"]


class Driver:
    """Stands in for libcuda: it keeps the last request and answers with a code."""

    def __init__(self, code):
        self.code, self.request, self.stream = code, None, None

    def cuMemcpy2DAsync_v2(self, request, stream):
        self.request, self.stream = request._obj, stream.value
        return self.code


def test_the_driver_gets_the_lines(monkeypatch):
    driver = Driver(0)
    monkeypatch.setattr(host_copies, "library", lambda: driver)
    queue_lines(Lines(source=4096, pitch=300, target=64, width=200, height=9), 17)
    request = driver.request
    assert (request.srcMemoryType, request.srcDevice, request.srcPitch) == (2, 4096, 300)
    assert (request.dstMemoryType, request.dstHost, request.dstPitch) == (1, 64, 200)
    assert (request.WidthInBytes, request.Height, driver.stream) == (200, 9, 17)
    assert ctypes.sizeof(request) == 128  # as cuda.h lays it out on 64-bit machines


def test_a_copy_that_the_driver_refuses_is_an_error(monkeypatch):
    monkeypatch.setattr(host_copies, "library", lambda: Driver(700))
    with pytest.raises(CopyFailedError, match=r"1800 bytes were not copied to the host: .* failed with 700"):
        queue_lines(Lines(4096, 300, 64, 200, 9), 17)
