"""The check at startup that copies arrive, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inference_svc.taps.gpu import host_copies
from inference_svc.taps.gpu.copy_check import CannotCopyError, check_copies
from inference_svc.taps.gpu.driver import CopyFailedError
from inference_svc.taps.gpu.host_copies import HostCopies
from tests.inference.taps.gpu.copies_without_gpu import queue_lines, without_gpu

POOL = torch.zeros(16 * 17, 24, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with without_gpu():
        yield


def check():
    ring = np.zeros(1 << 15, dtype=np.uint8)
    check_copies(POOL, ring, ring.ctypes.data, HostCopies())
    return ring


def test_rows_that_arrive_pass_and_leave_nothing_behind():
    assert not check().any()
    assert not POOL.any()


def test_rows_that_do_not_arrive_whole_are_noticed(monkeypatch):
    monkeypatch.setattr(
        host_copies, "queue_lines", lambda lines, on: queue_lines(lines._replace(width=lines.width - 1), on)
    )
    with pytest.raises(CannotCopyError, match=r"arrive changed \(1 units of 1 positions\)"):
        check()


@pytest.mark.parametrize("error", [CopyFailedError("failed with 201"), OSError("libcuda.so.1: no such file")], ids=repr)
def test_a_driver_that_copies_nothing_is_named(monkeypatch, error):
    def refuse(lines, stream):
        raise error

    monkeypatch.setattr(host_copies, "queue_lines", refuse)
    with pytest.raises(CannotCopyError, match=f"cannot be copied from the device to the ring: {error}"):
        check()
