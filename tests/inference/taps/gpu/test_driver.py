"""What CUDA's driver is asked for, with a stand-in for its library."""

from __future__ import annotations

import pytest

from inference_svc.taps.gpu import driver


class Library:
    """Stands in for libcuda: it keeps the last request and answers with a code."""

    def __init__(self, code):
        self.code, self.request = code, None

    def cuMemcpyHtoDAsync_v2(self, target, source, nbytes, stream):
        self.request = (target.value, source.value, nbytes.value, stream.value)
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
