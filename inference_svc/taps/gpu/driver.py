"""CUDA's driver and streams, for what each step needs: PyTorch's own calls run through much more code on the host."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_current_handle = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001 - as Inductor's code
"""Returns the handle of a device's current stream; None if this build of PyTorch has no CUDA."""


class CopyFailedError(RuntimeError):
    """CUDA did not accept a copy."""


@cache
def library() -> Any:
    """Return the driver's library, for calls on streams whose queues never get full. These calls keep the GIL.

    They take only microseconds. To get the GIL back takes longer. And while a thread of the sink waits for the GIL,
    each torch call of the engine's thread wakes it, usually in vain.
    """
    return ctypes.PyDLL("libcuda.so.1")


@cache
def patient_library() -> Any:
    """Return the driver's library, for calls that wait while the queue of a stream is full. They let go of the GIL."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyHtoDAsync_v2.argtypes = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    return library


class CurrentStream:
    """Returns the current stream of a device.

    `torch.cuda.current_stream` makes an object at each call. In an engine's process that takes more time than the
    upload of a step, because the code is not in the processor's caches then. Here, an object is made only if the stream
    is not that of the call before.
    """

    def __init__(self, device: torch.device) -> None:
        """Take a device with an index."""
        self._index = device.index
        self._stream: torch.cuda.Stream | None = None

    def get(self) -> torch.cuda.Stream:
        """Return the stream."""
        stream = self._stream
        if _current_handle is None or stream is None or stream.cuda_stream != _current_handle(self._index):
            self._stream = stream = torch.cuda.current_stream(self._index)
        return stream


def queue_upload(target: int, source: int, nbytes: int, stream: int) -> None:
    """Queue a copy to the device on a CUDA stream.

    The stream may be the model's, which has a full queue in steps outside CUDA graphs.

    Args:
        target: An address of the device.
        source: An address of the host, pinned. The bytes must stay until they have been copied.
        nbytes: How many bytes.
        stream: The handle of the stream.

    Raises:
        CopyFailedError: CUDA does not accept the copy.
    """
    if code := patient_library().cuMemcpyHtoDAsync_v2(target, source, nbytes, stream):
        raise CopyFailedError(f"{nbytes} bytes were not copied to the device: cuMemcpyHtoDAsync failed with {code}.")
