"""What CUDA's driver is asked for, with a stand-in for its library."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from inference_svc.taps.gpu import driver


class Library:
    """Stands in for libcuda: it keeps the last request and answers with a code."""

    def __init__(self, code):
        self.code, self.request = code, None

    def cuMemcpyHtoDAsync_v2(self, target, source, nbytes, stream):
        self.request = (target, source, nbytes, stream)
        return self.code


def test_an_upload(monkeypatch):
    library = Library(0)
    monkeypatch.setattr(driver, "patient_library", lambda: library)
    driver.queue_upload(target=1 << 40, source=1 << 46, nbytes=48, stream=17)
    assert library.request == (1 << 40, 1 << 46, 48, 17)


def test_an_upload_that_the_driver_refuses_is_an_error(monkeypatch):
    monkeypatch.setattr(driver, "patient_library", lambda: Library(700))
    with pytest.raises(driver.CopyFailedError, match=r"48 bytes were not copied to the device: .* failed with 700"):
        driver.queue_upload(64, 4096, 48, 17)


def test_the_driver_takes_addresses_of_64_bits(monkeypatch):
    function = SimpleNamespace()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuMemcpyHtoDAsync_v2=function))
    driver.patient_library.__wrapped__()
    assert function.argtypes == (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class Streams:
    """Stands in for torch's streams: the current one has this handle."""

    def __init__(self, monkeypatch, *, has_handles):
        self.handle, self.made = 1, []
        handle_of = (lambda device: self.handle + 100 * device) if has_handles else None
        monkeypatch.setattr(driver, "_current_handle", handle_of)
        monkeypatch.setattr(driver.torch.cuda, "current_stream", self.current_stream)

    def current_stream(self, device):
        assert device == 0
        self.made.append(self.handle)
        return SimpleNamespace(cuda_stream=self.handle)


def test_a_stream_object_is_made_only_when_the_stream_changes(monkeypatch):
    streams = Streams(monkeypatch, has_handles=True)
    current = driver.CurrentStream(torch.device("cuda", 0))
    for handle in (1, 1, 2, 2, 1):
        streams.handle = handle
        assert current.get().cuda_stream == handle
    assert streams.made == [1, 2, 1]


def test_without_handles_each_call_asks_torch(monkeypatch):
    streams = Streams(monkeypatch, has_handles=False)
    current = driver.CurrentStream(torch.device("cuda", 0))
    for handle in (1, 2):
        streams.handle = handle
        assert current.get().cuda_stream == handle
