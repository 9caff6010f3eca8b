"""Calls of CUDA's driver, for copies that are queued in every step or for which PyTorch has no function."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


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
    return ctypes.CDLL("libcuda.so.1")


def queue_upload(target: int, source: int, nbytes: int, stream: int) -> None:
    """Queue a copy to the device on a CUDA stream. A copy by torch runs through much more code on the host.

    The stream may be the model's, which has a full queue in steps outside CUDA graphs.

    Args:
        target: An address of the device.
        source: An address of the host, pinned. The bytes must stay until they have been copied.
        nbytes: How many bytes.
        stream: The handle of the stream.

    Raises:
        CopyFailedError: CUDA does not accept the copy.
    """
    code = patient_library().cuMemcpyHtoDAsync_v2(
        ctypes.c_uint64(target), ctypes.c_void_p(source), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)
    )
    if code:
        raise CopyFailedError(f"{nbytes} bytes were not copied to the device: cuMemcpyHtoDAsync failed with {code}.")
